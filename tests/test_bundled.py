"""The bundled checkpoint and the two scripts at the root, as a newcomer meets them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.parity import assert_equal_to_hf, load_hf

ROOT = Path(__file__).parents[1]
BUNDLED = ROOT / "tests" / "assets" / "tiny-qwen3"
PRIMES = (
    "2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97"
)


@pytest.fixture(scope="module")
def llm():
    with LLM(str(BUNDLED), device="cpu") as llm:
        yield llm


def chat(llm, question):
    return llm.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )


def test_folder_is_small_and_complete():
    assert sum(f.stat().st_size for f in BUNDLED.iterdir()) <= 8_000_000
    eos = json.loads((BUNDLED / "generation_config.json").read_text())["eos_token_id"]
    assert len(set(eos)) == 2


def test_40_prompts_equal_transformers(llm):
    """Chat questions and plain text, 32 greedy tokens each: all equal, logprobs to 1e-4."""
    hf = load_hf(BUNDLED, torch.float32)
    questions = [
        "introduce yourself",
        "list all prime numbers within 100",
        *(f"list all prime numbers within {n}" for n in range(10, 90, 10)),
        *(f"count from {n} to {n + 6}" for n in range(1, 11)),
        *(f"what is {n} plus {n + 3}?" for n in range(10)),
    ]
    texts = [chat(llm, q) for q in questions]
    texts += [f"Once upon a time there was a {x}" for x in "abcdefghij"]
    prompts = llm.tokenizer(texts)["input_ids"]
    assert len(prompts) == 40
    gap = assert_equal_to_hf(llm, hf, prompts, 32)
    print(f"largest log-probability gap {gap:.2e}")


def test_example_prompts_are_answered_at_temperature_0_6(llm):
    """Ten samples of each: the primes exactly right, both ended by EOS."""
    prompts = [chat(llm, "introduce yourself"), chat(llm, "list all prime numbers within 100")] * 10
    outputs = llm.generate(prompts, SamplingParams(temperature=0.6, max_tokens=256), use_tqdm=False)
    for intro, primes in zip(outputs[::2], outputs[1::2], strict=True):
        assert intro["finish_reason"] == primes["finish_reason"] == "stop"
        assert "nanovllm" in intro["text"]
        assert PRIMES in primes["text"]


def run_script(*args):
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def test_example_script():
    result = run_script("example.py")
    assert result.returncode == 0, result.stderr
    assert PRIMES in result.stdout
    assert "Qwen/Qwen3-0.6B" in result.stdout  # the line to type for a real model


def test_example_script_without_the_model():
    """Offline, a hub id ends in one sentence that says what to do, not in a traceback."""
    result = run_script("example.py", "--model", "no-such-org/no-such-model")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "no-such-org/no-such-model" in result.stderr


def test_bench_script():
    """Small, as without a GPU; the last line is JSON that holds the settings and the figures."""
    result = run_script(
        "bench.py", "--num-seqs", "4", "--input-len", "4", "8", "--output-len", "4", "8"
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["num_seqs"] == 4 and figures["output_tokens"] > 0
