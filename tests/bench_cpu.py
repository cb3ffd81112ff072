"""Greedy decoding on the CPU, this engine and transformers' generate side by side in one run.

    python tests/bench_cpu.py [--model DIR] [--dtype float32] [--rounds 5]

One prompt, then 16 prompts of mixed lengths (padded on the left for transformers, in one batch),
each generating the same number of tokens. Rounds alternate; the medians are compared.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams

BUNDLED = Path(__file__).parent / "assets" / "tiny-qwen3"


def hf_generate(model, prompts, num_tokens):
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        temperature=None,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        pad_token_id=0,
    )
    return out[:, width:].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-tokens", type=int, default=128)
    args = parser.parse_args()
    llm = LLM(str(args.model), dtype=args.dtype, device="cpu")
    hf = AutoModelForCausalLM.from_pretrained(
        str(args.model), torch_dtype=getattr(torch, args.dtype)
    ).eval()
    params = SamplingParams(temperature=0, max_tokens=args.num_tokens, ignore_eos=True)
    rng = np.random.default_rng(0)
    vocab = len(llm.tokenizer)
    result = {"dtype": args.dtype, "threads": torch.get_num_threads()}
    print(f"{args.model.name}, {args.dtype}, {args.num_tokens} tokens, greedy")
    for name, lens in (("1 prompt", [32]), ("16 prompts", range(8, 136, 8))):
        ours, theirs = [], []
        for _ in range(args.rounds + 1):  # the first is a warm-up
            prompts = [rng.integers(0, vocab, n).tolist() for n in lens]
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            ours.append(time.perf_counter() - start)
            start = time.perf_counter()
            hf_generate(hf, prompts, args.num_tokens)
            theirs.append(time.perf_counter() - start)
        a, b = statistics.median(ours[1:]), statistics.median(theirs[1:])
        tokens = args.num_tokens * len(prompts)
        print(
            f"{name:>10}: nanovllm {tokens / a:7.0f} tok/s, transformers {tokens / b:7.0f} tok/s,"
            f" ratio {b / a:.2f}"
        )
        result[name] = {"nanovllm_s": a, "transformers_s": b, "ratio": b / a}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
