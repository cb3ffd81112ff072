"""Linears between norms: what each leaves so that no norm kernel runs where none is needed.

    stream --norm--> qkv, attention, o --add to stream--norm--> gate_up, SiLU, down --add...

With few rows the linear after a norm applies it itself: a gemv from the stream, a tensor-core
kernel from stream * norm weight and parts of the stream's sums of squares, both left by the linear
before it. Up to 256 rows cuBLAS may take those and leave 1/rms to the next elementwise kernel.
Beyond, cuBLAS and the norm kernels take turns. Knows no layer; a caller passes `NormInput` on.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanovllm.kernels import launch
from nanovllm.kernels.rms_norm import add_rms_norm, rms_norm
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.kernels.small_linear import (
    PLAIN,
    RESIDUAL,
    SILU,
    Config,
    LinearWorkspace,
    config,
    small_linear,
    supports,
)


@dataclass(frozen=True)
class NormInput:
    """A residual stream and the norm its next reader applies, as far as that is done already."""

    hidden: torch.Tensor  # dtype [M, K] the stream
    weight: torch.Tensor  # dtype [K] of the norm
    eps: float
    normed: torch.Tensor | None = None  # dtype [M, K] the norm's result
    scaled: torch.Tensor | None = None  # dtype [M, K] hidden * weight: 1/rms is still missing
    sum_squares: torch.Tensor | None = None  # fp32 [parts, >= M] to get it from, with scaled


def _choose(x: torch.Tensor, weight: torch.Tensor, epilogue: int) -> Config | None:
    """The kernel for these shapes, or None for cuBLAS (and for tensors that no kernel takes)."""
    m, k = x.shape
    n = weight.shape[0] // (2 if epilogue == SILU else 1)
    if m == 0 or not launch.use_triton(x):
        return None
    facts = launch.gpu(x.device)
    if not supports(m, n, k, x.dtype, epilogue, facts.num_sms):
        return None
    return config(m, n, k, epilogue, facts)


def normalize(x: NormInput) -> torch.Tensor:
    """The norm's result, dtype [M, K], computed unless it is there already."""
    return rms_norm(x.hidden, x.weight, x.eps) if x.normed is None else x.normed


def linear_into(
    x: torch.Tensor, weight: torch.Tensor, workspace: LinearWorkspace, out: torch.Tensor
) -> None:
    """out = x @ weight^T.

    x: dtype [M, K] rows at any stride.
    weight: dtype [N, K].
    out: dtype [M, N] contiguous.
    """
    chosen = _choose(x, weight, PLAIN)
    if chosen is None:
        torch.mm(x, weight.t(), out=out)
    else:
        small_linear(x, weight, workspace, chosen, out=out)


def norm_linear(
    x: NormInput, weight: torch.Tensor, workspace: LinearWorkspace
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """norm(x) @ weight^T.

    x: the stream and its norm, rows [M, K].
    weight: dtype [N, K].
    Returns (out: dtype [M, N], None), or (out, sum_squares) where cuBLAS took the rows before their
    1/rms: the reader has to apply it (`qk_norm_rope` does, given sum_squares and K).
    """
    chosen = _choose(x.hidden, weight, PLAIN)
    if chosen is not None:
        return _norm_linear(x, weight, workspace, PLAIN, chosen), None
    if x.scaled is not None:
        return F.linear(x.scaled, weight), x.sum_squares
    return F.linear(normalize(x), weight), None


def norm_linear_silu_mul(
    x: NormInput, weight: torch.Tensor, workspace: LinearWorkspace
) -> torch.Tensor:
    """SiLU(gate) * up of gate|up = norm(x) @ weight^T.

    x: the stream and its norm, rows [M, K].
    weight: dtype [2 * N, K] gate rows, then up rows.
    Returns dtype [M, N].
    """
    chosen = _choose(x.hidden, weight, SILU)
    if chosen is not None:
        return _norm_linear(x, weight, workspace, SILU, chosen)
    if x.scaled is not None:
        gate_up = F.linear(x.scaled, weight)
        return silu_and_mul(gate_up, x.sum_squares, x.hidden.shape[1], x.eps)
    return silu_and_mul(F.linear(normalize(x), weight))


def _norm_linear(
    x: NormInput, weight: torch.Tensor, workspace: LinearWorkspace, epilogue: int, chosen: Config
) -> torch.Tensor:
    if chosen.kind == "gemv":
        return small_linear(x.hidden, weight, workspace, chosen, epilogue, x.weight, eps=x.eps)[0]
    if x.scaled is None:
        return small_linear(normalize(x), weight, workspace, chosen, epilogue)[0]
    return small_linear(
        x.scaled, weight, workspace, chosen, epilogue, sum_squares=x.sum_squares, eps=x.eps
    )[0]


def residual_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    next_norm_weight: torch.Tensor,
    eps: float,
    workspace: LinearWorkspace,
) -> NormInput:
    """residual + x @ weight^T, and what the norm after it needs.

    x: dtype [M, K] rows at any stride.
    weight: dtype [N, K].
    residual: dtype [M, N] the stream before; left as it is.
    next_norm_weight: dtype [N] of the norm that reads the new stream first.
    Returns the new stream with that norm.
    """
    chosen = _choose(x, weight, RESIDUAL)
    if chosen is None:
        normed, hidden = add_rms_norm(F.linear(x, weight), residual, next_norm_weight, eps)
        return NormInput(hidden, next_norm_weight, eps, normed=normed)
    hidden, scaled, squares = small_linear(
        x, weight, workspace, chosen, RESIDUAL,
        residual=residual, next_norm_weight=next_norm_weight,
    )  # fmt: skip
    return NormInput(hidden, next_norm_weight, eps, scaled=scaled, sum_squares=squares)
