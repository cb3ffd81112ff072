"""Choosing a backend: the fastest that can run, or the one asked for, or a reason."""

import subprocess
import sys

import pytest
import torch

from nanovllm.attention import select_backend
from nanovllm.attention.flash_attn2 import FlashAttn2Backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_auto_takes_torch_on_the_cpu_and_says_why_not_a_faster_one():
    backend, why = select_backend("auto", CPU, torch.float32, 64, 16)
    assert backend.name == "torch"
    assert "flash_attn: it needs a CUDA device, not cpu" in why


def test_explicit_torch_needs_no_reason():
    backend, why = select_backend("torch", CPU, torch.float32, 20, 7)
    assert backend.name == "torch" and why == ""


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="attention_backend: got 'flash'.*flash_attn.*torch"):
        select_backend("flash", CPU, torch.float32, 64, 16)


def test_explicit_name_that_cannot_run_says_why_for_every_backend():
    """No silent fallback: who asks for a backend by name gets it or an error."""
    with pytest.raises(ValueError, match="flash_attn: it needs a CUDA device") as refusal:
        select_backend("flash_attn", CPU, torch.bfloat16, 64, 256)
    assert "torch: can run" in str(refusal.value)


@pytest.mark.parametrize(
    "dtype, head_dim, reason",
    [
        (torch.float32, 64, "float16 or bfloat16, not torch.float32"),
        (torch.float16, 36, "steps of 8 up to 256, not 36"),
        (torch.float16, 264, "up to 256, not 264"),
    ],
)
def test_flash_attn_refuses_what_it_cannot_compute(dtype, head_dim, reason):
    assert reason in FlashAttn2Backend().unsupported_reason(CUDA, dtype, head_dim)


def test_missing_flash_attn_is_the_reason_it_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # makes the import fail
    reason = FlashAttn2Backend().unsupported_reason(CUDA, torch.float16, 64)
    assert "cannot be imported" in reason and "flash_attn" in reason


def test_block_size_that_a_backend_cannot_use_is_a_reason(monkeypatch):
    monkeypatch.setattr(FlashAttn2Backend, "unsupported_reason", lambda *_: None)
    assert select_backend("flash_attn", CPU, torch.float16, 64, 512)[0].name == "flash_attn"
    with pytest.raises(ValueError, match="multiple of 256, not 128"):
        select_backend("flash_attn", CPU, torch.float16, 64, 128)


def test_package_imports_and_runs_with_torch_alone():
    """R14: without flash-attn and Triton, nothing but a slower backend."""
    program = """
import sys
for name in ("flash_attn", "flash_attn_interface", "triton"):
    sys.modules[name] = None  # makes the import fail
import torch
from nanovllm.attention import select_backend
import nanovllm.models.qwen3
backend, _ = select_backend("auto", torch.device("cpu"), torch.float32, 64, 16)
assert backend.name == "torch"
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
