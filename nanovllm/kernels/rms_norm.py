"""RMSNorm, alone or after a residual add. Knows rows, not layers."""

import functools

import torch

from nanovllm.kernels import launch
from nanovllm.kernels.launch import gdc_launch_dependents, gdc_wait, tl, triton


@functools.cache
def _constant(value: float, device: torch.device) -> torch.Tensor:
    """fp32 []"""
    return torch.tensor(value, dtype=torch.float32, device=device)


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) of the last dimension, fp32 [..., 1]."""
    # The shortest way in torch operations, whose number is what a step on the CPU costs; eps is a
    # tensor because an operation with a Python number counts for several.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.addcmul(_constant(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm in fp32, rounded to x's dtype before the weight multiplies it (as in Qwen3)."""
    return (x * inverse_rms(x, eps)).to(x.dtype).mul_(weight)


def add_rms_norm_ref(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm sees the sum before it is rounded to the stream's dtype."""
    total = x.float() + residual
    normed = (total * inverse_rms(total, eps)).to(residual.dtype).mul_(weight)
    return normed, total.to(residual.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, residual_out_ptr, num_rows, x_stride,
    residual_stride, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_K)[None, :]
    live = (rows < num_rows) & (cols < K)
    weight = tl.load(weight_ptr + cols, mask=cols < K, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + rows * x_stride + cols, mask=live, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if ADD:
        x += tl.load(residual_ptr + rows * residual_stride + cols, mask=live, other=0.0).to(
            tl.float32
        )
        tl.store(residual_out_ptr + rows * K + cols, x.to(dtype), mask=live)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / K + eps)
    y = (x * rstd[:, None]).to(dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + rows * K + cols, y.to(dtype), mask=live)


def _run(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    residual_out: torch.Tensor | None,
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x_rows = x.reshape(-1, x.shape[-1])
    residual_rows = x_rows if residual is None else residual.reshape(x_rows.shape)
    num_rows, k = x_rows.shape
    block_k = launch.next_power_of_2(k)
    # Many short rows: a warp per row. Few rows: all warps on one.
    rows = 4 if num_rows >= 1024 and block_k <= 2048 else 1
    pdl = launch.gpu(x.device).pdl
    _rms_norm_kernel[(launch.cdiv(num_rows, rows),)](
        x_rows, residual_rows, weight, out, residual_out, num_rows, x_rows.stride(0),
        residual_rows.stride(0), eps,
        K=k, BLOCK_K=block_k, ROWS=rows, ADD=residual is not None, PDL=pdl,
        num_warps=4 if block_k <= 2048 else 8, launch_pdl=pdl,
    )  # fmt: skip
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm of the last dimension.

    x: dtype [..., K] rows, at any stride.
    weight: dtype [K].
    Returns dtype [..., K].
    """
    if not launch.use_triton(x) or x.numel() == 0:
        return rms_norm_ref(x, weight, eps)
    return _run(x, None, weight, eps, None)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual add, then the norm of the sum.

    x: dtype [..., K] what a layer adds to the stream.
    residual: dtype [..., K] the stream, left as it is.
    weight: dtype [K].
    Returns (normed: dtype [..., K], residual + x: dtype [..., K]).
    """
    if not launch.use_triton(x) or x.numel() == 0:
        return add_rms_norm_ref(x, residual, weight, eps)
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    return _run(x, residual, weight, eps, total), total
