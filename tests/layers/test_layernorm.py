"""R23: a norm changes neither its input nor the residual stream, in fp32 as well."""

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from nanovllm.kernels.norm_linear import normalize
from nanovllm.kernels.rms_norm import add_rms_norm
from nanovllm.layers.layernorm import RMSNorm

EPS = 1e-6


def make_norm(size, dtype):
    norm = RMSNorm(size, EPS)
    norm.weight.data = (1 + 0.2 * torch.randn(size)).to(dtype)
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_norm_equals_transformers(dtype, scale):
    norm, theirs = make_norm(48, dtype), Qwen3RMSNorm(48, EPS)
    theirs.weight.data = norm.weight.data
    x = (scale * torch.randn(9, 48)).to(dtype)
    torch.testing.assert_close(normalize(norm(x)), theirs(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_input_is_left_as_it_was(dtype):
    norm, x = make_norm(48, dtype), torch.randn(9, 48).to(dtype)
    before = x.clone()
    out = normalize(norm(x))
    assert torch.equal(x, before) and out.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual_is_the_sum_and_both_addends_are_left_as_they_were(dtype):
    norm = make_norm(48, dtype)
    x, residual = (torch.randn(9, 48).to(dtype) for _ in range(2))
    before = x.clone(), residual.clone()
    normed, total = add_rms_norm(x, residual, norm.weight, EPS)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])
    assert torch.equal(total, x + residual)
    if dtype == torch.float32:
        torch.testing.assert_close(normed, normalize(norm(total)))


def test_zero_rows_stay_finite():
    assert not normalize(make_norm(48, torch.float32)(torch.zeros(2, 48))).any()
