"""Microseconds of a decode step on the GPU alone: its graph replayed, nothing from the host.

    python tests/bench_step.py [--size 0.6B] [--context 600] [--batch 1 8 64 256]

Random weights, as bench.py --dummy-weights. Replays follow each other as the steps of a run do, so
contexts grow by one token each. Prints the median of five rounds of replays, and the share of the
time that reading weights and K/V once would take at --copy-rate. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import SHAPES, write_dummy
from nanovllm import LLM
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.sequence import ScheduledBatch

NUM_REPLAYS = 40


def decode_batch(num_seqs: int, context: int) -> ScheduledBatch:
    n, no_ints = num_seqs, np.empty(0, np.int32)
    return ScheduledBatch(
        is_prefill=False,
        rows=np.arange(n, dtype=np.int32),
        seq_ids=np.arange(n),
        num_cached_tokens=np.full(n, context - 1, np.int32),
        num_scheduled_tokens=np.ones(n, np.int32),
        is_sampled=np.ones(n, np.bool_),
        all_greedy=False,
        new_blocks=np.full(n, -1, np.int32),
        input_ids=no_ints,
        block_tables=np.empty((0, 0), np.int32),
        temperatures=np.empty(0, np.float32),
        seeds=np.empty(0, np.int64),
    )


def step_us(runner: ModelRunner, num_seqs: int, context: int) -> float:
    state = runner.state
    per_seq = -(-(context + 2 * NUM_REPLAYS) // state.block_size)
    order = torch.randperm(runner.num_blocks)[: num_seqs * per_seq].view(num_seqs, per_seq)
    state.block_tables[:num_seqs, :per_seq] = order.to(state.block_tables)
    state.temperatures.fill_(0.6)
    state.last_tokens.fill_(1)
    batch = decode_batch(num_seqs, context)
    times = []
    for _ in range(6):  # the first warms up
        state.num_tokens.fill_(context)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        assert runner.decode_graphs is not None
        runner.decode_graphs.replay(batch)
        start.record()
        for _ in range(NUM_REPLAYS):
            runner.decode_graphs.replay(batch)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / NUM_REPLAYS)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SHAPES, default="0.6B")
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--copy-rate", type=float, default=4.26, help="TB/s of this GPU")
    args = parser.parse_args()
    hidden, layers, heads, kv_heads, intermediate, _ = SHAPES[args.size]
    results = {}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        write_dummy(args.size, Path(folder))
        with LLM(folder, load_format="dummy", max_model_len=4096) as llm:
            runner = llm._runner
            vocab = runner.model.lm_head.weight.size(0)
            per_layer = hidden * 128 * (2 * heads + 2 * kv_heads) + 3 * hidden * intermediate
            weight_bytes = 2 * (layers * per_layer + vocab * hidden)
            kv_bytes = 4 * layers * kv_heads * 128 * args.context
            for num_seqs in args.batch:
                us = step_us(runner, num_seqs, args.context)
                floor = (weight_bytes + num_seqs * kv_bytes) / args.copy_rate / 1e6
                print(f"batch {num_seqs:4}: {us:8.1f} us, {floor / us:.2f} of the byte floor")
                results[num_seqs] = round(us, 1)
    print(json.dumps({"size": args.size, "context": args.context, "step_us": results}))


if __name__ == "__main__":
    main()
