"""What prompts share is computed once, in one step too, and changes no token (fp32, CPU)."""

import logging
import random

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine import input_batch, model_runner, prefix_groups
from nanovllm.engine.prefix_groups import DecodeOrder, work_list
from tests.test_bundled import BUNDLED

BLOCK = 16


def make(**settings):
    settings = {"device": "cpu", "kvcache_block_size": BLOCK, "max_model_len": 512, **settings}
    return LLM(str(BUNDLED), **settings)


def num_computed(outputs):
    return sum(len(o["prompt_token_ids"]) - o["num_cached_tokens"] for o in outputs)


def random_tree(num_prompts, seed):
    """Prompts that begin with one of a few documents, which begin with one of two system prompts,
    and with pieces of these, so that they part inside blocks and at their ends."""
    rng = random.Random(seed)

    def words(n):
        return [rng.randrange(2000) for _ in range(n)]

    stems = [words(rng.choice([BLOCK, 2 * BLOCK, 37])) for _ in range(2)]
    documents = [rng.choice(stems) + words(rng.choice([5, BLOCK, 40])) for _ in range(4)]
    prompts = []
    for _ in range(num_prompts):
        whole = rng.choice(documents) + words(rng.choice([0, 1, 9, BLOCK]))
        prompts.append(whole[: rng.choice([len(whole), len(whole), rng.randint(1, len(whole))])])
    return prompts


@pytest.mark.parametrize("rest", [0, 1, 5])
def test_copies_in_one_call_are_computed_once(rest):
    """Eight of three blocks: one copy and seven last pieces; n samples likewise."""
    prompt = list(range(5, 5 + 3 * BLOCK + rest))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with make() as llm:
        outputs = llm.generate([prompt] * 8, params, use_tqdm=False)
    assert num_computed(outputs) == len(prompt) + 7 * (rest or BLOCK)
    assert len({tuple(o["token_ids"]) for o in outputs}) == 1


def test_block_left_half_way_is_copied_as_far_as_it_is_equal():
    """300 tokens are shared: a block of 256, and 44 + 40 of the next, copied from the first."""
    rng = random.Random(3)
    head = [rng.randrange(2000) for _ in range(340)]
    prompts = [head + [rng.randrange(2000) for _ in range(n)] for n in (300, 20, 100)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with make(kvcache_block_size=256, max_model_len=1024) as llm:
        together = [llm.generate(p, params, use_tqdm=False)[0] for p in prompts]
    assert [o["num_cached_tokens"] for o in together] == [0, 340, 340]
    for prompt, output in zip(prompts, together, strict=True):
        with make(kvcache_block_size=256, max_model_len=1024) as llm:
            assert (
                llm.generate(prompt, params, use_tqdm=False)[0]["token_ids"]
                == (output["token_ids"])
            )


@pytest.mark.parametrize("settings", [{}, dict(overlap=False), dict(deterministic=True)], ids=str)
def test_samples_of_a_cached_prompt_begin_with_a_decode(settings, monkeypatch):
    """Of the prompt only the last token is left; penalties, which see all of it, are kept."""
    num_rows, enter = [], input_batch.enter

    def counted(batch, state):
        num_rows.append(batch.num_seqs)
        return enter(batch, state)

    monkeypatch.setattr(input_batch, "enter", counted)
    prompt = [7 * i % 1999 for i in range(512)]
    usual = dict(temperature=0.8, max_tokens=9, n=8, ignore_eos=True, seed=4)
    asks = dict(repetition_penalty=1.3, presence_penalty=0.5, logprobs=2)
    params = [SamplingParams(**usual), SamplingParams(**usual, **asks)]
    with make(kvcache_block_size=256, max_model_len=1024, **settings) as llm:
        first = llm.generate([prompt] * 2, params, use_tqdm=False)
        assert not num_rows
        again = llm.generate([prompt] * 2, params, use_tqdm=False)
    assert num_rows == [16]
    assert all_tokens(again) == all_tokens(first)


def test_last_line_of_the_log_says_how_much_was_cached(caplog):
    prompt = list(range(5, 5 + 3 * BLOCK + 2))
    with make() as llm, caplog.at_level(logging.INFO, "nanovllm"):
        llm.generate([prompt] * 2, SamplingParams(max_tokens=4, ignore_eos=True, n=2))
    assert "2 requests, 100 prompt tokens (48 % of them cached), 16 output tokens" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(max_num_batched_tokens=50),
        dict(num_kvcache_blocks=14, max_num_seqs=6),
        dict(overlap=False),
        dict(deterministic=True, max_num_seqs=5),
    ],
    ids=str,
)
def test_trees_of_prompts_give_the_tokens_of_each_alone(settings):
    prompts = random_tree(24, seed=1)
    params = [
        SamplingParams((0, 0.8)[i % 2], max_tokens=10, ignore_eos=True, seed=i, n=1 + (i % 6 == 1))
        for i in range(24)
    ]
    with make(**settings) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
    assert num_computed(together) < sum(map(len, prompts)) * 0.8
    for prompt, p, output in zip(prompts, params, together, strict=True):
        with make(num_kvcache_blocks=16, max_num_seqs=2) as llm:
            (alone,) = llm.generate([prompt], p, use_tqdm=False)
        assert [o["token_ids"] for o in output.get("outputs") or [output]] == [
            o["token_ids"] for o in alone.get("outputs") or [alone]
        ]


# -- cascade attention: what running sequences share is read once ----------------------------------


@pytest.fixture
def grouped_steps(monkeypatch):
    """Groups of two rows and one block are groups; the steps that had any, as they are built."""
    monkeypatch.setattr(DecodeOrder, "MIN_ROWS", 2)
    monkeypatch.setattr(DecodeOrder, "MIN_SAVED", 0)
    steps = []

    def counted(groups, *args):
        steps.append(groups)
        return work_list(groups, *args)

    monkeypatch.setattr(model_runner, "work_list", counted)
    return steps


def all_tokens(outputs):
    return [o["token_ids"] for output in outputs for o in output.get("outputs") or [output]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(max_num_batched_tokens=50, overlap=False),
        dict(num_kvcache_blocks=20, max_num_seqs=9),
        dict(schedule_policy="prefix", max_num_seqs=12),
        dict(kvcache_block_size=3, max_num_seqs=20),
        dict(tensor_parallel_size=2, max_num_seqs=14, num_kvcache_blocks=30),
    ],
    ids=str,
)
def test_groups_change_no_token(settings, seed, grouped_steps, monkeypatch):
    if "tensor_parallel_size" not in settings:  # other processes would not know
        monkeypatch.setattr(prefix_groups, "KEY_STEP", 1)
    prompts = random_tree(30, seed=10 + seed)
    params = [
        SamplingParams((0, 0.8)[i % 2], max_tokens=4 + i, ignore_eos=True, seed=i, n=(1, 3)[i % 2])
        for i in range(30)
    ]
    tokens = []
    for cascade_attention in (True, False):
        with make(cascade_attention=cascade_attention, **settings) as llm:
            first = llm.generate(prompts, params, use_tqdm=False)
            again = llm.generate(prompts[::-1], params[::-1], use_tqdm=False)  # cached, evicted
        tokens.append(all_tokens(first) + all_tokens(again))
        if cascade_attention:
            assert len(grouped_steps) > 20
            assert max(len(groups) for groups in grouped_steps) >= 2
            num_grouped = len(grouped_steps)
    assert tokens[0] == tokens[1]
    assert len(grouped_steps) == num_grouped, "grouped with cascade_attention=False"


def test_work_list_is_made_for_other_groups_only(grouped_steps):
    prompts = [[*range(5, 5 + 2 * BLOCK), i] for i in range(8)]
    with make() as llm:
        llm.generate(prompts, SamplingParams(0, max_tokens=30, ignore_eos=True), use_tqdm=False)
    assert [groups.tolist() for groups in grouped_steps] == [[[0, 8, 0, 2 * BLOCK]]]


def test_who_is_aborted_leaves_the_group(grouped_steps):
    """Who ends takes another request of the group along; what they have is as ever."""
    prompts = [[*range(5, 5 + 2 * BLOCK), i] for i in range(12)]
    params = [SamplingParams(0, max_tokens=4 + 2 * i, ignore_eos=True) for i in range(12)]
    with make() as llm:
        expected = all_tokens(llm.generate(prompts, params, use_tqdm=False))
        ids = [llm.add_request(*request) for request in zip(prompts, params, strict=True)]
        found = {}
        while not llm.is_finished():
            ended = llm.step()
            for request_id, output in ended:
                if output["finish_reason"] == "length":
                    llm.abort(request_id + 5)
            found.update(ended)
    assert [found[i]["finish_reason"] for i in ids].count("abort") >= 5
    for request_id, tokens in zip(ids, expected, strict=True):
        part = found[request_id]["token_ids"]
        assert part == tokens[: len(part)]
    sizes = {int(end - first) for groups in grouped_steps for first, end, _, _ in groups}
    assert len(sizes) > 5
