"""Linears for few rows: every kernel, every epilogue, odd shapes, the configurations."""

import pytest
import torch
from cases import assert_error_at_most_twice_torch

from nanovllm.kernels import small_linear as op
from nanovllm.kernels.launch import Gpu, cdiv

EPS = 1e-6
EPILOGUES = [op.PLAIN, op.RESIDUAL, op.SILU]
# rows, outputs, inputs
CASES = [(1, 40, 80), (2, 72, 192), (3, 40, 80), (15, 192, 192), (17, 64, 1040)]
GPU_CASES = [
    *[(m, n, k) for m in (1, 2, 15, 17, 33) for n, k in ((1024, 2048), (1024, 3072), (192, 512))],
    *[(m, n, k) for m in (1, 8, 32) for n, k in ((2560, 9728), (5120, 4096), (4096, 12288))],
    (2, 5120, 4096), (1, 5120, 25600), (16, 80, 80), (64, 4096, 1024), (64, 1024, 3072),
    (128, 4096, 1024), (100, 3072, 1024),
    (200, 1024, 3072), (256, 1024, 2048), (32, 3072, 1024), (64, 512, 192), (7, 2048, 6144),
]  # fmt: skip
STREAMED = [  # block_m, block_n, block_k, split_k, swap
    (16, 32, 64, 1, True),
    (16, 32, 64, 2, True),
    (32, 16, 128, 3, False),
    (16, 64, 32, 1, False),
]


def check(case, epilogue, chosen, dtype, device, prologue=True):
    """prologue: with the norm in front, in the form that the kernel takes it."""
    m, n, k = case
    x = torch.randn(m, k + 16, device=device).to(dtype)[:, :k]  # rows strided
    weight = torch.randn(n * (2 if epilogue == op.SILU else 1), k, device=device) * k**-0.5
    norm, next_norm = (1 + 0.1 * torch.randn(size, device=device) for size in (k, n))
    weight, norm, next_norm = weight.to(dtype), norm.to(dtype), next_norm.to(dtype)
    residual = torch.randn(m, n, device=device).to(dtype)
    tail = {}
    if epilogue == op.RESIDUAL:
        tail = {"residual": residual, "next_norm_weight": next_norm}
    elif prologue and chosen.kind == "gemv":
        tail = {"norm_weight": norm, "eps": EPS}
    elif prologue:
        tail = {"sum_squares": k / 40 * (0.5 + torch.rand(40, m + 3, device=device)), "eps": EPS}
    space = op.linear_workspace(torch.device(device))
    space.partial.fill_(torch.nan)
    kept = residual.clone()
    out, scaled, squares = op.small_linear(x, weight, space, chosen, epilogue, **tail)
    plain, plain_scaled, _ = op.small_linear_ref(x, weight, epilogue, **tail)
    exact_tail = {name: t.float() if torch.is_tensor(t) else t for name, t in tail.items()}
    exact, exact_scaled, _ = op.small_linear_ref(x.float(), weight.float(), epilogue, **exact_tail)
    assert_error_at_most_twice_torch(out, plain, exact, (case, chosen))
    if scaled is not None:
        assert_error_at_most_twice_torch(scaled, plain_scaled, exact_scaled, "scaled")
        total = out.float().square().sum(-1)
        torch.testing.assert_close(squares.sum(0)[:m], total, rtol=1e-5, atol=1e-5)
        assert (squares.sum(0)[m:] == 0).all()
    assert torch.equal(residual, kept)
    assert (space.counters == 0).all()
    again = op.small_linear(x, weight, space, chosen, epilogue, **tail)
    assert torch.equal(out, again[0]), "not deterministic"


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chosen_kernel_matches_reference(case, epilogue):
    check(case, epilogue, op.config(*case, epilogue, Gpu()), torch.float16, "cpu")


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("shape", STREAMED, ids=str)
def test_streamed_kernel_matches_reference(shape, epilogue):
    *blocks, swap = shape
    chosen = op.Config("streamed", *blocks, swap=swap, stages=2)
    check((17, 40, 208), epilogue, chosen, torch.float16, "cpu", prologue=swap)


def test_long_rows_pass_in_chunks():
    for epilogue in EPILOGUES:
        chosen = op.Config("gemv", 1, 4, 64)
        check((1, 18, 208), epilogue, chosen, torch.float16, "cpu")


def test_configurations_of_the_measured_shapes():
    """Qwen3-0.6B on 132 SMs: what sweeps on an H200 found best comes out of the rules."""
    shapes = {
        "qkv": (4096, 1024, op.PLAIN), "o": (1024, 2048, op.RESIDUAL),
        "gate_up": (3072, 1024, op.SILU), "down": (1024, 3072, op.RESIDUAL),
    }  # fmt: skip

    def found(m, name):
        c = op.config(m, *shapes[name], Gpu())
        if c.kind == "gemv":
            return c.kind, c.block_n, c.warps
        if c.kind == "one_shot":
            return c.kind, c.block_m, c.block_n, c.split_k, c.swap, c.warps
        return c.kind, c.block_m, c.block_n, c.block_k, c.split_k, c.swap, c.stages, c.warps

    expected = {
        (1, "qkv"): ("gemv", 4, 2), (1, "o"): ("gemv", 8, 4),
        (1, "gate_up"): ("gemv", 4, 2), (1, "down"): ("gemv", 2, 4),
        (2, "qkv"): ("gemv", 8, 2), (2, "o"): ("gemv", 8, 4),
        (2, "gate_up"): ("gemv", 8, 4), (2, "down"): ("gemv", 2, 4),
        (8, "qkv"): ("one_shot", 16, 64, 4, False, 4), (8, "o"): ("one_shot", 16, 64, 4, False, 4),
        (16, "qkv"): ("one_shot", 16, 64, 1, True, 8), (16, "o"): ("one_shot", 16, 64, 4, False, 4),
        (16, "gate_up"): ("one_shot", 16, 32, 2, False, 4),
        (16, "down"): ("one_shot", 16, 32, 6, False, 4),
        (32, "qkv"): ("one_shot", 32, 64, 1, True, 8), (32, "o"): ("one_shot", 32, 64, 4, False, 8),
        (32, "gate_up"): ("streamed", 32, 64, 128, 1, True, 5, 4),
        (32, "down"): ("one_shot", 32, 64, 3, True, 8),
        (64, "qkv"): ("streamed", 64, 32, 128, 1, False, 5, 4),
        (64, "o"): ("streamed", 64, 16, 256, 2, False, 3, 4),
        (64, "gate_up"): ("streamed", 64, 32, 128, 1, False, 5, 4),
        (64, "down"): ("streamed", 64, 32, 256, 4, False, 3, 4),
        (128, "qkv"): ("streamed", 64, 64, 128, 1, False, 4, 4),
        (128, "gate_up"): ("streamed", 64, 64, 128, 1, False, 4, 4),
        (256, "o"): ("streamed", 64, 32, 256, 1, False, 3, 4),
        (256, "down"): ("streamed", 64, 32, 256, 1, False, 3, 4),
        (128, "o"): ("streamed", 64, 32, 256, 2, False, 3, 4),
        (128, "down"): ("streamed", 64, 32, 256, 2, False, 3, 4),
    }  # fmt: skip
    assert {key: found(*key) for key in expected} == expected


@pytest.mark.parametrize("sms", [46, 108, 132])
def test_every_split_fits_the_workspace(sms):
    for m in (3, 16, 17, 32, 33, 64, 128, 256):
        for n in (8, 80, 192, 1024, 2560, 4096, 5120, 12288, 25600, 151936):
            for k in (16, 80, 192, 512, 1024, 2048, 2560, 3072, 4096, 5120, 9728, 12288, 25600):
                for epilogue in EPILOGUES:
                    if not op.supports(m, n, k, torch.bfloat16, epilogue, sms):
                        continue
                    c = op.config(m, n, k, epilogue, Gpu(sms, large_shared_memory=sms == 132))
                    tiles = cdiv(n, c.block_n) * cdiv(m, c.block_m)
                    size = c.block_m * c.block_n * (2 if epilogue == op.SILU else 1)
                    if c.split_k > 1:
                        assert tiles * c.split_k * size <= 16384 * sms, (m, n, k, epilogue, c)
                        assert tiles <= 16 * sms, (m, n, k, epilogue, c)


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_matches_reference_on_gpu(case, epilogue):
    if not op.supports(*case, torch.bfloat16, epilogue):
        pytest.skip("cuBLAS takes it")
    chosen = op.config(*case, epilogue, Gpu())
    check(case, epilogue, chosen, torch.bfloat16, "cuda")
