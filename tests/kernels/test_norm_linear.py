"""A decoder layer's linears in a chain: norms and residuals travel from kernel to kernel."""

import pytest
import torch
import torch.nn.functional as F
from cases import assert_error_at_most_twice_torch

from nanovllm.kernels import norm_linear as op
from nanovllm.kernels.silu_and_mul import silu_and_mul_ref
from nanovllm.kernels.small_linear import linear_workspace

EPS = 1e-6


def rms(x):
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)


def check_chain(m, hidden, inter, dtype, device):
    """norm, gate_up, SiLU, down, residual, norm, qkv: against the same in plain torch."""

    def weight(n, k):
        return (torch.randn(n, k, device=device) * k**-0.5).to(dtype)

    stream = torch.randn(m, hidden, device=device).to(dtype)
    norms = [(1 + 0.1 * torch.randn(hidden, device=device)).to(dtype) for _ in range(2)]
    weights = weight(2 * inter, hidden), weight(hidden, inter), weight(2 * hidden, hidden)
    space = linear_workspace(torch.device(device))

    def plain(stream, norms, weights):
        def norm(x, w):
            return (x.float() * rms(x)).to(x.dtype) * w

        act = silu_and_mul_ref(F.linear(norm(stream, norms[0]), weights[0]))
        stream = stream + F.linear(act, weights[1])
        return stream, F.linear(norm(stream, norms[1]), weights[2])

    first = op.NormInput(stream, norms[0], EPS)
    act = op.norm_linear_silu_mul(first, weights[0], space)
    second = op.residual_linear(act, weights[1], stream, norms[1], EPS, space)
    qkv, pending = op.norm_linear(second, weights[2], space)
    if pending is not None:
        assert torch.equal(pending, second.sum_squares)
        qkv = (qkv.float() * rms(second.hidden)).to(dtype)
    same = plain(stream, norms, weights)
    exact = plain(stream.float(), [n.float() for n in norms], [w.float() for w in weights])
    assert_error_at_most_twice_torch(second.hidden, same[0], exact[0], (m, "stream"))
    assert_error_at_most_twice_torch(qkv, same[1], exact[1], (m, "qkv"))
    normed = (exact[0] * rms(exact[0])) * norms[1].float()
    again = (same[0].float() * rms(same[0])).to(dtype) * norms[1]
    assert_error_at_most_twice_torch(op.normalize(second), again, normed, (m, "norm"))
    assert (space.counters == 0).all()


@pytest.mark.parametrize("rows", [1, 2, 5, 17])
def test_chain_matches_plain_torch(rows):
    check_chain(rows, 64, 80, torch.float16, "cpu")


def test_dtypes_that_no_kernel_takes_run_plain_torch():
    check_chain(3, 64, 80, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024, 3072), (192, 512), (4096, 12288)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 33, 100, 300])
def test_chain_matches_plain_torch_on_gpu(rows, shape):
    check_chain(rows, *shape, torch.bfloat16, "cuda")
