"""Decode attention over keys that rows share: a tile of K/V is loaded once for all of them.

    grid (kv head, program); programs share out the items, whose number is read on the device

    item: rows 2-4, keys 512-1024, slot 1          group of 2 query heads, tile of 16 query rows

        query row      0       1       2       3      4 .. 15
        row, head    2, 2h  2, 2h+1  3, 2h  3, 2h+1   nothing

The partial results, normalised and with the log of their sum, are merged by `paged_attention` in
the order of their slots; it starts while this kernel still runs. A captured graph serves any items,
up to the capacity of their list.
"""

from dataclasses import dataclass

import torch

from nanovllm.kernels import launch
from nanovllm.kernels.launch import gdc_launch_dependents, gdc_wait, tl, triton
from nanovllm.kernels.prefill_attention import LOG2_E, _attend

ITEM_ROWS = 64  # query rows of an item: of Hopper's matrix product, the least without padding
ITEM_KEYS = 256  # or more, where there are items enough without
# Whether paged attention's programs are few enough to run all at once, four an SM: (keys a tile of
# 2-byte heads of 128, warps, stages, programs an SM). One program here and four of those take 181
# of an H200's 227 KB of shared memory: with more, some would start only when this kernel has ended.
_CONFIGS = {True: (32, 4, 5, 2), False: (64, 4, 5, 2)}
# A thread's, few enough that those start beside this kernel's. It takes no more than that where a
# row of the tile is 256 bytes or less; others would spill.
_MAX_REGISTERS = 192


@dataclass(frozen=True)
class SharedPartials:
    """Attention of rows over the keys that they share with others, ahead of their own part."""

    own_starts: torch.Tensor  # int32 [B] the first key of a row's own part, as items' are
    partial_starts: torch.Tensor  # int32 [B + 1] where each row's partial results begin
    values: torch.Tensor  # dtype [max_partials, Hq, D rounded up to a power of two], normalised
    lse: torch.Tensor  # fp32 [max_partials, Hq] log2 of the sum of exp2 of their scores


def shared_partials(
    max_partials: int, q: torch.Tensor, own_starts: torch.Tensor, partial_starts: torch.Tensor
) -> SharedPartials:
    """Memory for so many partial results of q, dtype [B, Hq, D]."""
    values = q.new_empty(max_partials, q.size(1), launch.next_power_of_2(q.size(2)))
    lse = values.new_empty(values.shape[:2], dtype=torch.float32)
    return SharedPartials(own_starts, partial_starts, values, lse)


def cached_keys(cache: torch.Tensor, table: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """K or V of keys start .. end - 1 of the sequence with this block table: [Hkv, keys, D]."""
    block_size = cache.size(1)
    blocks = table[start // block_size : launch.cdiv(end, block_size)].long()
    keys = cache[blocks].flatten(0, 1)
    return keys[start % block_size :][: end - start].transpose(0, 1)


def attend_ref(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Hq, D] over all of k, v [Hkv, keys, D]: [B, Hq, D] and the scores' lse, fp32."""
    grouped = q.unflatten(1, (len(k), -1)).transpose(0, 1).flatten(1, 2)  # [Hkv, B * group, D]
    scores = grouped @ k.transpose(1, 2) * scale
    weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
    lse = scores.float().logsumexp(-1)

    def by_row(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (len(q), -1)).transpose(0, 1).flatten(1, 2)

    return by_row(weights @ v), by_row(lse[..., None])[..., 0]


def shared_prefix_attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    items: torch.Tensor,
    num_items: torch.Tensor,
    shared: SharedPartials,
    scale: float,
) -> None:
    for first, end, start, stop, slot in items[: int(num_items), :5].tolist():
        k = cached_keys(k_cache, block_tables[first], start, stop)
        v = cached_keys(v_cache, block_tables[first], start, stop)
        values, lse = attend_ref(q[first:end], k, v, scale)
        at = (shared.partial_starts[first:end] + slot).long()
        shared.values[at, :, : q.size(2)] = values.to(shared.values.dtype)
        shared.lse[at] = lse * LOG2_E


@triton.jit
def _load_blocks(table_ptr, first, end, BLOCK_SIZE: tl.constexpr):
    """The numbers of 32 blocks from key first's on, as far as there are keys in them."""
    block = first // BLOCK_SIZE + tl.arange(0, 32)
    return tl.load(table_ptr + block, mask=block * BLOCK_SIZE < end, other=0)


@triton.jit
def _shared_prefix_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, block_tables_ptr, items_ptr, num_items_ptr,
    partial_starts_ptr, values_ptr, lse_ptr, scale_log2, q_stride, table_stride, block_stride,
    slot_stride, head_stride,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, KNOWN: tl.constexpr, PDL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    num_heads = tl.num_programs(0) * GROUP
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    for item in range(tl.program_id(1), tl.load(num_items_ptr), tl.num_programs(1)):
        item_ptr = items_ptr + item * 8
        first_row = tl.load(item_ptr)
        end_row = tl.load(item_ptr + 1)
        start = tl.load(item_ptr + 2)
        end = tl.load(item_ptr + 3)
        slot = tl.load(item_ptr + 4)
        table_ptr = block_tables_ptr + first_row.to(tl.int64) * table_stride
        if KNOWN:  # and on the way before the wait
            blocks = _load_blocks(table_ptr, start, end, BLOCK_SIZE)
        seq = first_row + row // GROUP
        live = (seq < end_row) & (row // GROUP < BLOCK_M // GROUP)
        query_head = head * GROUP + row % GROUP
        seq_q_ptr = q_ptr + seq.to(tl.int64)[:, None] * q_stride + query_head[:, None] * HEAD_DIM
        if PDL:
            # Of the first item only. It waits before it releases: paged attention reads q and the
            # newest keys at once.
            gdc_wait()
            gdc_launch_dependents()
        q = tl.load(seq_q_ptr + dim, mask=live[:, None] & (dim < HEAD_DIM), other=0.0)
        row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        last_key = end - 1 + row * 0
        k_ptr = k_cache_ptr + head * head_stride
        v_ptr = v_cache_ptr + head * head_stride
        if KNOWN:
            for first in range(start, end, 31 * BLOCK_SIZE):  # of 32, one may be entered half way
                last = tl.minimum(first + 31 * BLOCK_SIZE, end)
                acc, row_sum, row_max = _attend(
                    q, acc, row_sum, row_max, last_key, first, last, k_ptr, v_ptr, blocks,
                    block_stride, slot_stride, scale_log2,
                    HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, True, True, False, STAGES,
                )  # fmt: skip
                blocks = _load_blocks(table_ptr, last, end, BLOCK_SIZE)
        else:
            acc, row_sum, row_max = _attend(
                q, acc, row_sum, row_max, last_key, start, end, k_ptr, v_ptr, table_ptr,
                block_stride, slot_stride, scale_log2,
                HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, True, False, BLOCK_SIZE % BLOCK_N != 0,
                STAGES,
            )  # fmt: skip
        partial = tl.load(partial_starts_ptr + seq, mask=live, other=0) + slot
        at = partial.to(tl.int64) * num_heads + query_head
        values = acc * (1.0 / row_sum)[:, None]
        tl.store(values_ptr + at[:, None] * BLOCK_D + dim, values, mask=live[:, None])
        tl.store(lse_ptr + at, row_max + tl.log2(row_sum), mask=live)
    if PDL:
        # When this kernel has ended, so have those before it: without items too. Other programs
        # that have none leave at once, and paged attention's take their place.
        if tl.program_id(1) == 0:
            gdc_wait()


def shared_prefix_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    items: torch.Tensor,
    num_items: torch.Tensor,
    shared: SharedPartials,
    scale: float,
) -> None:
    """Attention of the items' rows over the items' keys, into shared.values and shared.lse.

    q: dtype [B, Hq, D], heads packed, any row stride.
    k_cache, v_cache: dtype [num_blocks, block_size, Hkv, D] of one layer, same strides.
    block_tables: int32 [B, max_num_blocks]; an item's first row's names its keys' blocks.
    items: int32 [max_items, 8]: first row and end, first key and end, slot. Of at most
        max(ITEM_ROWS // (Hq // Hkv), 1) rows. Keys begin and end at multiples of 64, or of a block
        where blocks are no multiple of that.
        The result for row r becomes partial number shared.partial_starts[r] + slot.
    num_items: int32 [1].
    """
    if not launch.use_triton(q):
        shared_prefix_attention_ref(
            q, k_cache, v_cache, block_tables, items, num_items, shared, scale
        )
        return
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    group = q.size(1) // num_kv_heads
    assert k_cache.stride() == v_cache.stride(), (k_cache.stride(), v_cache.stride())
    assert k_cache.stride(3) == block_tables.stride(1) == 1 and items.is_contiguous()
    assert q.stride()[1:] == (head_dim, 1), q.stride()
    assert shared.values.shape[1:] == (q.size(1), launch.next_power_of_2(head_dim))
    facts = launch.gpu(q.device)
    is_few = len(q) * num_kv_heads <= 4 * facts.num_sms
    block_n, warps, stages, per_sm = _CONFIGS[is_few]
    num_programs = min(launch.cdiv(per_sm * facts.num_sms, num_kv_heads), len(items))
    block_d = launch.next_power_of_2(head_dim)
    block_n = max(16, min(block_n * 256 // (block_d * q.element_size()), block_n))
    # A look-up in the loop, a load for the next load's address, takes two of the stages. For many
    # rows, whose programs take several short items each, it is no slower.
    is_known = is_few and block_size % block_n == 0
    stages = stages + 2 * (is_few and not is_known) if facts.large_shared_memory else 2
    is_small = head_dim == block_d and block_d * q.element_size() <= 256
    _shared_prefix_kernel[(num_kv_heads, num_programs)](
        q, k_cache, v_cache, block_tables, items, num_items, shared.partial_starts, shared.values,
        shared.lse, scale * LOG2_E, q.stride(0), block_tables.stride(0), *k_cache.stride()[:3],
        HEAD_DIM=head_dim, GROUP=group, BLOCK_SIZE=block_size,
        BLOCK_M=max(ITEM_ROWS, launch.next_power_of_2(group)), BLOCK_D=block_d,
        BLOCK_N=block_n, KNOWN=is_known, PDL=facts.pdl, STAGES=stages,
        num_warps=warps, num_stages=stages, maxnreg=_MAX_REGISTERS if is_small else None,
        launch_pdl=facts.pdl,
    )  # fmt: skip
