"""SiLU(gate) * up."""

import pytest
import torch
from cases import assert_error_at_most_twice_torch

from nanovllm.kernels import silu_and_mul as op

CASES = [(1, 80), (15, 512), (17, 3072), (1025, 8)]
GPU_CASES = [(1, 3072), (17, 80), (2049, 3072), (33, 25600), (1030, 9728)]


def check(shape, dtype, device, scaled):
    rows, n = shape
    gate_up = (3 * torch.randn(rows, 2 * n, device=device)).to(dtype)
    squares = torch.rand(5, rows + 3, device=device) * 10 + 1 if scaled else None
    tail = squares, 64, 1e-6
    exact = op.silu_and_mul_ref(gate_up.float(), *tail)
    plain = op.silu_and_mul_ref(gate_up, *tail)
    assert_error_at_most_twice_torch(op.silu_and_mul(gate_up, *tail), plain, exact, shape)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_matches_reference(shape, scaled):
    check(shape, torch.float16, "cpu", scaled)
    check(shape, torch.float32, "cpu", scaled)


@pytest.mark.gpu
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shape", GPU_CASES, ids=str)
def test_matches_reference_on_gpu(shape, scaled):
    check(shape, torch.bfloat16, "cuda", scaled)
