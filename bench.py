#!/usr/bin/env python3
"""Throughput of offline generation on random prompts; the defaults are nano-vllm's workload.

python bench.py                             # on a GPU: Qwen3-0.6B shapes; else the bundled model
python bench.py --dummy-weights 8B --tp 2   # published shapes, random weights, no checkpoint
python bench.py --model DIR --num-seqs 64 --input-len 100 200 --output-len 50 50
python bench.py --floor --profile trace.json --plot run.png  # how good it is, and why

Prints device and settings, then the result, then all of it as one line of JSON.
"""

import argparse
import contextlib
import heapq
import importlib.util
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm import LLM, SamplingParams

BUNDLED = Path(__file__).resolve().parent / "tests" / "assets" / "tiny-qwen3"

VOCAB_SIZE = 151936  # of every published Qwen3
# Published Qwen3 shapes: hidden, layers, heads, kv_heads, intermediate, tied embeddings.
SHAPES = {
    "0.6B": (1024, 28, 16, 8, 3072, True),
    "1.7B": (2048, 28, 16, 8, 6144, True),
    "4B": (2560, 36, 32, 8, 9728, True),
    "8B": (4096, 36, 32, 8, 12288, False),
    "14B": (5120, 40, 40, 8, 17408, False),
    "32B": (5120, 64, 64, 8, 25600, False),
    "30B-A3B": (2048, 48, 32, 4, 6144, False),
}
# Of those with experts: their number, how many a token goes to, their intermediate size.
EXPERTS = {"30B-A3B": (128, 8, 768)}
# num_seqs, shortest and longest prompt, shortest and longest output.
NANO_VLLM = (256, (100, 1024), (100, 1024))
NANO_VLLM_TOKENS = (142_827, 133_966)  # prompt and output tokens of that workload with seed 0
SMALL = (32, (16, 128), (32, 128))  # ends within a minute on two CPU cores

Requests = tuple[list[list[int]], list[int]]  # prompt token ids, output lengths
# After a step of the timed run: seconds, output tokens so far, running sequences, KV blocks in use.
Moment = tuple[float, int, int, int]


class Work(NamedTuple):
    """The least that a workload asks of a device, whoever computes it."""

    kv_bytes: int  # each sequence's K/V, read once in each of its decode steps
    weight_bytes: int  # each weight, read once in each decode step
    prompt_flops: int  # of the prompts; the arithmetic of decoding hides under the reads

    def seconds(self, copy_rate: float, matmul_rate: float) -> float:
        """The floor, at bytes per second and FLOP per second."""
        return (self.kv_bytes + self.weight_bytes) / copy_rate + self.prompt_flops / matmul_rate


def write_dummy(size: str, folder: Path) -> None:
    """A checkpoint folder without weights: config.json and some tokenizer."""
    hidden, layers, heads, kv_heads, intermediate, tied = SHAPES[size]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": 40960,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
    }
    if size in EXPERTS:
        num_experts, num_experts_per_tok, moe_intermediate = EXPERTS[size]
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": moe_intermediate,
            "norm_topk_prob": True,
            "num_experts": num_experts,
            "num_experts_per_tok": num_experts_per_tok,
        }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder)


def make_requests(args: argparse.Namespace, vocab_size: int) -> Requests:
    """Random requests; the order of the draws is nano-vllm's, so the defaults give its requests."""
    rng = random.Random(args.seed)
    top = min(10_000, vocab_size - 1)
    prompts = [
        [rng.randint(0, top) for _ in range(rng.randint(*args.input_len))]
        for _ in range(args.num_seqs)
    ]
    output_lens = [rng.randint(*args.output_len) for _ in range(args.num_seqs)]
    if args.seed == 0 and top == 10_000 and workload(args) == NANO_VLLM:
        totals = sum(map(len, prompts)), sum(output_lens)
        assert totals == NANO_VLLM_TOKENS, totals
    return prompts, output_lens


def workload(args: argparse.Namespace) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return args.num_seqs, tuple(args.input_len), tuple(args.output_len)


def warm_up(llm: LLM, requests: Requests, seed: int) -> None:
    """The same prompts, shuffled: loads and compiles everything, warms no prefix cache."""
    rng = random.Random(seed + 1)
    prompts = [rng.sample(prompt, len(prompt)) for prompt in requests[0]]
    llm.generate(prompts, SamplingParams(0.6, 8, ignore_eos=True), use_tqdm=False)


def measure(llm: LLM, requests: Requests, history: list[Moment] | None) -> dict[str, float]:
    """The timed run; history: None, or a list to fill, which costs some microseconds a step."""
    prompts, output_lens = requests
    params = [SamplingParams(0.6, length, ignore_eos=True) for length in output_lens]
    began = time.perf_counter()
    if history is None:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    else:
        outputs = generate_by_steps(llm, prompts, params, history)
    seconds = time.perf_counter() - began
    num_output_tokens = sum(len(output["token_ids"]) for output in outputs)
    assert num_output_tokens == sum(output_lens), (num_output_tokens, sum(output_lens))
    return {
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": num_output_tokens,
        "seconds": round(seconds, 3),
        "output_tokens_per_second": round(num_output_tokens / seconds, 1),
    }


def generate_by_steps(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], history: list[Moment]
) -> list[Any]:
    """What generate() does, looking around after each step; results as they finish."""
    scheduler, outputs, num_done = llm.scheduler, [], 0
    began = time.perf_counter()
    for prompt, param in zip(prompts, params, strict=True):
        llm.add_request(prompt, param)
    while not llm.is_finished():
        finished = [output for _, output in llm.step()]
        outputs += finished
        num_done += sum(len(output["token_ids"]) for output in finished)
        here = [*scheduler.running, *scheduler.waiting]
        num_here = sum(seq.num_tokens - seq.num_prompt_tokens for seq in here)
        num_used = scheduler.num_blocks - scheduler.block_manager.num_free_blocks
        now = time.perf_counter() - began
        history.append((now, num_done + num_here, scheduler.num_running, num_used))
    return outputs


def draw(history: list[Moment], num_blocks: int, title: str, file: str) -> None:
    from matplotlib.figure import Figure  # without pyplot, no display is looked for

    seconds, num_tokens, num_running, num_used = np.array([(0, 0, 0, 0), *history]).T
    edges = np.linspace(0, seconds[-1], 101)
    rates = np.diff(np.interp(edges, seconds, num_tokens)) / np.diff(edges)
    figure = Figure(figsize=(9, 7), layout="constrained")
    top, middle, bottom = figure.subplots(3, sharex=True)
    top.stairs(rates, edges)
    middle.plot(seconds, num_running, drawstyle="steps-post")
    bottom.plot(seconds, num_used, drawstyle="steps-post")
    top.set(ylabel="output tokens per second", ylim=(0, None))
    middle.set(ylabel="batch size", ylim=(0, None))
    bottom.set(ylabel=f"KV blocks in use of {num_blocks}", ylim=(0, None), xlabel="seconds")
    figure.suptitle(title)
    figure.savefig(file, dpi=150)
    print(f"Plot of the timed run: {file}")


def write_trace(llm: LLM, prompts: list[list[int]], file: str) -> None:
    """Trace ten steps that decode as many of the prompts as run at once."""
    from torch.profiler import profile, record_function

    for prompt in prompts[: llm.scheduler.max_num_running]:
        llm.add_request(prompt, SamplingParams(0.6, 32, ignore_eos=True))
    while llm.scheduler.waiting:
        llm.step()
    for _ in range(3):  # until the prefill's last step has been read back
        llm.step()
    with profile() as trace:  # of the CPU and of a GPU
        for _ in range(10):
            with record_function("step"):
                llm.step()
    while not llm.is_finished():
        llm.step()
    trace.export_chrome_trace(file)
    print(f"Trace of ten decode steps, to open in ui.perfetto.dev: {file}")


def count_work(config: Any, itemsize: int, requests: Requests, max_num_seqs: int) -> Work:
    """A replay of the lengths, max_num_seqs at once and in order.

    config: transformers'. itemsize: bytes of a weight and of a K or V value. Of a layer's experts
    a step reads those that some sequence goes to, if each goes to some at random.
    """
    hidden, num_layers = config.hidden_size, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    q_size = config.num_attention_heads * head_dim
    kv_size = config.num_key_value_heads * head_dim
    num_experts, per_token, expert_size = 1, 1, config.intermediate_size
    num_shared = 2 * hidden * (q_size + kv_size)  # those of norms are too few to count
    if getattr(config, "moe_intermediate_size", None):
        num_experts, per_token = config.num_experts, config.num_experts_per_tok
        expert_size = config.moe_intermediate_size
        num_shared += hidden * num_experts
    num_of_expert = 3 * hidden * expert_size
    head = hidden * config.vocab_size  # read whole; of the embedding, only the tokens' rows
    places = [0] * max_num_seqs  # the decode step at which each is free again
    num_prompt_tokens = num_pairs = num_context_tokens = 0
    changes: dict[int, int] = {}  # decode step -> sequences that begin less those that have ended
    for prompt, output_len in zip(*requests, strict=True):
        n, num_steps = len(prompt), output_len - 1  # the first token comes from the prompt
        first = heapq.heapreplace(places, places[0] + num_steps)
        changes[first] = changes.get(first, 0) + 1
        changes[first + num_steps] = changes.get(first + num_steps, 0) - 1
        num_prompt_tokens += n
        num_pairs += n * (n + 1) // 2  # of a query and a key that it sees
        num_context_tokens += num_steps * n + num_steps * (num_steps + 1) // 2
    num_expert_reads, num_running = 0.0, 0  # in each layer
    steps = sorted(changes)
    for step, next_step in zip(steps, steps[1:], strict=False):
        num_running += changes[step]
        is_missed = (1 - per_token / num_experts) ** num_running
        num_expert_reads += (next_step - step) * num_experts * (1 - is_missed)
    shared_reads = max(places) * (num_layers * num_shared + head)
    active = num_layers * (num_shared + per_token * num_of_expert)
    return Work(
        kv_bytes=num_context_tokens * 2 * num_layers * kv_size * itemsize,
        weight_bytes=itemsize
        * (shared_reads + round(num_layers * num_of_expert * num_expert_reads)),
        prompt_flops=2 * active * num_prompt_tokens + 4 * num_layers * q_size * num_pairs,
    )


def measure_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes per second of a copy, read and written, and FLOP per second of a matmul."""
    from torch.utils.benchmark import Timer

    on_gpu = device.type == "cuda"
    num_bytes = min(2 << 30, torch.cuda.mem_get_info(device)[0] // 4) if on_gpu else 256 << 20
    size = 8192 if on_gpu else 1024
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    a, b = torch.randn(2, size, size, dtype=dtype, device=device)
    tensors = {"source": source, "target": torch.empty_like(source), "a": a, "b": b}

    def fastest(statement: str) -> float:
        timer = Timer(statement, globals=tensors, num_threads=torch.get_num_threads())
        return min(timer.blocked_autorange(min_run_time=0.3).times)  # warms up and synchronizes

    return 2 * num_bytes / fastest("target.copy_(source)"), 2 * size**3 / fastest("a @ b")


def find_floor(
    llm: LLM, model: str, requests: Requests, figures: dict[str, float]
) -> dict[str, float]:
    """The floor of the run that gave `figures`; the engine is closed, so its memory is free."""
    from transformers import AutoConfig

    runner = llm._runner  # it alone knows what the model computed in
    config = AutoConfig.from_pretrained(os.path.expanduser(model))
    work = count_work(config, runner.dtype.itemsize, requests, llm.config.max_num_seqs)
    copy_rate, matmul_rate = measure_rates(runner.device, runner.dtype)
    # Each GPU has a share of the weights and of the KV heads; on the CPU ranks share one memory.
    num_devices = llm.config.tensor_parallel_size if runner.device.type == "cuda" else 1
    seconds = work.seconds(copy_rate, matmul_rate) / num_devices
    floor = {
        "copy_tb_per_second": copy_rate / 1e12,
        "matmul_tflop_per_second": matmul_rate / 1e12,
        "kv_tb": work.kv_bytes / 1e12,
        "weight_tb": work.weight_bytes / 1e12,
        "prompt_tflop": work.prompt_flops / 1e12,
        "floor_seconds": seconds,
        "floor_output_tokens_per_second": figures["output_tokens"] / seconds,
        "share_of_floor_reached": seconds / figures["seconds"],
    }
    return {name: float(f"{value:.4g}") for name, value in floor.items()}


def parse_args(has_gpu: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Throughput of generation on random prompts.")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", help="checkpoint directory or hub id")
    source.add_argument(
        "--dummy-weights", choices=SHAPES, metavar="SIZE", help=f"one of {', '.join(SHAPES)}"
    )
    span: dict[str, Any] = {"type": int, "nargs": 2, "metavar": ("MIN", "MAX")}
    parser.add_argument("--num-seqs", type=int, help="number of requests")
    parser.add_argument("--input-len", **span, help="prompt tokens")
    parser.add_argument("--output-len", **span, help="output tokens")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--seed", type=int, default=0, help="of the requests and of sampling")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--floor", action="store_true", help="the least time this can take here")
    parser.add_argument("--profile", metavar="FILE", help="write a trace of ten decode steps")
    parser.add_argument("--plot", metavar="FILE", help="draw the timed run; needs the extra 'plot'")
    args = parser.parse_args()
    if has_gpu and args.model is None:
        args.dummy_weights = args.dummy_weights or "0.6B"
    num_seqs, input_len, output_len = NANO_VLLM if has_gpu else SMALL
    args.num_seqs = num_seqs if args.num_seqs is None else args.num_seqs
    args.input_len = args.input_len or input_len
    args.output_len = args.output_len or output_len
    if args.num_seqs < 1:
        parser.error(f"--num-seqs: got {args.num_seqs}, needs at least 1")
    for name in ("input_len", "output_len"):
        low, high = getattr(args, name)
        if not 1 <= low <= high:
            parser.error(f"--{name.replace('_', '-')}: got {low} {high}, needs 1 <= MIN <= MAX")
    for name, suffixes in (("profile", (".json", ".json.gz")), ("plot", (".png", ".pdf", ".svg"))):
        file = getattr(args, name)
        if file and not (file.endswith(suffixes) and Path(file).absolute().parent.is_dir()):
            parser.error(
                f"--{name}: got {file}, needs a file in an existing folder, its name ending in"
                f" {' or '.join(suffixes)}"
            )
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.exit(1, "error: --plot needs matplotlib, try pip install 'nano-vllm[plot]'\n")
    return args


def run(args: argparse.Namespace, model: str) -> dict[str, object]:
    llm = LLM(
        model,
        tensor_parallel_size=args.tp,
        enforce_eager=args.eager,
        max_model_len=max(4096, args.input_len[1] + args.output_len[1]),
        attention_backend=args.attention_backend,
        load_format="auto" if args.dummy_weights is None else "dummy",
        seed=args.seed,
    )
    with llm:
        settings = {"device": llm.device_name, "torch": torch.__version__, **vars(args)}
        if model == str(BUNDLED):
            settings["model"] = "bundled tiny-qwen3"
        for name, value in settings.items():
            print(f"{name}: {value}")
        vocab_size = len(llm.tokenizer) if args.dummy_weights is None else VOCAB_SIZE
        requests = make_requests(args, vocab_size)
        warm_up(llm, requests, args.seed)
        history: list[Moment] | None = [] if args.plot else None
        figures = measure(llm, requests, history)
        summary = (
            f"{figures['prompt_tokens']} prompt tokens, {figures['output_tokens']} output tokens,"
            f" {figures['seconds']:.2f} s, {figures['output_tokens_per_second']:.1f} output tok/s"
        )
        print(summary)
        if args.profile:
            write_trace(llm, requests[0], args.profile)
    if history:
        draw(history, llm.scheduler.num_blocks, f"{llm.device_name}: {summary}", args.plot)
    if args.floor:
        floor = find_floor(llm, model, requests, figures)
        for name, value in floor.items():
            print(f"{name}: {value}")
        figures |= floor
    return {**settings, **figures}


def main() -> int:
    has_gpu = torch.cuda.is_available()
    args = parse_args(has_gpu)
    if not has_gpu:
        print("No GPU found: sizes not set by a flag are those of a small workload for the CPU.")
    model = args.model or str(BUNDLED)
    if model == str(BUNDLED) and args.dummy_weights is None:
        print("The model is the tiny checkpoint bundled with this project.")
    with contextlib.ExitStack() as stack:
        if args.dummy_weights is not None:
            model = stack.enter_context(tempfile.TemporaryDirectory(prefix="nanovllm-dummy-"))
            write_dummy(args.dummy_weights, Path(model))
        try:
            result = run(args, model)
        except (TypeError, ValueError, RuntimeError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
