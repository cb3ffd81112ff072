"""What ranks do together in one kernel: sums of their rows, and the best of their draws.

Each rank has its share in memory that all of them can read (utils/peer_memory.py). A kernel
first meets itself on the other ranks: every program tells its peers of the same place that it has
come, and waits for them. Whatever a rank had written before its kernel started is then there to be
read, over NVLink:

    rank 0   linear -> slot of rank 0 --.  meet   slot 0 + slot 1 + stream, norm
    rank 1   linear -> slot of rank 1 --'  meet   slot 0 + slot 1 + stream, norm

All ranks add in the order of ranks, so they get the same bits. A slot may be written again once its
rank has met the others a second time (hence two of them): by then they have read it.
"""

import torch

from nanovllm.kernels import launch
from nanovllm.kernels.launch import gdc_launch_dependents, gdc_wait, tl, triton
from nanovllm.kernels.rms_norm import add_rms_norm_ref
from nanovllm.utils.peer_memory import MAX_MEETINGS, MAX_PAIRS, PAIRS_AT, PeerMemory, Slot


def sum_ref(parts: torch.Tensor) -> torch.Tensor:
    """parts: dtype [ranks, M, K]."""
    return parts.float().sum(0).to(parts.dtype)


def sum_add_rms_norm_ref(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """parts: dtype [ranks, M, K]; neither the sum nor what the norm sees is rounded before."""
    return add_rms_norm_ref(parts.float().sum(0), residual, weight, eps)


def pick_best_ref(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """values, tokens: [ranks, n]; of equal values the first rank's counts."""
    return tokens.gather(0, values.argmax(0, keepdim=True))[0]


@triton.jit
def _address(bases, peer):
    """One of the addresses that a program has loaded, [RANKS], before it waits for anything."""
    index = tl.arange(0, bases.shape[0])
    return tl.sum(tl.where(index == peer, bases, 0), 0)


@triton.jit
def _wait_for(flag_ptr, count, abort_ptr):
    """Until the flag is at this count or beyond (it may wrap around), or everybody is told to stop.

    An atomic operation that changes nothing is the load that acquires what came before the flag.
    """
    spins = 0
    seen = tl.atomic_cas(flag_ptr, 0, 0, sem="acquire", scope="sys")
    while seen - count < 0:
        seen = tl.atomic_cas(flag_ptr, 0, 0, sem="acquire", scope="sys")
        spins += 1
        if spins == 4096:  # the word lies in the host's memory, too far to look at each time
            spins = 0
            if tl.load(abort_ptr, volatile=True) != 0:
                seen = count


@triton.jit
def _meet(bases, abort_ptr, rank, SIZE: tl.constexpr):
    """Wait for the programs of the same place on all ranks: each adds one to its flag in every
    peer's memory, and waits until theirs have come as often as itself. A peer that is a meeting
    ahead has only a higher count."""
    place = tl.program_id(0) * SIZE
    for peer in tl.static_range(SIZE):
        if peer != rank:
            theirs_ptr = _address(bases, peer).to(tl.pointer_type(tl.int32)) + place + rank
            tl.atomic_add(theirs_ptr, 1, sem="release", scope="sys")
    flags_ptr = _address(bases, rank).to(tl.pointer_type(tl.int32)) + place
    count = tl.load(flags_ptr + rank, volatile=True) + 1
    for peer in tl.static_range(SIZE):
        if peer != rank:
            _wait_for(flags_ptr + peer, count, abort_ptr)
    tl.debug_barrier()
    tl.store(flags_ptr + rank, count)


@triton.jit(do_not_specialize=["num_rows", "offset", "rank"])
def _sum_kernel(
    addresses_ptr, abort_ptr, rank, offset, residual_ptr, weight_ptr, normed_ptr, out_ptr, num_rows,
    eps,
    SIZE: tl.constexpr, RANKS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK_K)[None, :]
    index = tl.arange(0, RANKS)
    bases = tl.load(addresses_ptr + index, mask=index < SIZE, other=0)
    dtype = out_ptr.dtype.element_ty
    if NORM:
        weight = tl.load(weight_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    _meet(bases, abort_ptr, rank, SIZE)
    for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]  # a slot is far below 2**31 elements
        live = (rows < num_rows) & (cols < K)
        total = tl.zeros([ROWS, BLOCK_K], tl.float32)
        for peer in tl.static_range(SIZE):
            slot_ptr = (_address(bases, peer) + offset).to(tl.pointer_type(dtype))
            slot_ptr = tl.multiple_of(slot_ptr, 16)
            part = tl.load(slot_ptr + rows * K + cols, live, 0.0, cache_modifier=".cg")
            total += part.to(tl.float32)
        if NORM:
            total += tl.load(residual_ptr + rows * K + cols, live, 0.0).to(tl.float32)
            rstd = tl.rsqrt(tl.sum(total * total, 1) / K + eps)
            normed = (total * rstd[:, None]).to(dtype).to(tl.float32) * weight
            tl.store(normed_ptr + rows * K + cols, normed.to(dtype), mask=live)
        tl.store(out_ptr + rows * K + cols, total.to(dtype), mask=live)


def _launch_sum(
    peers: PeerMemory,
    slot: Slot,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    normed: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
) -> None:
    num_rows, k = slot.rows.shape
    assert out.shape == slot.rows.shape and out.is_contiguous(), (out.shape, out.stride())
    block_k = launch.next_power_of_2(k)
    rows = 4 if num_rows >= 1024 and block_k <= 2048 else 1
    # All programs wait, so all must find room at once: no more than two on each SM.
    facts = launch.gpu(out.device)
    grid = min(launch.cdiv(num_rows, rows), 2 * facts.num_sms, MAX_MEETINGS)
    _sum_kernel[(grid,)](
        peers.addresses, peers.abort, peers.rank, slot.offset, residual, weight, normed, out,
        num_rows, eps,
        SIZE=peers.size, RANKS=launch.next_power_of_2(peers.size), K=k, BLOCK_K=block_k, ROWS=rows,
        NORM=normed is not None, PDL=facts.pdl, num_warps=4 if block_k <= 2048 else 8,
        launch_pdl=facts.pdl,
    )  # fmt: skip


def sum_over_ranks(peers: PeerMemory, slot: Slot, out: torch.Tensor) -> None:
    """Sum of what the ranks have in this slot, the same bits on each of them.

    slot, out: dtype [M, K], out contiguous.
    """
    _launch_sum(peers, slot, None, None, None, out, 0.0)


def sum_add_rms_norm(
    peers: PeerMemory,
    slot: Slot,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    normed: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """`add_rms_norm` of the sum over ranks.

    slot: dtype [M, K] this rank's addend.
    residual: dtype [M, K] contiguous, the stream.
    weight: dtype [K].
    normed, out: dtype [M, K] contiguous to write, out being residual + sum.
    """
    assert residual.is_contiguous() and normed.is_contiguous(), residual.stride()
    _launch_sum(peers, slot, residual, weight, normed, out, eps)


@triton.jit(do_not_specialize=["n", "offset", "rank"])
def _pick_best_kernel(
    addresses_ptr, abort_ptr, rank, offset, values_ptr, tokens_ptr, out_ptr, n,
    SIZE: tl.constexpr, RANKS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A rank's pairs lie in its memory as values, then tokens. Like the draw before it, it releases
    no successor early."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.arange(0, RANKS)
    bases = tl.load(addresses_ptr + index, mask=index < SIZE, other=0)
    mine_ptr = (_address(bases, rank) + offset).to(tl.pointer_type(tl.float32))
    tl.store(mine_ptr + i, tl.load(values_ptr + i, mask=i < n, other=0.0), mask=i < n)
    mine_ptr = mine_ptr.to(tl.pointer_type(tl.int32))
    token = tl.load(tokens_ptr + i, mask=i < n, other=0).to(tl.int32)
    tl.store(mine_ptr + CAPACITY + i, token, mask=i < n)
    tl.debug_barrier()
    _meet(bases, abort_ptr, rank, SIZE)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    chosen = tl.full([BLOCK], -1, tl.int32)
    for peer in tl.static_range(SIZE):
        pairs_ptr = (_address(bases, peer) + offset).to(tl.pointer_type(tl.float32))
        value = tl.load(pairs_ptr + i, mask=i < n, other=0.0, cache_modifier=".cg")
        pairs_ptr = pairs_ptr.to(tl.pointer_type(tl.int32)) + CAPACITY
        token = tl.load(pairs_ptr + i, mask=i < n, other=0, cache_modifier=".cg")
        chosen = tl.where(value > best, token, chosen)
        best = tl.maximum(value, best)
    tl.store(out_ptr + i, chosen.to(out_ptr.dtype.element_ty), mask=i < n)


def pick_best(peers: PeerMemory, values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Of every rank's draw the one with the largest value.

    values: fp32 [n], n <= MAX_PAIRS, of this rank's tokens: int64 [n]; -inf where it has none.
    Returns int64 [n], the same on every rank; -1 where no value is above -inf.
    """
    n, block = len(values), 128
    assert n <= MAX_PAIRS, n
    out = torch.empty_like(tokens)
    _pick_best_kernel[(launch.cdiv(n, block),)](
        peers.addresses, peers.abort, peers.rank, PAIRS_AT, values, tokens, out, n,
        SIZE=peers.size, RANKS=launch.next_power_of_2(peers.size), CAPACITY=MAX_PAIRS, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out
