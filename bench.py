#!/usr/bin/env python3
"""Throughput of offline generation on random prompts; the defaults are nano-vllm's workload.

python bench.py                             # on a GPU: Qwen3-0.6B shapes; else the bundled model
python bench.py --dummy-weights 8B --tp 2   # published shapes, random weights, no checkpoint
python bench.py --model DIR --num-seqs 64 --input-len 100 200 --output-len 50 50

Prints device and settings, then the result, then all of it as one line of JSON.
"""

import argparse
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

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
}
# num_seqs, shortest and longest prompt, shortest and longest output.
NANO_VLLM = (256, (100, 1024), (100, 1024))
NANO_VLLM_TOKENS = (142_827, 133_966)  # prompt and output tokens of that workload with seed 0
SMALL = (32, (16, 128), (32, 128))  # ends within a minute on two CPU cores

Requests = tuple[list[list[int]], list[int]]  # prompt token ids, output lengths


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


def measure(llm: LLM, requests: Requests) -> dict[str, float]:
    prompts, output_lens = requests
    params = [SamplingParams(0.6, length, ignore_eos=True) for length in output_lens]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    num_output_tokens = sum(len(output["token_ids"]) for output in outputs)
    assert num_output_tokens == sum(output_lens), (num_output_tokens, sum(output_lens))
    return {
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": num_output_tokens,
        "seconds": round(seconds, 3),
        "output_tokens_per_second": round(num_output_tokens / seconds, 1),
    }


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
        figures = measure(llm, requests)
    print(
        f"{figures['prompt_tokens']} prompt tokens, {figures['output_tokens']} output tokens,"
        f" {figures['seconds']:.2f} s, {figures['output_tokens_per_second']:.1f} output tok/s"
    )
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
