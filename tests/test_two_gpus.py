"""Two ranks on two GPUs equal one: memory shared between them, graphs with sums."""

import os

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.utils import distributed
from tests.test_bundled import BUNDLED
from tests.test_llm import random_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.xdist_group("two_gpus"),
]


# Ranks that take turns on one GPU (tests/both_ranks) need milliseconds for each sum.
NUM_PROMPTS, NUM_TOKENS = (5, 5) if "BOTH_RANKS_ON_ONE_GPU" in os.environ else (24, 24)


def run(num_ranks, prompts, params, **settings):
    settings = {"dtype": "float32", "num_kvcache_blocks": 512, "max_model_len": 1024, **settings}
    with LLM(str(BUNDLED), tensor_parallel_size=num_ranks, **settings) as llm:
        if num_ranks > 1:
            assert distributed.peer_memory() is not None
        return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(enforce_eager=True),
        dict(overlap=False, max_num_seqs=7),
        dict(max_num_batched_tokens=96, num_kvcache_blocks=24),
        dict(attention_backend="torch"),
    ],
    ids=str,
)
def test_two_ranks_give_the_tokens_of_one(settings):
    """fp32; greedy and drawn rows, short prompts and long ones."""
    prompts = random_prompts(NUM_PROMPTS, 2000, seed=3) + [
        list(range(1, 900)),
        list(range(7, 1000)),
    ]
    params = [
        SamplingParams((0, 0.8, 50.0)[i % 3], max_tokens=NUM_TOKENS, ignore_eos=True, seed=i)
        for i in range(len(prompts))
    ]
    expected = [o["token_ids"] for o in run(1, prompts, params, **settings)]
    assert [o["token_ids"] for o in run(2, prompts, params, **settings)] == expected


def test_rows_that_are_drawn_again():
    asks = [
        dict(temperature=0, repetition_penalty=1.3),
        dict(temperature=0.8, top_k=20, top_p=0.9),
        dict(temperature=0.8, logprobs=3, prompt_logprobs=2, n=2),
        dict(temperature=0),
    ]
    prompts = random_prompts(12, 2000, seed=6)
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=i, **asks[i % 4])
        for i in range(12)
    ]
    one, two = (run(n, prompts, params) for n in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert a["token_ids"] == b["token_ids"]
        assert (a["prompt_logprobs"] is None) == (b["prompt_logprobs"] is None)


def test_memory_of_both_gpus_is_given_back():
    free = [torch.cuda.mem_get_info(i)[0] for i in range(2)]
    for _ in range(2):
        run(2, random_prompts(4, 2000), SamplingParams(max_tokens=4), num_kvcache_blocks=4096)
    torch.cuda.empty_cache()
    for i in range(2):
        # This process keeps its context.
        assert free[i] - torch.cuda.mem_get_info(i)[0] < (256 << 20) + (i == 0) * (600 << 20)
