"""Jobs whose prompts share prefixes, with cascade attention and without it, on this GPU.

    python tests/bench_prefixes.py [--size 0.6B] [--only NAME ...] [--rounds 3]

Random weights, as bench.py --dummy-weights; each job runs once to warm up, which also fills the
prefix cache, and then --rounds times. Prints output tokens per second as medians and their ratio.
The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import SHAPES, write_dummy
from nanovllm import LLM, SamplingParams

Prompts = list[list[int]]
Job = tuple[Prompts, SamplingParams]


def draw(rng: np.random.Generator, num_tokens: int) -> list[int]:
    return rng.integers(0, 10_000, num_tokens).tolist()


def shared_prefix(rng: np.random.Generator) -> Job:
    """256 requests of 2,048 shared tokens and 64 to 192 own ones."""
    head = draw(rng, 2048)
    prompts = [head + draw(rng, int(n)) for n in rng.integers(64, 193, 256)]
    return prompts, SamplingParams(0.6, max_tokens=128, ignore_eos=True)


def documents(rng: np.random.Generator) -> Job:
    """64 documents of 1,024 tokens under one system prompt of 1,024, 16 questions of each."""
    head = draw(rng, 1024)
    texts = [head + draw(rng, 1024) for _ in range(64)]
    prompts = [text + draw(rng, 64) for text in texts for _ in range(16)]
    return prompts, SamplingParams(0.6, max_tokens=128, ignore_eos=True)


def samples(rng: np.random.Generator) -> Job:
    """64 samples of one prompt of 4,096 tokens."""
    return [draw(rng, 4096)], SamplingParams(0.6, max_tokens=256, ignore_eos=True, n=64)


def nothing(rng: np.random.Generator) -> Job:
    """256 requests that share nothing, 100 to 1,024 tokens each."""
    prompts = [draw(rng, int(n)) for n in rng.integers(100, 1025, 256)]
    return prompts, SamplingParams(0.6, max_tokens=512, ignore_eos=True)


JOBS: dict[str, Callable[[np.random.Generator], Job]] = {
    job.__name__: job for job in (shared_prefix, documents, samples, nothing)
}


def measure(folder: str, job: Job, num_rounds: int, cascade_attention: bool) -> float:
    prompts, params = job
    num_tokens = len(prompts) * params.n * (params.max_tokens or 0)
    settings = dict(load_format="dummy", max_model_len=8192, cascade_attention=cascade_attention)
    with LLM(folder, **settings) as llm:
        rates = []
        for _ in range(num_rounds + 1):
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            rates.append(num_tokens / (time.perf_counter() - start))
    return statistics.median(rates[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SHAPES, default="0.6B")
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        write_dummy(args.size, Path(folder))
        for name in args.only:
            job = JOBS[name](np.random.default_rng(0))
            on, off = (measure(folder, job, args.rounds, is_on) for is_on in (True, False))
            print(f"{name}: {on:.0f} tok/s, {on / off:.2f} of {off:.0f} without", flush=True)
            results[name] = {"on": round(on), "off": round(off), "ratio": round(on / off, 3)}
    print(json.dumps({"size": args.size, "jobs": results}))


if __name__ == "__main__":
    main()
