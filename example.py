#!/usr/bin/env python3
"""Two chat prompts through the model's chat template.

python example.py                              # the tiny checkpoint that comes with the project
python example.py --model Qwen/Qwen3-0.6B      # a hub id, downloaded once, or a directory
"""

import argparse
import sys
from pathlib import Path

from nanovllm import LLM, SamplingParams

BUNDLED = Path(__file__).resolve().parent / "tests" / "assets" / "tiny-qwen3"
PROMPTS = ["introduce yourself", "list all prime numbers within 100"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Two chat prompts through the chat template.")
    parser.add_argument("--model", help="checkpoint directory or hub id (default: the bundled one)")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    args = parser.parse_args()

    if args.model is None:
        print(
            "Using the tiny checkpoint bundled with this project (3 million parameters). For a\n"
            "real model type: python example.py --model Qwen/Qwen3-0.6B\n"
        )
    try:
        llm = LLM(
            args.model or str(BUNDLED), tensor_parallel_size=args.tp, enforce_eager=args.eager
        )
    except (TypeError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with llm:
        chats = [
            llm.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in PROMPTS
        ]
        outputs = llm.generate(chats, SamplingParams(temperature=0.6, max_tokens=256))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        print(f"\nPrompt: {prompt}")
        print(f"Completion: {output['text'].strip()}")
        print(f"({len(output['token_ids'])} tokens, finish reason: {output['finish_reason']})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
