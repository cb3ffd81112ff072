"""RMSNorm, residual add + RMSNorm."""

import pytest
import torch
from cases import POISON, assert_error_at_most_twice_torch, to_float

from nanovllm.kernels import rms_norm as op

CASES = [(1, 80), (15, 192), (17, 1024), (1025, 16), (2, 2560)]
GPU_CASES = [(1, 1024), (17, 80), (15, 192), (2049, 1024), (257, 5120), (1030, 2560), (5, 4096)]


def check_norm(shape, dtype, device):
    x = torch.full((shape[0], shape[1] + 8), POISON, device=device).to(dtype)
    x[:, : shape[1]] = torch.randn(shape, device=device)
    x = x[:, : shape[1]]
    weight = (1 + 0.1 * torch.randn(shape[1], device=device)).to(dtype)
    exact = op.rms_norm_ref(*to_float([x, weight]), 1e-6)
    actual, plain = op.rms_norm(x, weight, 1e-6), op.rms_norm_ref(x, weight, 1e-6)
    assert_error_at_most_twice_torch(actual, plain, exact, shape)


def check_add_norm(shape, dtype, device):
    x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    weight = (1 + 0.1 * torch.randn(shape[1], device=device)).to(dtype)
    exact = op.add_rms_norm_ref(*to_float([x, residual, weight]), 1e-6)
    plain = op.add_rms_norm_ref(x, residual, weight, 1e-6)
    kept = residual.clone()
    actual = op.add_rms_norm(x, residual, weight, 1e-6)
    for name, a, p, e in zip(("normed", "total"), actual, plain, exact, strict=True):
        assert_error_at_most_twice_torch(a, p, e, (name, shape))
    assert torch.equal(actual[1], plain[1])
    assert torch.equal(residual, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_matches_reference(shape, dtype):
    check_norm(shape, dtype, "cpu")
    check_add_norm(shape, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_CASES, ids=str)
def test_matches_reference_on_gpu(shape):
    check_norm(shape, torch.bfloat16, "cuda")
    check_add_norm(shape, torch.bfloat16, "cuda")
