"""run-batch against generate: the same short prompts through the same kind of engine.

    python tests/bench_batch.py [--model DIR] [--num 20000] [--rounds 3] [CONFIG_FIELD=VALUE ...]

Both read text, draw 16 to 64 new tokens a prompt and give text. Starting and closing the engine is
not counted. Prints new tokens per second of each round and the ratio of the medians. The last line
is JSON.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nanovllm import LLM, SamplingParams, run_batch
from nanovllm.config import Config

BUNDLED = Path(__file__).parent / "assets" / "tiny-qwen3"
WORDS = (
    "the a of one two model prime number story river small large letter page begins ends".split()
)


def make_requests(num: int) -> list[tuple[str, int]]:
    """Prompts, and how many new tokens each gets."""
    rng = random.Random(0)
    return [
        (" ".join(rng.choices(WORDS, k=rng.randint(8, 32))), rng.randint(16, 64))
        for _ in range(num)
    ]


def open_warm(config: Config) -> LLM:
    llm = LLM(**{name: getattr(config, name) for name in Config.__dataclass_fields__})
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    llm.generate(["warm up"] * 600, params, use_tqdm=False)
    return llm


def time_generate(config: Config, requests: list[tuple[str, int]]) -> float:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for _, n in requests]
    with open_warm(config) as llm:
        start = time.perf_counter()
        llm.generate([prompt for prompt, _ in requests], params)
        return time.perf_counter() - start


def time_run_batch(config: Config, requests: list[tuple[str, int]], folder: Path) -> float:
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    with source.open("w") as file:
        for prompt, n in requests:
            line = {"prompt": prompt, "max_tokens": n, "ignore_eos": True}
            file.write(json.dumps(line) + "\n")
    target.unlink(missing_ok=True)
    times = []

    class Timed(LLM):
        def close(self) -> None:
            times.append(time.perf_counter())
            super().close()

    def open_engine(config: Config) -> LLM:
        llm = open_warm(config)
        llm.__class__ = Timed
        times.append(time.perf_counter())
        return llm

    usual, run_batch.open_engine = run_batch.open_engine, open_engine
    try:
        assert run_batch.run_batch(run_batch.Job(str(source), str(target), config)) == 0
    finally:
        run_batch.open_engine = usual
    assert len(target.read_text().splitlines()) == len(requests)
    return times[1] - times[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(BUNDLED))
    parser.add_argument("--num", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("fields", nargs="*", help="max_num_seqs=512, say")
    args = parser.parse_args()
    fields: dict[str, Any] = {}
    for text in args.fields:
        name, _, value = text.partition("=")
        fields[name] = int(value) if value.isdigit() else value
    config = Config.from_kwargs(args.model, **fields)
    requests = make_requests(args.num)
    num_tokens = sum(n for _, n in requests)
    rates: dict[str, list[float]] = {"generate": [], "run-batch": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            rates["generate"].append(num_tokens / time_generate(config, requests))
            rates["run-batch"].append(num_tokens / time_run_batch(config, requests, Path(folder)))
    for name, values in rates.items():
        print(f"{name}: {', '.join(f'{rate:,.0f}' for rate in values)} tok/s")
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = medians["run-batch"] / medians["generate"]
    print(json.dumps({"num": args.num, "ratio": round(ratio, 3), **medians}))


if __name__ == "__main__":
    main()
