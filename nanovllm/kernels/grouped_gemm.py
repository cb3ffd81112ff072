"""The gated MLPs of a mixture of experts: each token through its own few, rows grouped by expert.

    x --route--> tiles of one expert each --gate_up, SiLU--> hidden, in the tiles' order
      --down, * routing weight--> [token, slot] copies --sum over slots, add to stream, norm--

Two grouped products over the tiles that kernels/moe_routing.py cuts. With few tokens an expert has
a row or two, and time is that of reading the active experts' weights once; the products are then
computed as W x^T, whose long side is the weights'. Every copy has a place of its own, and they are
added in slot order: no atomics, results do not vary from run to run. Knows no layer.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.kernels import launch
from nanovllm.kernels.launch import gdc_launch_dependents, gdc_wait, tl, triton
from nanovllm.kernels.moe_routing import Routing, max_tiles, route_ref, routing
from nanovllm.kernels.rms_norm import add_rms_norm_ref
from nanovllm.kernels.silu_and_mul import silu_and_mul_ref


class Config(NamedTuple):
    block_m: int  # pairs
    block_n: tuple[int, int]  # outputs of gate_up (each, so twice as many weight rows) and of down
    block_k: int
    warps: int
    swap: bool = False  # compute W x^T: the weights' rows fill the tensor core's 64-row side


# Pairs an expert on average, up to which a configuration is taken. Rows vary around the average:
# a tile has room for about twice as many, or experts' weights would be read twice.
_CONFIGS = {
    8: Config(16, (64, 64), 128, 4, swap=True),
    20: Config(32, (64, 64), 128, 4, swap=True),
    64: Config(64, (64, 128), 64, 4),
    2**31: Config(128, (128, 128), 64, 8),
}
_FLOAT32 = Config(32, (32, 32), 32, 4)  # exact products on CUDA cores


def config(
    num_pairs: int, num_experts: int, n: tuple[int, int], dtype: torch.dtype, facts: launch.Gpu
) -> Config:
    """n: outputs of gate_up and of down."""
    if dtype == torch.float32:
        return _FLOAT32
    chosen = next(c for pairs, c in _CONFIGS.items() if num_pairs <= pairs * num_experts)
    wide, wide_down = chosen.block_n
    tiles = max_tiles(num_pairs, num_experts, chosen.block_m)
    if chosen.swap and tiles * launch.cdiv(n[0], wide) < facts.num_sms:
        wide = 32  # or SMs would be without a program
    if not facts.large_shared_memory:
        wide = min(wide, 64)  # two sums of more columns would spill registers there
    return chosen._replace(block_n=(wide, wide_down))


def expert_copies_ref(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    renormalize: bool,
) -> torch.Tensor:
    weights, ids = route_ref(logits, top_k, renormalize)
    copies = x.new_empty((*ids.shape, x.shape[1]))
    for expert in ids.unique().tolist():
        token, slot = torch.where(ids == expert)
        hidden = silu_and_mul_ref(F.linear(x[token], gate_up[expert]))
        copies[token, slot] = F.linear(hidden, down[expert]) * weights[token, slot, None]
    return copies


@triton.jit(do_not_specialize=["max_tiles"])
def _grouped_kernel(
    x_ptr, weight_ptr, order_ptr, tiles_ptr, scale_ptr, out_ptr, max_tiles,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATE_UP: tl.constexpr, SWAP: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile's rows by BLOCK_N outputs; grid (outputs, tiles): what reads the same rows, or the
    same expert's weights, runs at the same time.

    GATE_UP: rows of x are tokens, weights [2 * N, K], out is in the order's order.
    Else x is in the order's order, weights [N, K], and rows of out are pairs, scaled.
    """
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile_ptr = tiles_ptr + tl.program_id(1)
    if tl.program_id(1) >= tl.load(tiles_ptr + 3 * max_tiles):
        return
    expert = tl.load(tile_ptr).to(tl.int64)
    place = tl.load(tile_ptr + max_tiles) + tl.arange(0, BLOCK_M)
    live = place < tl.load(tile_ptr + 2 * max_tiles)
    pair = tl.load(order_ptr + place, mask=live, other=0)
    x_row = (pair // TOP_K if GATE_UP else place).to(tl.int64)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the last repeat it: their products are not stored.
    w_row = col if EVEN_N else tl.minimum(col, N - 1)
    k_col = tl.arange(0, BLOCK_K)[None, :]
    x_ptr += x_row[:, None] * K + k_col
    weight_ptr += expert * ((2 if GATE_UP else 1) * N * K)
    weight_ptr += w_row.to(tl.int64)[:, None] * K + k_col
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros_like(acc)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            x = tl.load(x_ptr + k, mask=live[:, None], other=0.0)
            w = tl.load(weight_ptr + k)
        else:
            x = tl.load(x_ptr + k, mask=live[:, None] & (k + k_col < K), other=0.0)
            w = tl.load(weight_ptr + k, mask=k + k_col < K, other=0.0)
        if GATE_UP:
            if EVEN_K:
                u = tl.load(weight_ptr + N * K + k)
            else:
                u = tl.load(weight_ptr + N * K + k, mask=k + k_col < K, other=0.0)
        if SWAP:
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
            if GATE_UP:
                up = tl.dot(u, tl.trans(x), up, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
            if GATE_UP:
                up = tl.dot(x, tl.trans(u), up, input_precision="ieee")
    ROW_AXIS: tl.constexpr = 0 if SWAP else 1  # the one that rows are expanded along
    if GATE_UP:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    else:
        scale = tl.load(scale_ptr + pair, mask=live, other=0.0)
        acc *= tl.expand_dims(scale, ROW_AXIS)
    out_row = place if GATE_UP else pair
    offset = tl.expand_dims(out_row.to(tl.int64), ROW_AXIS) * N
    offset += tl.expand_dims(col, 1 - ROW_AXIS)
    mask = tl.expand_dims(live, ROW_AXIS) & tl.expand_dims(col < N, 1 - ROW_AXIS)
    tl.store(out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=mask)


def _grouped(
    x: torch.Tensor, weight: torch.Tensor, routed: Routing, chosen: Config, gate_up: bool
) -> torch.Tensor:
    num_pairs, max_num_tiles = len(routed.order), routed.tiles.shape[1]
    k, mats = weight.shape[2], 2 if gate_up else 1
    n, block_n = weight.shape[1] // mats, chosen.block_n[0 if gate_up else 1]
    assert weight.is_contiguous() and x.is_contiguous(), (weight.stride(), x.stride())
    facts = launch.gpu(x.device)
    stage = (mats * block_n + chosen.block_m) * chosen.block_k * x.element_size()
    if facts.large_shared_memory:
        # Two programs share an SM's memory, unless registers have room for one only.
        stages = 220 * 1024 // (2 if chosen.block_m <= 64 else 1) // stage
    else:
        stages = 96 * 1024 // stage + 1  # before Hopper the last one lies in registers
    stages = max(2, min(5, stages))
    out = torch.empty((num_pairs, n), dtype=x.dtype, device=x.device)
    _grouped_kernel[(launch.cdiv(n, block_n), max_num_tiles)](
        x, weight, routed.order, routed.tiles, routed.weights, out, max_num_tiles,
        N=n, K=k, TOP_K=routed.weights.shape[1], BLOCK_M=chosen.block_m, BLOCK_N=block_n,
        BLOCK_K=chosen.block_k, GATE_UP=gate_up, SWAP=chosen.swap, STAGES=stages, PDL=facts.pdl,
        num_warps=chosen.warps, num_stages=stages, launch_pdl=facts.pdl,
    )  # fmt: skip
    return out


def expert_copies(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    renormalize: bool,
    chosen: Config | None = None,
) -> torch.Tensor:
    """Each token's experts' outputs times their routing weights, to be added by the caller.

    x: dtype [T, H].
    logits: dtype [T, E] of the router.
    gate_up: dtype [E, 2 * N, H] gate rows, then up rows of each expert.
    down: dtype [E, H, N].
    renormalize: whether the weights of a token's experts are made to sum to 1.
    chosen: from `config`, by default for these shapes.
    Returns dtype [T, top_k, H].
    """
    if not launch.use_triton(x) or len(x) == 0:
        return expert_copies_ref(x, logits, gate_up, down, top_k, renormalize)
    num_experts, hidden_size, n = down.shape
    if chosen is None:
        facts = launch.gpu(x.device)
        chosen = config(len(x) * top_k, num_experts, (n, hidden_size), x.dtype, facts)
    routed = routing(logits, top_k, renormalize, chosen.block_m)
    hidden = _grouped(x, gate_up, routed, chosen, gate_up=True)
    return _grouped(hidden, down, routed, chosen, gate_up=False).view(len(x), top_k, hidden_size)


def sum_copies_ref(copies: torch.Tensor) -> torch.Tensor:
    return copies.sum(1)


def sum_copies_add_rms_norm_ref(
    copies: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return add_rms_norm_ref(copies.sum(1), residual, weight, eps)


@triton.jit
def _sum_copies_kernel(
    copies_ptr, residual_ptr, weight_ptr, normed_ptr, out_ptr, residual_stride, eps,
    K: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK_K)
    live = col < K
    if NORM:
        weight = tl.load(weight_ptr + col, mask=live, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK_K], tl.float32)
    for i in tl.static_range(TOP_K):
        total += tl.load(copies_ptr + (row * TOP_K + i) * K + col, mask=live, other=0.0)
    dtype = out_ptr.dtype.element_ty
    if NORM:
        x = tl.load(residual_ptr + row * residual_stride + col, mask=live, other=0.0)
        total += x.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(total * total, 0) / K + eps)
        y = (total * rstd).to(dtype).to(tl.float32) * weight
        tl.store(normed_ptr + row * K + col, y.to(dtype), mask=live)
    tl.store(out_ptr + row * K + col, total.to(dtype), mask=live)


def _sum_copies(
    copies: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    normed: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    num_rows, top_k, k = copies.shape
    assert copies.is_contiguous() and out.is_contiguous(), (copies.stride(), out.stride())
    assert residual is None or residual.stride(1) == 1, residual.stride()
    pdl, block_k = launch.gpu(copies.device).pdl, launch.next_power_of_2(k)
    _sum_copies_kernel[(num_rows,)](
        copies, residual, weight, normed, out, 0 if residual is None else residual.stride(0), eps,
        K=k, TOP_K=top_k, BLOCK_K=block_k, NORM=normed is not None, PDL=pdl,
        num_warps=4 if block_k <= 2048 else 8, launch_pdl=pdl,
    )  # fmt: skip
    return out


def sum_copies(copies: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Sum of each token's copies.

    copies: dtype [T, top_k, H].
    out: dtype [T, H] contiguous, or None for a new one.
    """
    if not launch.use_triton(copies) or copies.numel() == 0:
        total = sum_copies_ref(copies)
        return total if out is None else out.copy_(total)
    if out is None:
        out = torch.empty_like(copies[:, 0], memory_format=torch.contiguous_format)
    return _sum_copies(copies, out, None, None, None, 0.0)


def sum_copies_add_rms_norm(
    copies: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of each token's copies, residual add, then the norm of that sum.

    copies: dtype [T, top_k, H].
    residual: dtype [T, H] the stream, left as it is.
    weight: dtype [H] of the norm.
    Returns (normed: dtype [T, H], residual + sum: dtype [T, H]).
    """
    if not launch.use_triton(copies) or copies.numel() == 0:
        return sum_copies_add_rms_norm_ref(copies, residual, weight, eps)
    normed = torch.empty_like(residual, memory_format=torch.contiguous_format)
    return normed, _sum_copies(copies, torch.empty_like(normed), residual, weight, normed, eps)
