"""R11, R14: engines come and go, and run for long, without anything growing.

The soak takes as long as NANOVLLM_SOAK_SECONDS says, 20 s unless told otherwise; 180 is the figure
to hold before a release. From 60 on two ranks come and go 20 times too, in place of 3.
"""

import ctypes
import gc
import itertools
import os
import random
import sys
import time
from pathlib import Path

import psutil
import pytest

from nanovllm import LLM, SamplingParams

CHECKPOINT = Path(__file__).parents[1] / "assets" / "tiny-qwen3"
SOAK_SECONDS = float(os.environ.get("NANOVLLM_SOAK_SECONDS", "20"))

pytestmark = pytest.mark.slow


# Of glibc. What free() holds back comes and goes by some MiB.
give_back = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)


def memory() -> int:
    gc.collect()
    give_back(0)
    return psutil.Process().memory_info().rss


def counts() -> tuple[int, int, int]:
    me = psutil.Process()
    return me.num_fds(), me.num_threads(), len(me.children(recursive=True))


@pytest.mark.parametrize("num_ranks, num_cycles", [(1, 20), (2, 20 if SOAK_SECONDS >= 60 else 3)])
def test_engines_come_and_go(num_ranks, num_cycles):
    sizes, before = [], None
    for _ in range(num_cycles):
        with LLM(
            str(CHECKPOINT), device="cpu", num_kvcache_blocks=16, tensor_parallel_size=num_ranks
        ) as llm:
            assert llm.generate([[1, 2, 3]], SamplingParams(0, 4), use_tqdm=False)
        del llm
        before = before or counts()  # the first one loads what stays
        sizes.append(memory())
        assert counts() <= before, (counts(), before)
    if num_cycles >= 20:
        assert min(sizes[-5:]) < 1.01 * max(sizes[4:9]), sizes


def random_params(rng: random.Random) -> SamplingParams:
    kind = rng.randrange(6)
    asked: dict = [
        {},
        {"temperature": 0},
        {"temperature": 0.9, "top_k": 8, "seed": rng.randrange(100)},
        {"temperature": 0.8, "top_p": 0.7, "frequency_penalty": 0.5},
        {"temperature": 0, "stop": ["the", " a"], "logprobs": 2},
        {"temperature": 0.9, "n": 2, "min_tokens": 2},
    ][kind]
    return SamplingParams(**{"max_tokens": rng.randint(2, 24), **asked})


def test_soak():
    """Random load on a small pool: no block is lost, and memory does not climb."""
    rng = random.Random(0)
    with LLM(
        str(CHECKPOINT), device="cpu", kvcache_block_size=16, num_kvcache_blocks=96, max_num_seqs=24
    ) as llm:
        num_requests, samples = 0, []
        end = time.monotonic() + SOAK_SECONDS
        while time.monotonic() < end or len(samples) < 8:  # on a busy machine it takes longer
            n = rng.randint(1, 40)
            head = [rng.randrange(2000) for _ in range(rng.choice([0, 16, 40]))]
            prompts = [
                head + [rng.randrange(2000) for _ in range(rng.randint(1, 60))] for _ in range(n)
            ]
            params = [random_params(rng) for _ in range(n)]
            if rng.random() < 0.2:  # left half way
                for delta in itertools.islice(llm.stream(prompts, params), rng.randint(1, 20)):
                    assert delta["index"] < n
            else:
                outputs = llm.generate(prompts, params, use_tqdm=False)
                assert all(o["finish_reason"] in ("stop", "length") for o in outputs)
            num_requests += n
            assert llm.is_finished()
            assert llm.scheduler.block_manager.num_free_blocks == 96
            assert len(llm.scheduler.table.free_rows) == 24
            if num_requests > 300:  # caches are full and arenas made by then
                samples.append((num_requests, memory(), sys.getallocatedblocks()))
        assert llm.scheduler.num_preemptions >= 0
    half = len(samples) // 2
    assert half > 2, f"only {num_requests} requests in {SOAK_SECONDS} s"
    num, rss, blocks = zip(*samples, strict=True)
    early, late = min(rss[:half]), min(rss[half:])
    # A leak of one object a request shows here, and not yet in pages, which come and go by MiB.
    leaked = (min(blocks[half:]) - min(blocks[:half])) / (num[-1] - num[half - 1])
    mib = (late - early) / (1 << 20)
    print(f"\n{num_requests} requests, {mib:.2f} MiB, {leaked:.2f} blocks a request")
    assert leaked < 1
    assert late - early < 0.01 * early or SOAK_SECONDS < 60
