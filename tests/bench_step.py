"""Microseconds of a decode step on the GPU alone: its graph replayed, nothing from the host.

    python tests/bench_step.py [--size 0.6B] [--context 600] [--batch 1 8 64 256] [--sweep]

Random weights, as bench.py --dummy-weights. Replays follow each other as the steps of a run do, so
contexts grow by one token each. Prints the median of five rounds of replays, and the share of the
time that reading weights and K/V once would take at --copy-rate. The last line is JSON.

--sweep captures the step anew with other configurations of one linear after the other, each beside
the best found for those before it. Which is best alone is not so in a step: what a program has
asked for while the kernel before still ran, and where that one leaves room, decide as much.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import SHAPES, write_dummy
from nanovllm import LLM
from nanovllm.engine import cuda_graph, model_runner
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.sequence import ScheduledBatch
from nanovllm.kernels import launch, norm_linear
from nanovllm.kernels.small_linear import PLAIN, RESIDUAL, SILU, Config, config, supports

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


def others(n: int, k: int, epilogue: int, usual: Config) -> list[Config]:
    """Configurations of the same kind as the usual one, n outputs."""
    mats = 2 if epilogue == SILU else 1
    if usual.kind == "gemv":
        shapes = itertools.product((1, 2, 4, 8), (1, 2, 4))
        found = [replace(usual, block_n=rows, warps=warps) for rows, warps in shapes]
        # Weights held in registers, 128 of 4 bytes a thread at most.
        return [c for c in found if mats * c.block_n * c.block_k <= 8192 * c.warps]
    if usual.kind == "one_shot":
        shapes = itertools.product((32, 64), (256, 512, 1024), (False, True), (4, 8))
        return [
            replace(
                usual, block_n=rows, block_k=slab, split_k=-(-k // slab), swap=swap, warps=warps
            )
            for rows, slab, swap, warps in shapes
            if mats * rows * slab <= 16384 * warps and (rows == 64 or not swap)
        ]
    found = []
    for rows, cols, split in itertools.product((16, 32, 64), (128, 256), (1, 2, 4, 8)):
        stage, share = 2 * (mats * rows + usual.block_m) * cols, k // split
        stages = min(6, 220 * 1024 // stage, share // cols + 1)
        if stages > 1 and (rows == 64 or not usual.swap):
            found.append(replace(usual, block_n=rows, block_k=cols, split_k=split, stages=stages))
    return found


def sweep(runner: ModelRunner, num_seqs: int, context: int, shapes: dict[str, tuple]) -> None:
    """Print the step's time with other configurations of the linears, (n, k, epilogue) by name."""
    facts = launch.gpu(runner.device)
    chosen: dict[tuple, Config] = {}

    def pick(m: int, *rest) -> Config:
        return chosen.get(rest[:3] if m == num_seqs else ()) or config(m, *rest)

    def time_step() -> float:
        runner.decode_graphs = None
        runner._capture_graphs()
        return step_us(runner, num_seqs, context)

    norm_linear.config = pick
    cuda_graph.bucket_sizes = lambda max_num_seqs: [num_seqs]
    model_runner.PrefillGraphs = lambda *_: None
    best = time_step()
    for name, shape in shapes.items():
        n, k, epilogue = shape
        if not supports(num_seqs, n, k, runner.dtype, epilogue, facts.num_sms):
            continue
        usual, times = config(num_seqs, *shape, facts), {}
        for other in others(*shape, usual):
            chosen[shape] = other
            try:
                times[other] = time_step()
            except Exception as error:  # most often for want of shared memory
                print(f"  {name} {other}: {str(error).splitlines()[0]:.80}")
        print(f"batch {num_seqs}, {name}: {best:.1f} us with {usual}")
        for other, us in sorted(times.items(), key=lambda item: item[1])[:5]:
            print(f"    {us:8.1f} us  {other}", flush=True)
        chosen[shape] = min(times, key=times.__getitem__, default=usual)
        if times.get(chosen[shape], best) > best - 1:  # no more than chance
            chosen[shape] = usual
        best = min([best, *times.values()])
    norm_linear.config = config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SHAPES, default="0.6B")
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--copy-rate", type=float, default=4.26, help="TB/s of this GPU")
    parser.add_argument("--sweep", action="store_true")
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
            for num_seqs in args.batch if args.sweep else ():
                shapes = {
                    "qkv": ((heads + 2 * kv_heads) * 128, hidden, PLAIN),
                    "o": (hidden, heads * 128, RESIDUAL),
                    "gate_up": (intermediate, hidden, SILU),
                    "down": (hidden, intermediate, RESIDUAL),
                }
                sweep(runner, num_seqs, args.context, shapes)
    print(json.dumps({"size": args.size, "context": args.context, "step_us": results}))


if __name__ == "__main__":
    main()
