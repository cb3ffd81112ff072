"""Config(deterministic=True): tokens and log-probabilities are the same bits in every schedule.

The reference is each prompt alone in an empty engine; 64 prompts in 24 schedules make 1,536
comparisons. Every second request draws at random with a seed, all report log-probabilities.
"""

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams

NUM_TOKENS = 4
SHAPE = dict(heads=4, kv_heads=2, head_dim=16, hidden=64)
# Schedule -> settings; "order" is of the prompts, "before" what the engine ran first.
SCHEDULES = {
    "batch of 1": dict(max_num_seqs=1),
    "batch of 3": dict(max_num_seqs=3),
    "batch of 16": dict(max_num_seqs=16),
    "batch of 64": {},
    "reversed": dict(order="reversed"),
    "reversed, batch of 3": dict(order="reversed", max_num_seqs=3),
    "shuffled": dict(order="shuffled"),
    "shuffled, batch of 16": dict(order="shuffled", max_num_seqs=16),
    "budget 1": dict(max_num_batched_tokens=1),
    "budget 5": dict(max_num_batched_tokens=5),
    "budget 8, batch of 3": dict(max_num_batched_tokens=8, max_num_seqs=3),
    "budget 33, shuffled": dict(max_num_batched_tokens=33, order="shuffled"),
    "blocks of 3, budget 8": dict(kvcache_block_size=3, max_num_batched_tokens=8),
    "blocks of 16": dict(kvcache_block_size=16),
    "blocks of 256, no overlap": dict(kvcache_block_size=256, overlap=False),
    "warm": dict(before="all"),
    "warm, reversed, budget 8": dict(before="all", order="reversed", max_num_batched_tokens=8),
    "half warm, shuffled, batch of 16": dict(before="half", order="shuffled", max_num_seqs=16),
    "partly evicted": dict(before="all", num_kvcache_blocks=100, max_num_seqs=8),
    "partly evicted, budget 8": dict(
        before="all", num_kvcache_blocks=90, max_num_seqs=8, max_num_batched_tokens=8
    ),
    "preempted": dict(num_kvcache_blocks=12),
    "preempted, budget 8, reversed": dict(
        num_kvcache_blocks=14, max_num_batched_tokens=8, order="reversed"
    ),
    "preempted, no overlap": dict(num_kvcache_blocks=16, overlap=False),
    "no overlap, batch of 3, budget 8": dict(
        overlap=False, max_num_seqs=3, max_num_batched_tokens=8
    ),
}


def make_llm(checkpoint, **kwargs):
    settings = dict(kvcache_block_size=2, max_model_len=64, device="cpu", deterministic=True)
    return LLM(str(checkpoint), **{**settings, **kwargs})


def make_prompts(num=64):
    """1 to 10 tokens; every second begins with the same 4 or fewer."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, 1 + i % 10).tolist() for i in range(num)]
    return [([7, 8, 9, 10][: len(p)] + p[4:]) if i % 4 > 1 else p for i, p in enumerate(prompts)]


PROMPTS = make_prompts()


def params(i, num_tokens=NUM_TOKENS, **kwargs):
    return SamplingParams(
        temperature=i % 2, seed=i, max_tokens=num_tokens, ignore_eos=True, logprobs=2, **kwargs
    )


def bits(logprobs):
    """Every token, rank and float of a list of reports, so that -0.0 is not 0.0."""
    return [[(t, x.rank, x.logprob.hex()) for t, x in entry.items()] for entry in logprobs]


def run(llm, which):
    """{prompt's number: tokens and bits} of a call with these prompts in this order."""
    outputs = llm.generate([PROMPTS[i] for i in which], [params(i) for i in which], use_tqdm=False)
    results = [(o["token_ids"], bits(o["logprobs"])) for o in outputs]
    return dict(zip(which, results, strict=True))


def run_alone(llm, which=range(64)):
    results = {}
    for i in which:
        llm.scheduler.reset()
        results |= run(llm, [i])
    return results


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    return tiny_checkpoint(**SHAPE)


@pytest.fixture(scope="module")
def alone(checkpoint):
    with make_llm(checkpoint) as llm:
        return run_alone(llm)


@pytest.mark.parametrize("name", SCHEDULES)
def test_same_bits_in_every_schedule(name, checkpoint, alone):
    settings = dict(SCHEDULES[name])
    order, before = settings.pop("order", ""), settings.pop("before", "")
    which = list(range(64))
    if order == "shuffled":
        which = np.random.default_rng(len(name)).permutation(64).tolist()
    elif order:
        which.reverse()
    with make_llm(checkpoint, **settings) as llm:
        steps = count_scheduled_tokens(llm)
        if before:
            run(llm, range(0, 64, 2 if before == "half" else 1))
        cold = sum(steps)
        steps.clear()
        found = run(llm, which)
        preemptions = llm.scheduler.num_preemptions
    assert [i for i in which if found[i] != alone[i]] == []
    assert preemptions > 0 or "preempted" not in name
    if before == "all":
        assert least_scheduled_tokens() <= sum(steps) < cold
        assert ("evicted" in name) == (sum(steps) > least_scheduled_tokens())


def count_scheduled_tokens(llm):
    """A list that gets the number of tokens of each step from now on."""
    counts, launch = [], llm._runner.launch

    def counting(batch):
        counts.append(batch.num_tokens)
        return launch(batch)

    llm._runner.launch = counting
    return counts


def least_scheduled_tokens(block_size=2):
    """What every full block in the cache leaves of the prompts, one token each at the least, and
    the steps after them."""
    prefills = sum(len(p) - (len(p) - 1) // block_size * block_size for p in PROMPTS)
    return prefills + 64 * (NUM_TOKENS - 1)


def test_decode_equals_prefill_of_what_it_made(checkpoint, alone):
    """A request that is sent again with half of its answer goes on as before, and the reports
    on the prompt's tokens are those on the drawn ones."""
    cut = NUM_TOKENS // 2
    prompts = [PROMPTS[i] + alone[i][0][:cut] for i in range(64)]
    again = [params(i, NUM_TOKENS - cut, prompt_logprobs=2) for i in range(64)]
    with make_llm(checkpoint, max_num_batched_tokens=50) as llm:
        outputs = llm.generate(prompts, again, use_tqdm=False)
    for i, output in enumerate(outputs):
        tokens, reports = alone[i]
        assert output["token_ids"] == tokens[cut:]
        assert bits(output["prompt_logprobs"][-cut:]) + bits(output["logprobs"]) == reports


def test_control_without_the_mode_bits_differ(checkpoint):
    with make_llm(checkpoint, deterministic=False) as llm:
        single = run_alone(llm)
        llm.scheduler.reset()
        assert run(llm, range(64)) != single


@pytest.mark.parametrize(
    "shape, dtype",
    [
        (dict(heads=6, kv_heads=3, head_dim=20, hidden=80, tied=False), "float32"),
        (dict(heads=4, kv_heads=4, head_dim=16, hidden=64, attention_bias=True), "float32"),
        (SHAPE, "bfloat16"),
    ],
)
def test_same_bits_in_other_shapes_and_types(shape, dtype, tiny_checkpoint):
    """Heads of 20 numbers: rows that no vector register divides, at any alignment."""
    which = range(0, 64, 3)
    with make_llm(tiny_checkpoint(**shape), dtype=dtype) as llm:
        single = run_alone(llm, which)
        llm.scheduler.reset()
        assert run(llm, which) == single


def test_same_bits_with_two_threads(checkpoint, alone):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with make_llm(checkpoint) as llm:
            single = run_alone(llm, range(10))
            llm.scheduler.reset()
            assert run(llm, range(10)) == single
    finally:
        torch.set_num_threads(before)


def test_same_bits_on_two_ranks(checkpoint):
    with make_llm(checkpoint, tensor_parallel_size=2, num_kvcache_blocks=64) as llm:
        single = run_alone(llm, range(10))
        assert run(llm, range(9, -1, -1)) == single


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_refused_on_cuda(device, checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="^deterministic: got True on CUDA, needs the CPU"):
        make_llm(checkpoint, device=device)
