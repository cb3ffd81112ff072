"""Which experts a token goes to, and the order in which the grouped products take them.

A (token, expert) pair is numbered token * top_k + slot, slot 0 being the likeliest expert. Pairs
are sorted by expert and cut into tiles of one expert each. 4 experts, top_k 2, tiles of 2 rows:

    token            0      1      2        order   0 2 4 | 3 | 1 5       (pairs)
    experts        1 3    1 2    1 3        tiles   1: 0-2   1: 2-3   2: 3-4   3: 4-6
    pairs          0 1    2 3    4 5

All of it is computed on the device, and launches depend on the number of tokens only, so that CUDA
graphs can hold them. A token picks an expert once at most: a pair's place is a count of tokens.
"""

from dataclasses import dataclass

import torch

from nanovllm.kernels import launch
from nanovllm.kernels.launch import gdc_launch_dependents, gdc_wait, tl, triton

_ALONE = 64  # tokens up to which one program does it all


@dataclass(frozen=True)
class Routing:
    weights: torch.Tensor  # fp32 [num_tokens, top_k] of each pair, in the precision of the logits
    order: torch.Tensor  # int32 [num_tokens * top_k] pairs, sorted by expert
    # int32 [4, max_tiles]: expert, first place in the order and end of each tile, in the last row
    # the number of tiles and nothing else
    tiles: torch.Tensor


def max_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Most tiles that any routing takes: as many experts as possible begin one."""
    active = min(num_pairs, num_experts)
    return active + (num_pairs - active) // block_m


def route_ref(
    logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As in transformers: (weights: dtype [T, top_k], experts: int64 [T, top_k])."""
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(top_k, -1)
    if renormalize:
        weights /= weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), ids


@triton.jit
def _top_k(
    logits_ptr, weights_ptr, row, num_tokens,
    E: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write these tokens' weights; returns each expert's slot [ROWS, BLOCK_E], -1 if not picked."""
    col = tl.arange(0, BLOCK_E)[None, :]
    live = (row < num_tokens)[:, None]
    offset = row.to(tl.int64)[:, None]
    logits = tl.load(logits_ptr + offset * E + col, mask=live & (col < E), other=0.0)
    logits = logits.to(tl.float32)
    # A row that is not finite must pick experts that there are, each once: NaN and -inf come last,
    # before the columns that are none.
    logits = tl.where(logits > -3e38, logits, -3e38)
    left = tl.where(col < E, logits, -float("inf"))
    exp = tl.exp(left - tl.max(left, 1)[:, None])
    total = tl.sum(exp, 1)
    slot = tl.full([ROWS, BLOCK_E], -1, tl.int32)
    for i in tl.static_range(TOP_K):
        picked = col == tl.argmax(left, 1)[:, None]
        slot = tl.where(picked & live, i, slot)
        left = tl.where(picked, -float("inf"), left)
    if RENORMALIZE:
        total = tl.sum(tl.where(left == -float("inf"), exp, 0.0), 1)
    weight = (exp / total[:, None]).to(logits_ptr.dtype.element_ty).to(tl.float32)
    tl.store(weights_ptr + offset * TOP_K + slot, weight, mask=slot >= 0)
    return slot


@triton.jit
def _place(
    slot, row, before, total, order_ptr, tiles_ptr, max_tiles,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write these tokens' pairs where they belong, and the tiles that they begin.

    before, total: int32 [BLOCK_E] each expert's pairs of the tokens before these, and of all.
    """
    picked = slot >= 0
    rank = tl.cumsum(picked.to(tl.int32), 0) - 1 + before[None, :]
    end = tl.cumsum(total, 0)
    place = (end - total)[None, :] + rank
    tl.store(order_ptr + place, row[:, None] * TOP_K + slot, mask=picked)
    tiles = (total + BLOCK_M - 1) // BLOCK_M
    tile_ptr = tiles_ptr + (tl.cumsum(tiles, 0) - tiles)[None, :] + rank // BLOCK_M
    first = picked & (rank % BLOCK_M == 0)
    expert = tl.zeros_like(slot) + tl.arange(0, BLOCK_E)[None, :]
    tl.store(tile_ptr, expert, mask=first)
    tl.store(tile_ptr + max_tiles, place, mask=first)
    tl.store(tile_ptr + 2 * max_tiles, tl.minimum(place + BLOCK_M, end[None, :]), mask=first)
    tl.store(tiles_ptr + 3 * max_tiles, tl.sum(tiles, 0))


@triton.jit(do_not_specialize=["num_tokens", "max_tiles"])
def _route_kernel(
    logits_ptr, weights_ptr, order_ptr, tiles_ptr, slots_ptr, counts_ptr, num_tokens, max_tiles,
    E: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, ALONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS tokens a program. One alone places its pairs; of several each leaves its picks."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = _top_k(
        logits_ptr, weights_ptr, row, num_tokens, E, TOP_K, RENORMALIZE, ROWS, BLOCK_E
    )  # fmt: skip
    count = tl.sum((slot >= 0).to(tl.int32), 0)
    if ALONE:
        before = tl.zeros_like(count)
        _place(
            slot, row, before, count, order_ptr, tiles_ptr, max_tiles, TOP_K, BLOCK_M, BLOCK_E
        )  # fmt: skip
    else:
        col = tl.arange(0, BLOCK_E)
        tl.store(counts_ptr + tl.program_id(0) * BLOCK_E + col, count)
        live = (row < num_tokens)[:, None]
        slot_ptr = slots_ptr + row.to(tl.int64)[:, None] * BLOCK_E + col[None, :]
        tl.store(slot_ptr, slot.to(tl.int8), mask=live)


@triton.jit(do_not_specialize=["num_tokens", "max_tiles"])
def _place_kernel(
    slots_ptr, counts_ptr, order_ptr, tiles_ptr, num_tokens, max_tiles,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK_E)[None, :]
    live = (row < num_tokens)[:, None]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot_ptr = slots_ptr + row.to(tl.int64)[:, None] * BLOCK_E + col
    slot = tl.load(slot_ptr, mask=live, other=-1).to(tl.int32)
    before = tl.zeros([BLOCK_E], tl.int32)
    total = tl.zeros([BLOCK_E], tl.int32)
    programs = tl.num_programs(0)
    for begin in range(0, programs, 16):
        program = begin + tl.arange(0, 16)[:, None]
        count = tl.load(counts_ptr + program * BLOCK_E + col, mask=program < programs, other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where(program < tl.program_id(0), count, 0), 0)
    _place(slot, row, before, total, order_ptr, tiles_ptr, max_tiles, TOP_K, BLOCK_M, BLOCK_E)


def routing(logits: torch.Tensor, top_k: int, renormalize: bool, block_m: int) -> Routing:
    """Softmax over all experts, the top_k of them, and their pairs sorted into tiles.

    logits: dtype [num_tokens, num_experts] of at least one token, on a device that runs kernels.
    renormalize: whether a token's weights are divided by their sum.
    block_m: rows of a tile at most.
    """
    (num_tokens, num_experts), device = logits.shape, logits.device
    assert logits.is_contiguous() and top_k <= num_experts, (logits.shape, top_k)
    pairs, pdl = num_tokens * top_k, launch.gpu(device).pdl
    tiles = max_tiles(pairs, num_experts, block_m)
    block_e = launch.next_power_of_2(num_experts)
    rows = 4 if num_tokens <= 4 else 16 if num_tokens <= 16 or block_e > 128 else 64
    rows = rows if num_tokens <= _ALONE else min(rows, 32)
    programs = launch.cdiv(num_tokens, rows)
    result = Routing(
        weights=torch.empty((num_tokens, top_k), dtype=torch.float32, device=device),
        order=torch.empty(pairs, dtype=torch.int32, device=device),
        tiles=torch.empty((4, tiles), dtype=torch.int32, device=device),
    )
    slots = counts = None
    if programs > 1:
        slots = torch.empty((num_tokens, block_e), dtype=torch.int8, device=device)
        counts = torch.empty((programs, block_e), dtype=torch.int32, device=device)
    warps = 4 if rows <= 16 else 8
    _route_kernel[(programs,)](
        logits, result.weights, result.order, result.tiles, slots, counts, num_tokens, tiles,
        E=num_experts, TOP_K=top_k, RENORMALIZE=renormalize, ROWS=rows, BLOCK_E=block_e,
        BLOCK_M=block_m if programs == 1 else 0, ALONE=programs == 1, PDL=pdl, num_warps=warps,
        launch_pdl=pdl,
    )  # fmt: skip
    if programs > 1:
        _place_kernel[(programs,)](
            slots, counts, result.order, result.tiles, num_tokens, tiles,
            TOP_K=top_k, ROWS=rows, BLOCK_E=block_e, BLOCK_M=block_m, PDL=pdl,
            num_warps=warps, launch_pdl=pdl,
        )  # fmt: skip
    return result
