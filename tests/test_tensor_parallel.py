"""The engine on several ranks equals the engine on one: fp32 on the CPU, every token.

Which rows of the checkpoint a rank holds is tested in layers/test_parallel_layers.py, many shapes
of the model in models/test_qwen3.py; here are the cache, the sampler and the special rows above.
"""

import signal

import numpy as np
import pytest

from nanovllm import LLM, SamplingParams

# Ranks belong to the process: engines of several are made one after the other.
pytestmark = pytest.mark.xdist_group("tensor_parallel")

BLOCK = 8
SETTINGS = dict(kvcache_block_size=BLOCK, max_model_len=128, device="cpu")
SHAPES = {
    "one_kv_head": dict(heads=4, kv_heads=1, vocab=1001, attention_bias=True),
    "two_kv_heads": dict(heads=8, kv_heads=2, tied=False),
    "a_kv_head_each": dict(heads=4, kv_heads=2),
}
# Numbers of ranks; with kwargs prompts come in chunks and sequences are preempted.
TIGHT = dict(num_kvcache_blocks=24, max_num_batched_tokens=40)
RUNS = {
    "one_kv_head": [(2, {})],
    "two_kv_heads": [(2, {}), (4, {})],
    "a_kv_head_each": [(2, TIGHT)],
}


def random_prompts(num, vocab, seed=0):
    rng = np.random.default_rng(seed)
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1, 50]
    return [rng.integers(0, vocab, lengths[i % len(lengths)]).tolist() for i in range(num)]


def run(checkpoint, prompts, params, **kwargs):
    with LLM(str(checkpoint), **{**SETTINGS, **kwargs}) as llm:
        return llm.generate(prompts, params, use_tqdm=False), llm


def greedy_and_sampled(num_prompts):
    """Rows that the step itself draws; at a high temperature every token id comes up, and padding
    of the vocabulary, were it let through, would too."""
    temperatures = [0, 0, 1.0, 50.0]
    return [
        SamplingParams(temperature=temperatures[i % 4], max_tokens=16, ignore_eos=True)
        for i in range(num_prompts)
    ]


def special_rows(vocab):
    """What the step's rows are drawn again for, and rows without any of it in between.

    The biases push every token that there is below 0, which is the logit of padding.
    """
    common = dict(max_tokens=12, ignore_eos=True)
    low = dict.fromkeys(range(vocab), -100.0)
    return [
        SamplingParams(temperature=0, presence_penalty=1.0, frequency_penalty=0.5, **common),
        SamplingParams(temperature=0, repetition_penalty=1.7, logprobs=3, **common),
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=1.0, top_k=5, seed=7, **common),
        SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01, seed=8, n=2, logprobs=2, **common),
        SamplingParams(temperature=1.0, **common),
        SamplingParams(temperature=0, prompt_logprobs=4, **common),
        SamplingParams(temperature=30.0, top_k=vocab - 1, seed=9, logprobs=0, **common),
        SamplingParams(temperature=0, logit_bias=low, **common),
        SamplingParams(temperature=50.0, top_p=0.99, logit_bias=low, seed=10, **common),
        SamplingParams(temperature=0, min_tokens=4, max_tokens=12),
        SamplingParams(temperature=5.0, allowed_token_ids=[3, 1, vocab - 1], seed=11, **common),
    ]


def assert_same_logprobs(ours, theirs):
    assert (ours is None) == (theirs is None)
    for mine, his in zip(ours or [], theirs or [], strict=True):
        assert (mine is None) == (his is None)
        if mine is not None:
            assert mine.keys() == his.keys()
            for token, entry in mine.items():
                assert entry.rank == his[token].rank
                assert entry.logprob == pytest.approx(his[token].logprob, abs=1e-4)


def assert_same(ours, theirs, vocab):
    """Tokens, reasons and, to the project's bound, log-probabilities."""
    for mine, his in zip(ours, theirs, strict=True):
        assert mine["error"] is his["error"] is None
        assert_same_logprobs(mine["prompt_logprobs"], his["prompt_logprobs"])
        for a, b in zip(mine["outputs"], his["outputs"], strict=True):
            assert a["token_ids"] == b["token_ids"]
            assert max(a["token_ids"]) < vocab
            assert (a["finish_reason"], a["text"]) == (b["finish_reason"], b["text"])
            assert_same_logprobs(a["logprobs"], b["logprobs"])


@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_equal_one(shape, tiny_checkpoint):
    """Plain and special rows in one batch."""
    checkpoint, vocab = tiny_checkpoint(**SHAPES[shape]), SHAPES[shape].get("vocab", 259)
    params = greedy_and_sampled(12) + special_rows(vocab)
    prompts = random_prompts(len(params), vocab)
    expected, _ = run(checkpoint, prompts, params)
    # Or equality would say nothing about chance and padding.
    hot = [o["token_ids"] for p, o in zip(params, expected, strict=True) if p.temperature > 20]
    assert len(set(sum(hot, []))) > 40
    for tp_size, kwargs in RUNS[shape]:
        found, llm = run(checkpoint, prompts, params, tensor_parallel_size=tp_size, **kwargs)
        assert_same(found, expected, vocab)
        assert llm.scheduler.num_preemptions > 0 or not kwargs


def test_kv_heads_that_fit_no_rank_are_refused_before_any_starts(tiny_checkpoint):
    checkpoint = tiny_checkpoint(heads=6, kv_heads=3, head_dim=20, hidden=80, tied=False)
    with pytest.raises(ValueError, match=r"got 2.*num_key_value_heads = 3, try one of \[1, 3, 6\]"):
        LLM(str(checkpoint), tensor_parallel_size=2, **SETTINGS)


@pytest.fixture
def ctrl_c():
    """A shell's background jobs begin with SIGINT ignored, and so do these tests as one of them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("place", ["launch", "wait", "check"])
def test_interrupted_ranks_stay_in_step(place, tiny_checkpoint, monkeypatch, ctrl_c):
    """Ctrl-C in the middle of what they do together waits for its end, and the next call works."""
    checkpoint = tiny_checkpoint(**SHAPES["two_kv_heads"])
    prompts = random_prompts(4, 250)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(checkpoint), tensor_parallel_size=2, **SETTINGS) as llm:
        expected = [o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)]
        owner = llm._runner if place == "launch" else llm._loop._workers
        for at in (1, 2, 7):
            call, calls = getattr(owner, place), []

            def interrupted(*args, call=call, calls=calls, at=at):
                calls.append(args)
                if len(calls) == at:
                    ctrl_c()
                return call(*args)

            monkeypatch.setattr(owner, place, interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(prompts, params, use_tqdm=False)
            monkeypatch.undo()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            again = [o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)]
            assert again == expected


def test_second_interrupt_does_not_wait(tiny_checkpoint, monkeypatch, ctrl_c):
    """Of ranks that hang, say; then they are out of step, and the engine says why it ended."""
    with LLM(str(tiny_checkpoint(heads=4, kv_heads=2)), tensor_parallel_size=2, **SETTINGS) as llm:

        def interrupted_twice(batch):
            ctrl_c()
            ctrl_c()

        monkeypatch.setattr(llm._runner, "launch", interrupted_twice)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2]], use_tqdm=False)
        with pytest.raises(
            RuntimeError, match="this engine ended with KeyboardInterrupt in a step"
        ):
            llm.generate([[1, 2]], use_tqdm=False)
