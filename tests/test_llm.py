"""The engine end to end on the CPU: equal to transformers, and to itself however it is run."""

import itertools

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.parity import assert_equal_to_hf, load_hf

BLOCK = 16
SHAPES = {
    "mha": dict(heads=4, kv_heads=4, head_dim=16, hidden=64),
    "gqa": dict(heads=4, kv_heads=2, head_dim=16, hidden=64),
    "untied": dict(heads=4, kv_heads=2, head_dim=16, hidden=64, tied=False),
    "bias": dict(heads=4, kv_heads=2, head_dim=16, hidden=64, attention_bias=True),
    "wide_heads": dict(heads=4, kv_heads=1, head_dim=32, hidden=48),
    "odd": dict(heads=6, kv_heads=3, head_dim=20, hidden=80, tied=False),
}
# 1, B-1, B, B+1, 2B tokens and more: the edges of a block, then lengths in between.
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 3, 24, 57, 100]


def random_prompts(num: int, vocab: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    lengths = itertools.cycle(LENGTHS)
    return [rng.integers(0, vocab, next(lengths)).tolist() for _ in range(num)]


@pytest.fixture
def make_llm():
    """LLM(...) on the CPU with small blocks; closed after the test."""
    opened = []

    def make(checkpoint, **kwargs):
        kwargs = {"kvcache_block_size": BLOCK, "max_model_len": 256, "device": "cpu", **kwargs}
        opened.append(LLM(str(checkpoint), **kwargs))
        return opened[-1]

    yield make
    for llm in opened:
        llm.close()


def greedy(llm, prompts, num_tokens=24):
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return [o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_tokens_and_logprobs_equal_transformers(shape, tiny_checkpoint, make_llm):
    """50 prompts x 32 tokens for each of 6 shapes: every token equal, log-probabilities to 1e-4."""
    checkpoint = tiny_checkpoint(**SHAPES[shape])
    hf = load_hf(checkpoint, torch.float32)
    prompts = random_prompts(50, hf.config.vocab_size)
    gap = assert_equal_to_hf(make_llm(checkpoint), hf, prompts, 32)
    print(f"{shape}: largest log-probability gap {gap:.2e}")


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    return tiny_checkpoint(**SHAPES["gqa"])


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(64, 256)


@pytest.fixture(scope="module")
def alone(checkpoint, prompts):
    """The reference run: one prompt at a time, each in a cold engine of ample size."""
    with LLM(str(checkpoint), kvcache_block_size=BLOCK, max_model_len=256, device="cpu") as llm:
        tokens = []
        for prompt in prompts:
            llm.scheduler.reset()
            tokens += greedy(llm, [prompt])
    return tokens


class TestEqualToItself:
    """Two ways of running the same prompts give the same tokens."""

    def test_batch_of_64_equals_one_by_one(self, checkpoint, prompts, alone, make_llm):
        assert greedy(make_llm(checkpoint), prompts) == alone

    @pytest.mark.parametrize("budget", [1, 7, BLOCK, BLOCK + 1, 64])
    def test_chunked_prefill_equals_whole(self, budget, checkpoint, prompts, alone, make_llm):
        """R03: a chunk whose keys reach past it attends to slots not written yet, silently."""
        llm = make_llm(checkpoint, max_num_batched_tokens=budget)
        assert greedy(llm, prompts[:24]) == alone[:24]

    @pytest.mark.parametrize("budget", [24, 16384])
    def test_warm_prefix_cache_equals_cold(self, budget, checkpoint, prompts, alone, make_llm):
        """R01: a prompt of a whole number of blocks, seen before, left nothing to compute."""
        llm = make_llm(checkpoint, max_num_batched_tokens=budget)
        assert greedy(llm, prompts) == alone
        assert greedy(llm, prompts) == alone

    @pytest.mark.parametrize("num_blocks", [10, 16, 40])
    def test_preempted_equals_not(self, num_blocks, checkpoint, prompts, alone, make_llm):
        """R02: work counted before the cached blocks were, after a preemption."""
        llm = make_llm(checkpoint, num_kvcache_blocks=num_blocks)
        assert greedy(llm, prompts) == alone
        assert num_blocks > 16 or llm.scheduler.num_preemptions > 0
        assert llm.scheduler.block_manager.num_free_blocks == num_blocks

    def test_many_growing_requests_in_a_small_pool(self, checkpoint, make_llm):
        """R02: 64 prompts just under a block, each growing by two blocks, in 12 blocks."""
        prompts = [p[:1] * (BLOCK - 6) for p in random_prompts(64, 256, seed=1)]
        small = make_llm(checkpoint, num_kvcache_blocks=12)
        large = make_llm(checkpoint)
        assert greedy(small, prompts, 2 * BLOCK) == greedy(large, prompts, 2 * BLOCK)
        assert small.scheduler.num_preemptions > 0
        assert small.scheduler.block_manager.num_free_blocks == 12

    def test_evicted_prefix_is_not_read_again(self, checkpoint, make_llm):
        """R04: a recycled block that kept its hash entry gave one prompt another's keys."""
        a, b = random_prompts(10, 256, seed=2)[9], random_prompts(20, 256, seed=3)[19]
        longer = a + [5, 6, 7]
        llm = make_llm(checkpoint, num_kvcache_blocks=9)
        for prompt in (a, b, longer):
            fresh = make_llm(checkpoint)
            assert greedy(llm, [prompt]) == greedy(fresh, [prompt])

    @pytest.mark.parametrize("block_size", [1, 3, 16, 256])
    def test_any_block_size(self, block_size, checkpoint, prompts, alone, make_llm):
        llm = make_llm(checkpoint, kvcache_block_size=block_size)
        assert greedy(llm, prompts[:10]) == alone[:10]

    def test_results_come_in_submission_order(self, checkpoint, prompts, alone, make_llm):
        """Later prompts finish first; the order of the results does not follow."""
        lens = [24 - i % 24 for i in range(64)]
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lens]
        outputs = make_llm(checkpoint).generate(prompts, params, use_tqdm=False)
        assert [o["token_ids"] for o in outputs] == [
            t[:n] for t, n in zip(alone, lens, strict=True)
        ]

    def test_step_by_hand_equals_generate(self, checkpoint, prompts, alone, make_llm):
        llm = make_llm(checkpoint)
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        ids = [llm.add_request(prompt, params) for prompt in prompts[:10]]
        results = {}
        while not llm.is_finished():
            results.update(llm.step())
        assert [results[i]["token_ids"] for i in ids] == alone[:10]

    def test_greedy_and_sampled_rows_share_a_batch(self, checkpoint, prompts, alone, make_llm):
        params = [
            SamplingParams(temperature=i % 2, max_tokens=24, ignore_eos=True) for i in range(20)
        ]
        outputs = make_llm(checkpoint).generate(prompts[:20], params, use_tqdm=False)
        assert [o["token_ids"] for o in outputs[::2]] == alone[:20:2]
        assert [o["token_ids"] for o in outputs[1::2]] != alone[1:20:2]

    def test_same_seed_same_tokens(self, checkpoint, prompts, make_llm):
        params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
        runs = [
            [o["token_ids"] for o in make_llm(checkpoint, seed=s).generate(prompts[:8], params)]
            for s in (1, 1, 2)
        ]
        assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    "shape, kwargs",
    [
        ("gqa", dict(max_num_batched_tokens=64)),
        ("bias", {}),
        ("untied", dict(overlap=False)),
        # R06: after a preemption the workers need the tokens again, not only the last one.
        # R35: workers took the default block size whatever the engine's was.
        ("gqa", dict(num_kvcache_blocks=14, kvcache_block_size=10)),
    ],
)
def test_two_ranks_equal_one(shape, kwargs, tiny_checkpoint):
    checkpoint = str(tiny_checkpoint(**SHAPES[shape]))
    prompts = random_prompts(20, 256)
    settings = dict(max_model_len=256, device="cpu")
    with LLM(checkpoint, kvcache_block_size=BLOCK, **settings) as llm:
        expected = greedy(llm, prompts)
    with LLM(checkpoint, tensor_parallel_size=2, **{**settings, **kwargs}) as llm:
        assert greedy(llm, prompts) == expected
        assert llm.scheduler.num_preemptions > 0 or "num_kvcache_blocks" not in kwargs


def test_engine_of_several_ranks_is_alone_in_its_process(tiny_checkpoint):
    """Ranks belong to the process: a second engine would use the first one's."""
    checkpoint = str(tiny_checkpoint(**SHAPES["gqa"]))
    settings = dict(num_kvcache_blocks=8, device="cpu")
    with LLM(checkpoint, **settings) as one:
        with pytest.raises(RuntimeError, match="close"):
            LLM(checkpoint, tensor_parallel_size=2, **settings)
        expected = greedy(one, [[1, 2, 3]])
    with LLM(checkpoint, tensor_parallel_size=2, **settings) as two:
        with pytest.raises(RuntimeError, match="close"):
            LLM(checkpoint, **settings)
        assert greedy(two, [[1, 2, 3]]) == expected
