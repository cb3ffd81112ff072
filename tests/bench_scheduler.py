"""Microseconds of host work in a decode step: schedule, build its inputs, update. Not a test.

    python tests/bench_scheduler.py

No model runs: every request samples the same token. Sequences of about 900 tokens in blocks of
256, as in the middle of bench.py's workload. With a queue, all rows are taken and the queue waits.
gather_us is the part of build_us that a kernel does on a GPU, and some 25 torch operations here.
The last line is JSON. To reach: at most 250 us at 512 sequences, and at most 1.15 times as much
with 100,000 requests waiting as with 1,000.
"""

import gc
import json
import time

import numpy as np
import torch

from nanovllm.engine import input_batch
from nanovllm.engine.decode_state import DecodeState
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import ScheduledBatch, Sequence
from nanovllm.sampling_params import SamplingParams

BLOCK_SIZE = 256
CONTEXT_LEN = 900
NUM_STEPS = 400
WAITING_PROMPT_LEN = 550
MAX_MODEL_LEN = 4096
CPU = torch.device("cpu")


class Bench:
    """A scheduler in which num_seqs sequences decode, and others wait."""

    def __init__(self, num_seqs: int, num_waiting: int = 0) -> None:
        rng = np.random.default_rng(0)
        num_blocks = 8 * num_seqs
        self.scheduler = Scheduler(num_seqs, 16_384, MAX_MODEL_LEN, BLOCK_SIZE, num_blocks, [0])
        max_num_blocks = self.scheduler.table.block_tables.shape[1]
        self.state = DecodeState.create(num_seqs, max_num_blocks, BLOCK_SIZE, CPU)
        self.tokens = np.full(num_seqs, 7, np.int64)
        # Spread over a block, so that each step some sequences start one, as in real decoding.
        first_lens = CONTEXT_LEN - NUM_STEPS // 2 - rng.integers(0, BLOCK_SIZE, num_seqs)
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        for length in first_lens.tolist():
            self.add(rng.integers(1, 10_000, length), params)
        while self.scheduler.num_running < num_seqs:
            self.step()
        prompt = rng.integers(1, 10_000, WAITING_PROMPT_LEN)
        for _ in range(num_waiting):
            self.add(prompt, params)

    def add(self, prompt: np.ndarray, params: SamplingParams) -> None:
        self.scheduler.add(Sequence(prompt, params, self.scheduler.max_len))

    def step(self) -> tuple[float, float, float, float]:
        """Seconds of schedule, input building, its last part (the gathering), and update."""
        start = time.perf_counter()
        batch = self.scheduler.schedule()
        assert batch is not None
        scheduled = time.perf_counter()
        inputs, sent = self.build(batch)
        built = time.perf_counter()
        tokens = self.tokens[: len(inputs.rows)]
        self.state.append(inputs.rows, torch.from_numpy(tokens))  # the model's end of the step
        launched = time.perf_counter()
        self.scheduler.update(batch, tokens)
        return scheduled - start, built - scheduled, built - sent, time.perf_counter() - launched

    def build(self, batch: ScheduledBatch) -> tuple[input_batch.InputBatch, float]:
        """What ModelRunner does ahead of a step that it has not captured, and when it has sent."""
        if batch.is_prefill:
            return input_batch.build_prefill(batch, self.state), time.perf_counter()
        t = input_batch.to_device(input_batch.decode_arrays(batch, batch.num_seqs), CPU)
        max_context_len = int(batch.num_cached_tokens.max()) + 1
        sent = time.perf_counter()
        inputs = input_batch.build_decode(t["rows"], t["new_blocks"], self.state, max_context_len)
        return inputs, sent


def measure(benches: dict[str, Bench]) -> dict[str, dict[str, float]]:
    """Microseconds per step of each, taken in turns so that a busy machine slows all alike."""
    seconds: dict[str, list] = {name: [] for name in benches}
    for _ in range(NUM_STEPS):
        for name, bench in benches.items():
            seconds[name].append(bench.step())
    result = {}
    for name, samples in seconds.items():
        parts = np.array(samples) * 1e6
        totals = parts[:, [0, 1, 3]].sum(1)
        medians = np.median(parts, 0)
        result[name] = {
            "median_us": round(float(np.median(totals)), 1),
            "p10_us": round(float(np.percentile(totals, 10)), 1),
            "schedule_us": round(float(medians[0]), 1),
            "build_us": round(float(medians[1]), 1),
            "gather_us": round(float(medians[2]), 1),
            "update_us": round(float(medians[3]), 1),
        }
        print(f"{name:>28}: {result[name]}")
    return result


@torch.inference_mode()  # as ModelRunner.launch
def main() -> None:
    print(f"{NUM_STEPS} decode steps each, context about {CONTEXT_LEN}, blocks of {BLOCK_SIZE}")
    result = measure({f"{n} sequences": Bench(n) for n in (1, 256, 512)})
    queues = {f"512, {n:,} waiting": Bench(512, n) for n in (1_000, 100_000)}
    gc.collect()
    waiting = measure(queues)
    few, many = waiting.values()
    ratios = {key: round(many[key] / few[key], 3) for key in ("median_us", "p10_us")}
    print(f"100,000 waiting over 1,000: {ratios}")
    print(json.dumps({**result, **waiting, "waiting_ratio": ratios}))


if __name__ == "__main__":
    main()
