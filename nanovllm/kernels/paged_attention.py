"""Decode attention over the paged KV cache: one query token a sequence, split KV, one launch.

    grid (kv head, split, sequence); context of 10 keys, 3 splits, tiles of 2 keys:

        keys     0 1 2 3 | 4 5 6 7 | 8 9        chunk = 4: even shares in whole tiles
        program  split 0 | split 1 | split 2    each leaves its result and lse;
                                                the last to arrive merges all, in split order

The number of splits comes from batch, heads and SMs, never from the lengths, which are read on the
device: one launch shape serves a graph bucket. Rows of context length 0 are padding and give 0.
Among many sequences a program takes several kv heads: a token's keys stand side by side in its
tile, and a query sees those of its own head. Short contexts then pay for fewer programs.
`fused_decode_attention` also does what `qk_norm_rope` does, which pays up to `FUSED_MAX_BATCH`.
Keys that rows share may have been attended already, by shared_prefix.py: a row then begins at its
own part, and its first split takes the partial results of the others in.
Context lengths, block tables and older KV are read ahead of the PDL wait (see `launch`).
"""

import math
from dataclasses import dataclass

import torch

from nanovllm.kernels import launch
from nanovllm.kernels.launch import gdc_launch_dependents, gdc_wait, tl, triton
from nanovllm.kernels.merge_partials import UNROLLED, _merge_shared, _merge_two, merge_partials_ref
from nanovllm.kernels.qk_norm_rope import qk_norm_rope_ref
from nanovllm.kernels.shared_prefix import LOG2_E, SharedPartials, attend_ref, cached_keys

FUSED_MAX_BATCH = 16  # above, padding each program's queries to 16 rows costs more than a launch

# batch up to: (programs an SM to split for, keys a tile for 2-byte heads of 128, warps, stages, kv
# heads a program at most). Small tiles leave room for several programs an SM, which short contexts
# need to hide their loads. A program of several heads is long: it pays where many fill the GPU.
_CONFIGS = {8: (4, 64, 4, 2, 1), 16: (2, 64, 4, 2, 1), 64: (4, 64, 4, 3, 1), 192: (4, 32, 2, 5, 1)}
_CONFIGS |= {416: (4, 32, 2, 3, 1), 1 << 30: (4, 64, 4, 3, 4)}
# For own parts, which are short: programs of one warp start beside those of the shared prefixes'
# kernel, four an SM with its 24,576 registers and 96 KB, and most have read theirs when it ends.
_SHARED_CONFIG = (4, 16, 1, 6, 1)
_MAX_SPLITS = 64


@dataclass(frozen=True)
class DecodeWorkspace:
    """Scratch of one decode stream, shared by all layers."""

    partial: torch.Tensor  # fp32: results of each (sequence, kv head, split, query head)
    lse: torch.Tensor  # fp32: log2 of the sum of exp2 of their scores
    counters: torch.Tensor  # int32 [max_batch * num_kv_heads] splits arrived; 0 between calls


def _config(batch: int) -> tuple[int, int, int, int, int]:
    return next(config for limit, config in _CONFIGS.items() if batch <= limit)


def decode_splits(batch: int, num_kv_heads: int, max_context: int, num_sms: int) -> int:
    """Programs a (sequence, kv head): enough to fill the SMs at small batch; where the batch alone
    does, enough that one long context among short ones does not end the launch alone."""
    fill = max(_config(batch)[0] * num_sms // (batch * num_kv_heads), 1)
    long = launch.cdiv(max_context, 8192)
    splits = max(1 << (fill.bit_length() - 1), launch.next_power_of_2(long))
    return min(splits, _MAX_SPLITS, launch.next_power_of_2(launch.cdiv(max_context, 16)))


def decode_workspace(
    max_batch: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_context: int,
    device: torch.device,
) -> DecodeWorkspace:
    """Scratch for every batch up to max_batch and every context up to max_context."""
    sms = launch.gpu(device).num_sms
    splits = [decode_splits(b, num_kv_heads, max_context, sms) for b in range(1, max_batch + 1)]
    rows = max(b * s if s > 1 else 0 for b, s in enumerate(splits, 1)) * num_heads
    return DecodeWorkspace(
        partial=torch.empty(
            rows * launch.next_power_of_2(head_dim), dtype=torch.float32, device=device
        ),
        lse=torch.empty(rows, dtype=torch.float32, device=device),
        counters=torch.zeros(max_batch * num_kv_heads, dtype=torch.int32, device=device),
    )


def paged_decode_attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    shared: SharedPartials | None = None,
) -> torch.Tensor:
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for row, length in enumerate(context_lens.tolist()):
        if length == 0:
            continue
        start = 0 if shared is None else int(shared.own_starts[row])
        k = cached_keys(k_cache, block_tables[row], start, length)
        v = cached_keys(v_cache, block_tables[row], start, length)
        own, lse = attend_ref(q[row : row + 1], k, v, scale)
        if shared is not None:
            first, end = shared.partial_starts[row : row + 2].tolist()
            values = torch.cat([own.float(), shared.values[first:end, :, : q.size(2)].float()])
            lse = torch.cat([lse, shared.lse[first:end] / LOG2_E])
            own = merge_partials_ref(values, lse)[None]
        out[row] = own[0]
    return out


def fused_decode_attention_ref(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    eps: float,
) -> torch.Tensor:
    """Writes the newest token's k and v into the caches, and nothing else."""
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    positions = (context_lens - 1).clamp(min=0).long()
    blocks = block_tables.gather(1, (positions // block_size)[:, None])[:, 0]
    slots = blocks.long() * block_size + positions % block_size
    slots = torch.where(context_lens > 0, slots, -1)
    q, _, _ = qk_norm_rope_ref(
        qkv.clone(), q_norm, k_norm, positions, cos_sin, num_kv_heads, head_dim, eps,
        k_cache, v_cache, slots,
    )  # fmt: skip
    return paged_decode_attention_ref(q, k_cache, v_cache, block_tables, context_lens, scale)


@triton.jit
def _kv_offsets(
    table_ptr, start, end, block_stride, slot_stride, head_stride,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Cache offsets of HEADS heads' keys from start on, BLOCK_N in all, a token's side by side.
    start is a multiple of a tile's tokens, so that it lies in one block if they divide the block
    size; else each key looks its block up."""
    column = tl.arange(0, BLOCK_N)
    key = start + column // HEADS
    if BLOCK_SIZE % (BLOCK_N // HEADS) == 0:
        block = tl.load(table_ptr + start // BLOCK_SIZE, mask=start < end, other=0).to(tl.int64)
    else:
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0).to(tl.int64)
    offset = block * block_stride + (key % BLOCK_SIZE) * slot_stride
    return offset + (column % HEADS) * head_stride, key < end


@triton.jit
def _softmax_step(q, k, v, valid, row_max, row_sum, acc, scale_log2):
    """Fold one tile of keys into the running maximum, sum and weighted values."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    scores = tl.where(valid, scores, -float("inf"))
    new_max = tl.maximum(tl.maximum(row_max, tl.max(scores, 1)), -1e30)
    rescale = tl.exp2(row_max - new_max)
    weights = tl.exp2(scores - new_max[:, None])
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit
def _paged_attention_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, block_tables_ptr, context_lens_ptr, out_ptr, partial_ptr,
    partial_lse_ptr, counters_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, own_starts_ptr,
    partial_starts_ptr, shared_ptr, lse_ptr, scale_log2, eps, q_stride, out_stride, table_stride,
    block_stride, slot_stride, head_stride,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr, SPLIT: tl.constexpr,
    MIN_CHUNK: tl.constexpr, MERGE_STEP: tl.constexpr, FUSED: tl.constexpr, NORM: tl.constexpr,
    SHARED: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) * HEADS  # the first of HEADS; FUSED takes one
    split = tl.program_id(1)
    seq = tl.program_id(2)
    num_kv_heads = tl.num_programs(0) * HEADS
    max_splits = tl.num_programs(1)
    ROWS: tl.constexpr = GROUP * HEADS
    TOKENS: tl.constexpr = BLOCK_N // HEADS
    context_len = tl.load(context_lens_ptr + seq)
    first_key = 0
    end = context_len  # of what is read from the cache
    if FUSED:
        end = tl.maximum(context_len - 1, 0)
    if SHARED:
        first_key = tl.load(own_starts_ptr + seq)
        first_partial = tl.load(partial_starts_ptr + seq)
        end_partial = tl.load(partial_starts_ptr + seq + 1)
    num_keys = end - first_key
    chunk = tl.cdiv(tl.cdiv(num_keys, max_splits), TOKENS) * TOKENS
    chunk = tl.maximum(chunk, MIN_CHUNK)
    num_splits = tl.maximum(tl.cdiv(num_keys, chunk), 1)
    if PDL:
        gdc_launch_dependents()
    if split >= num_splits:
        return
    start = first_key + split * chunk
    end = tl.minimum(start + chunk, end)
    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    dim = tl.arange(0, BLOCK_D)
    in_dim = dim < HEAD_DIM
    head_offset = head * head_stride + dim
    row = tl.arange(0, BLOCK_M)
    dtype = k_cache_ptr.dtype.element_ty
    HALF: tl.constexpr = HEAD_DIM // 2
    if FUSED:
        # All that is older than this step is loaded while the qkv linear still runs: the first
        # tile, the norm weights, the angles, the newest token's block. Rotate-half needs each
        # dimension's partner in the other half. Rows below GROUP are query heads, row GROUP is the
        # new key: one norm and one rotation serve both.
        offset, first_valid = _kv_offsets(
            table_ptr, start, end, block_stride, slot_stride, head_stride, BLOCK_SIZE, BLOCK_N, 1
        )
        offset = offset[:, None] + head_offset[None, :]
        in_tile = first_valid[:, None] & in_dim[None, :]
        first_k = tl.load(k_cache_ptr + offset, mask=in_tile, other=0.0)
        first_v = tl.load(v_cache_ptr + offset, mask=in_tile, other=0.0)
        partner = tl.where(dim < HALF, dim + HALF, dim - HALF)
        is_key = (row == GROUP)[:, None]
        if NORM:
            weight = tl.where(
                is_key,
                tl.load(k_norm_ptr + dim, mask=in_dim, other=0.0)[None, :],
                tl.load(q_norm_ptr + dim, mask=in_dim, other=0.0)[None, :],
            ).to(tl.float32)
            weight_partner = tl.where(
                is_key,
                tl.load(k_norm_ptr + partner, mask=in_dim, other=0.0)[None, :],
                tl.load(q_norm_ptr + partner, mask=in_dim, other=0.0)[None, :],
            ).to(tl.float32)
        position = tl.maximum(context_len - 1, 0)
        angle_ptr = cos_sin_ptr + position.to(tl.int64) * HEAD_DIM + dim % HALF
        cos = tl.load(angle_ptr, mask=in_dim, other=0.0)[None, :]
        sin = tl.load(angle_ptr + HALF, mask=in_dim, other=0.0)
        sin = tl.where(dim < HALF, -sin, sin)[None, :]
        is_last = (split == num_splits - 1) & (context_len > 0)
        block = tl.load(table_ptr + position // BLOCK_SIZE).to(tl.int64)
        new_slot = block * block_stride + (position % BLOCK_SIZE) * slot_stride
    # The shared prefixes' kernel starts after all that is older, and only its own results are new.
    if PDL and not SHARED:
        gdc_wait()
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    seq_ptr = q_ptr + seq.to(tl.int64) * q_stride
    if FUSED:
        qk_head = tl.where(row < GROUP, head * GROUP + row, num_kv_heads * GROUP + head)
        in_row = (row <= GROUP)[:, None] & in_dim[None, :]
        x_ptr = seq_ptr + qk_head[:, None] * HEAD_DIM
        x = tl.load(x_ptr + dim[None, :], mask=in_row, other=0.0).to(tl.float32)
        x_partner = tl.load(x_ptr + partner[None, :], mask=in_row, other=0.0).to(tl.float32)
        new_v_ptr = seq_ptr + (num_kv_heads * (GROUP + 1) + head) * HEAD_DIM + dim
        new_v = tl.load(new_v_ptr, mask=in_dim, other=0.0)
        if NORM:
            rstd = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
            x = ((x * rstd).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
            x_partner = (x_partner * rstd).to(dtype).to(tl.float32) * weight_partner
            x_partner = x_partner.to(dtype).to(tl.float32)
        q = (x * cos + x_partner * sin).to(dtype)
        if is_last:
            new_k = tl.sum(tl.where(is_key, q.to(tl.float32), 0.0), 0)
            tl.store(k_cache_ptr + new_slot + head_offset, new_k.to(dtype), mask=in_dim)
            tl.store(v_cache_ptr + new_slot + head_offset, new_v, mask=in_dim)
            row_max = tl.sum(q.to(tl.float32) * new_k[None, :], 1) * scale_log2
            row_sum += 1.0
            acc += new_v.to(tl.float32)[None, :]
        row_max, row_sum, acc = _softmax_step(
            q, first_k, first_v, first_valid[None, :], row_max, row_sum, acc, scale_log2
        )
        start += BLOCK_N
    else:
        q = tl.load(
            seq_ptr + (head * GROUP + row)[:, None] * HEAD_DIM + dim[None, :],
            mask=(row < ROWS)[:, None] & in_dim[None, :],
            other=0.0,
        )
    # With several heads to a tile a row sees the columns of its own.
    sees = (row // GROUP)[:, None] == (tl.arange(0, BLOCK_N) % HEADS)[None, :]
    for tile in tl.range(start, end, TOKENS, num_stages=STAGES):
        offset, valid = _kv_offsets(
            table_ptr, tile, end, block_stride, slot_stride, head_stride, BLOCK_SIZE, BLOCK_N, HEADS
        )
        offset = offset[:, None] + head_offset[None, :]
        in_tile = valid[:, None] & in_dim[None, :]
        k = tl.load(k_cache_ptr + offset, mask=in_tile, other=0.0)
        v = tl.load(v_cache_ptr + offset, mask=in_tile, other=0.0)
        seen = valid[None, :] & sees if HEADS > 1 else valid[None, :]
        row_max, row_sum, acc = _softmax_step(q, k, v, seen, row_max, row_sum, acc, scale_log2)
    if SHARED:
        if PDL:
            gdc_wait()
        if (split == 0) & (first_partial < end_partial):
            row_max, row_sum, acc = _merge_shared(
                row_max, row_sum, acc, shared_ptr, lse_ptr, first_partial, end_partial,
                head * GROUP, num_kv_heads * GROUP, ROWS, MERGE_STEP, BLOCK_M, BLOCK_D,
            )  # fmt: skip

    out_ptr += seq.to(tl.int64) * out_stride + head * GROUP * HEAD_DIM
    live = (row < ROWS)[:, None] & in_dim[None, :]
    result = acc * tl.where(row_sum > 0.0, 1.0 / row_sum, 0.0)[:, None]
    result_ptr = out_ptr + row[:, None] * HEAD_DIM + dim[None, :]
    if not SPLIT:
        tl.store(result_ptr, result.to(dtype), mask=live)
    else:
        if num_splits == 1:
            tl.store(result_ptr, result.to(dtype), mask=live)
            return
        group = seq * tl.num_programs(0) + tl.program_id(0)
        first_row = group * max_splits * ROWS
        rows = first_row + split * ROWS + row
        partial_row_ptr = partial_ptr + rows.to(tl.int64)[:, None] * BLOCK_D + dim[None, :]
        tl.store(partial_row_ptr, result, mask=(row < ROWS)[:, None])
        tl.store(partial_lse_ptr + rows, row_max + tl.log2(row_sum), mask=row < ROWS)
        # All threads' partials must be visible before the count is.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + group, 1, sem="acq_rel")
        if arrived == num_splits - 1:
            for first in range(0, ROWS, UNROLLED):
                for i in tl.static_range(0, min(ROWS, UNROLLED), 2):
                    g = min(first + i, ROWS - 1)
                    h = min(first + i + 1, ROWS - 1)
                    a, sum_a, _, b, sum_b, _ = _merge_two(
                        partial_ptr, partial_lse_ptr, first_row + g, first_row + h, num_splits,
                        ROWS, MERGE_STEP, BLOCK_D,
                    )  # fmt: skip
                    tl.store(out_ptr + g * HEAD_DIM + dim, (a / sum_a).to(dtype), mask=in_dim)
                    tl.store(out_ptr + h * HEAD_DIM + dim, (b / sum_b).to(dtype), mask=in_dim)
            tl.store(counters_ptr + group, 0)


def _decode(
    rows: torch.Tensor,
    num_heads: int,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor | None,
    workspace: DecodeWorkspace | None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    eps: float = 0.0,
    shared: SharedPartials | None = None,
) -> torch.Tensor:
    """rows: q, or packed qkv to be normed, rotated and stored if cos_sin is given."""
    batch = rows.shape[0]
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    max_context = block_tables.shape[1] * block_size
    if out is None:
        out = torch.empty((batch, num_heads, head_dim), dtype=rows.dtype, device=rows.device)
    if workspace is None:
        workspace = decode_workspace(
            batch, num_heads, num_kv_heads, head_dim, max_context, rows.device
        )
    facts = launch.gpu(rows.device)
    splits = decode_splits(batch, num_kv_heads, max_context, facts.num_sms)
    assert k_cache.stride() == v_cache.stride(), (k_cache.stride(), v_cache.stride())
    assert k_cache.stride(3) == block_tables.stride(1) == 1
    assert out.stride()[1:] == (head_dim, 1), out.stride()
    assert workspace.counters.numel() >= batch * num_kv_heads, workspace.counters.shape
    assert splits == 1 or workspace.lse.numel() >= batch * splits * num_heads, (batch, splits)
    fused, group = cos_sin is not None, num_heads // num_kv_heads
    block_d = launch.next_power_of_2(head_dim)
    _, block_n, warps, stages, most_heads = _config(batch) if shared is None else _SHARED_CONFIG
    heads = 1 if fused else math.gcd(num_kv_heads, min(most_heads, max(16 // group, 1)))
    block_n = block_n * 128 * 2 // (block_d * rows.element_size())
    most = 128 if facts.large_shared_memory else 8192 // block_d
    if shared is not None:
        most = min(most, 64)  # own parts begin at multiples of that
    block_n = max(16, min(block_n, most))
    block_m = max(16, launch.next_power_of_2(group * heads + fused))
    warps = max(warps, block_m // 16)  # at most 16 rows each: the values of more would spill
    full = batch * num_kv_heads > 2 * facts.num_sms  # the batch alone fills the GPU
    _paged_attention_kernel[(num_kv_heads // heads, splits, batch)](
        rows, k_cache, v_cache, block_tables, context_lens, out,
        workspace.partial, workspace.lse, workspace.counters, q_norm, k_norm, cos_sin,
        *((None,) * 4 if shared is None else vars(shared).values()),
        scale * LOG2_E, eps, rows.stride(0), out.stride(0), block_tables.stride(0),
        *k_cache.stride()[:3],
        HEAD_DIM=head_dim, GROUP=group, BLOCK_SIZE=block_size,
        BLOCK_M=block_m, BLOCK_D=block_d,
        BLOCK_N=block_n, HEADS=heads, SPLIT=splits > 1,
        MIN_CHUNK=2048 if full else block_n // heads,
        MERGE_STEP=8 if splits <= 8 else 1024 * warps // block_d,
        FUSED=fused, NORM=q_norm is not None, SHARED=shared is not None, PDL=facts.pdl,
        STAGES=stages,
        num_warps=warps, num_stages=stages, launch_pdl=facts.pdl,
    )  # fmt: skip
    return out


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
    shared: SharedPartials | None = None,
) -> torch.Tensor:
    """Attention of each sequence's newest token over its cached keys, itself included.

    q: dtype [B, Hq, D], heads packed, any row stride (a view of packed qkv will do).
    k_cache, v_cache: dtype [num_blocks, block_size, Hkv, D] of one layer, same strides.
    block_tables: int32 [B, max_num_blocks]; its width, constant per model, sets the splits.
    context_lens: int32 [B] keys visible, the newest token included; 0 = padding row.
    out: dtype [B, Hq, D] to write, or None for a new one.
    workspace: from `decode_workspace`, or None for a new one (small tests).
    shared: from `shared_prefix_attention`, called right before on the same q, or None.
    Returns out, zero in padding rows.
    """
    if not launch.use_triton(q) or q.numel() == 0:
        result = paged_decode_attention_ref(
            q, k_cache, v_cache, block_tables, context_lens, scale, shared
        )
        return result if out is None else out.copy_(result)
    assert q.stride()[1:] == (q.shape[2], 1), q.stride()
    return _decode(
        q, q.shape[1], k_cache, v_cache, block_tables, context_lens, scale, out, workspace,
        shared=shared,
    )  # fmt: skip


def fused_decode_attention(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    eps: float,
    out: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """`qk_norm_rope` and `paged_decode_attention` in one launch, for batches <= FUSED_MAX_BATCH.

    qkv: dtype [B, (Hq + 2 * Hkv) * D] packed rows, left as they are.
    q_norm, k_norm: dtype [D] norm weights, both or neither.
    cos_sin: fp32 [max_position, D] D/2 cosines, then D/2 sines.
    k_cache, v_cache: dtype [num_blocks, block_size, Hkv, D]; the newest token's slot, at position
        context_lens - 1, is written (nothing in padding rows).
    The rest as in `paged_decode_attention`. Returns out: dtype [B, Hq, D].
    """
    if not launch.use_triton(qkv) or qkv.numel() == 0:
        result = fused_decode_attention_ref(
            qkv, q_norm, k_norm, cos_sin, k_cache, v_cache, block_tables, context_lens, scale, eps
        )
        return result if out is None else out.copy_(result)
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    return _decode(
        qkv, num_heads, k_cache, v_cache, block_tables, context_lens, scale, out, workspace,
        q_norm, k_norm, cos_sin, eps,
    )  # fmt: skip
