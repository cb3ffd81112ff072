"""Causal attention of many new tokens, packed over sequences, with or without cached context.

    4 new tokens (rows) of a sequence with 6 keys: the last row sees all, each row above one less

        key      0 1 2 3 4 5
        row 0    x x x . . .      row i sees keys 0 .. k_len - q_len + i
        row 1    x x x x . .
        row 2    x x x x x .
        row 3    x x x x x x

A program takes BLOCK_M rows of one kv head: BLOCK_M / group tokens times the group's query heads,
so that keys are read once a group and short prompts waste less. Tiles wholly below the diagonal
run without masks. Long tiles start first, so that the short ones fill the gaps at the end.

Cached context that sequences share is read once a tile, mostly from the L2 cache. With a tile full
of query rows the arithmetic takes longer than that, so that here nothing is read for several
sequences at once, as decode attention does.
"""

import torch

from nanovllm.kernels import launch
from nanovllm.kernels.launch import gdc_launch_dependents, gdc_wait, tl, triton

LOG2_E = 1.4426950408889634
_BLOCK_SEQS = (256, 2048, 16384, 1 << 20)  # sequences; few sizes, since each is a compilation

# (padded head_dim up to, large shared memory): (rows, keys, warps, stages) of a tile
_CONFIGS = {
    (64, True): (64, 64, 4, 3),
    (128, True): (64, 64, 4, 3),
    (256, True): (128, 64, 8, 2),
    (64, False): (128, 64, 4, 3),
    (128, False): (128, 64, 8, 2),
    (256, False): (64, 32, 4, 2),
}


def prefill_attention_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    block_tables: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    q_bounds, k_bounds = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for seq, (q_start, q_end) in enumerate(zip(q_bounds[:-1], q_bounds[1:], strict=True)):
        k_start, k_end = k_bounds[seq : seq + 2]
        q_len, k_len = q_end - q_start, k_end - k_start
        if q_len == 0:
            continue
        if block_tables is None:
            keys, values = k[k_start:k_end], v[k_start:k_end]
        else:
            blocks = block_tables[seq, : launch.cdiv(k_len, k.shape[1])].long()
            keys, values = k[blocks].flatten(0, 1)[:k_len], v[blocks].flatten(0, 1)[:k_len]
        group = q.shape[1] // keys.shape[1]
        keys = keys.transpose(0, 1).repeat_interleave(group, 0)  # [Hq, k_len, D]
        values = values.transpose(0, 1).repeat_interleave(group, 0)
        scores = q[q_start:q_end].transpose(0, 1) @ keys.transpose(1, 2) * scale
        hidden = torch.ones(q_len, k_len, dtype=torch.bool, device=q.device)
        scores.masked_fill_(hidden.triu(k_len - q_len + 1), -torch.inf)
        weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        out[q_start:q_end] = (weights @ values).transpose(0, 1)
    return out


@triton.jit
def _attend(
    q, acc, row_sum, row_max, last_key, first, end, k_ptr, v_ptr, blocks, block_stride,
    slot_stride, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr, KNOWN: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fold the tiles of keys first .. end - 1 into the softmax; first is a multiple of BLOCK_N.
    blocks: points to the numbers of the sequence's blocks; or KNOWN: int32 [32], of those from
    first's on, where each tile lies in one block. Then no load waits for another."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    offset = tl.arange(0, BLOCK_N)
    for start in tl.range(first, end, BLOCK_N, num_stages=STAGES):
        key = start + offset
        if PAGED:
            if BLOCK_SIZE % BLOCK_N == 0:  # the whole tile lies in one block
                if KNOWN:
                    is_it = tl.arange(0, 32) == start // BLOCK_SIZE - first // BLOCK_SIZE
                    block = tl.sum(tl.where(is_it, blocks, 0), 0).to(tl.int64)
                else:
                    block = tl.load(blocks + start // BLOCK_SIZE).to(tl.int64)
                row = block * block_stride + (start % BLOCK_SIZE + offset) * slot_stride
            else:
                block = tl.load(blocks + key // BLOCK_SIZE, mask=key < end, other=0).to(tl.int64)
                row = block * block_stride + (key % BLOCK_SIZE) * slot_stride
        else:
            row = key.to(tl.int64) * slot_stride
        at = row[:, None] + dim
        if MASKED:
            live = (key < end)[:, None] & (dim < HEAD_DIM)
            k = tl.load(k_ptr + at, mask=live, other=0.0)
            v = tl.load(v_ptr + at, mask=live, other=0.0)
        elif HEAD_DIM < BLOCK_D:
            k = tl.load(k_ptr + at, mask=dim < HEAD_DIM, other=0.0)
            v = tl.load(v_ptr + at, mask=dim < HEAD_DIM, other=0.0)
        else:
            k = tl.load(k_ptr + at)
            v = tl.load(v_ptr + at)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            scores = tl.where(key[None, :] <= last_key[:, None], scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        row_max = new_max
    return acc, row_sum, row_max


# A table of any width is the same kernel: what prompts come is not known when it is compiled.
@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def _prefill_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, block_tables_ptr,
    scale_log2, q_stride, out_stride, table_stride, block_stride, slot_stride, head_stride,
    num_seqs,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_SEQS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PAGED: tl.constexpr, PDL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(0)
    # Tiles are numbered sequence after sequence; from the last, since later ones see more keys.
    index = tl.num_programs(1) - 1 - tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.arange(0, BLOCK_SEQS)
    begin = tl.load(cu_seqlens_q_ptr + i, mask=i < num_seqs, other=0)
    tiles = tl.cdiv(tl.load(cu_seqlens_q_ptr + i + 1, mask=i < num_seqs, other=0) - begin, TOKENS)
    seq = tl.sum((tl.cumsum(tiles, 0) <= index).to(tl.int32), 0)
    if seq >= num_seqs:  # the grid is an upper bound: the lengths are not known on the host
        return
    first_token = (index - tl.sum(tl.where(i < seq, tiles, 0), 0)) * TOKENS
    q_start = tl.load(cu_seqlens_q_ptr + seq)
    q_len = tl.load(cu_seqlens_q_ptr + seq + 1) - q_start
    k_start = tl.load(cu_seqlens_k_ptr + seq)
    k_len = tl.load(cu_seqlens_k_ptr + seq + 1) - k_start
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    token = first_token + row // GROUP
    q_row = (q_start + token).to(tl.int64)
    column = (head * GROUP + row % GROUP)[:, None] * HEAD_DIM + dim[None, :]
    live = ((row < TOKENS * GROUP) & (token < q_len))[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + q_row[:, None] * q_stride + column, mask=live, other=0.0)
    k_ptr += head * head_stride
    v_ptr += head * head_stride
    table_ptr = block_tables_ptr
    if PAGED:
        table_ptr += seq.to(tl.int64) * table_stride
    else:
        k_ptr += k_start.to(tl.int64) * slot_stride
        v_ptr += k_start.to(tl.int64) * slot_stride
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    last_key = k_len - q_len + token
    # Keys up to the first row's last one are visible to all rows: whole tiles of them need no mask.
    unmasked_end = (k_len - q_len + first_token + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(k_len, k_len - q_len + first_token + TOKENS)
    acc, row_sum, row_max = _attend(
        q, acc, row_sum, row_max, last_key, 0, unmasked_end, k_ptr, v_ptr, table_ptr,
        block_stride, slot_stride, scale_log2,
        HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, PAGED, False, False, STAGES,
    )  # fmt: skip
    acc, row_sum, row_max = _attend(
        q, acc, row_sum, row_max, last_key, unmasked_end, end, k_ptr, v_ptr, table_ptr,
        block_stride, slot_stride, scale_log2,
        HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, PAGED, False, True, STAGES,
    )  # fmt: skip
    result = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + q_row[:, None] * out_stride + column, result, mask=live)


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    block_tables: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: tuple[int, int, int, int] | None = None,
) -> torch.Tensor:
    """Causal attention; row i of a sequence sees its keys 0 .. k_len - q_len + i.

    q: dtype [T, Hq, D] new tokens of all sequences, heads packed, any row stride.
    k, v: without block_tables dtype [T_k, Hkv, D] packed like q; with them one layer's caches
        [num_blocks, block_size, Hkv, D], in which the new tokens' keys already are.
    cu_seqlens_q, cu_seqlens_k: int32 [num_seqs + 1] bounds of each sequence's rows and keys; with
        block_tables only the differences of cu_seqlens_k count.
    block_tables: int32 [num_seqs, max_num_blocks] or None.
    out: dtype [T, Hq, D] to write, or None for a new one.
    config: (rows, keys, warps, stages) of a tile, to measure others than the table's.
    Returns out.
    """
    if not launch.use_triton(q) or q.numel() == 0:
        result = prefill_attention_ref(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, block_tables)
        return result if out is None else out.copy_(result)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_heads, head_dim = q.shape[1:]
    paged = block_tables is not None
    num_kv_heads = k.shape[-2]
    assert k.stride() == v.stride(), (k.stride(), v.stride())
    assert q.stride()[1:] == out.stride()[1:] == (head_dim, 1), (q.stride(), out.stride())
    facts = launch.gpu(q.device)
    group = num_heads // num_kv_heads
    block_d = launch.next_power_of_2(head_dim)
    if config is None:
        if q.dtype == torch.float32:  # exact products on CUDA cores
            config = (32 if block_d <= 64 else 16, 32, 4, 1)
        else:
            limit = next(d for d, _ in _CONFIGS if block_d <= d)
            config = _CONFIGS[limit, facts.large_shared_memory]
    block_m, block_n, warps, stages = config
    block_m = max(block_m, launch.next_power_of_2(group))
    num_seqs = len(cu_seqlens_q) - 1
    grid = num_kv_heads, launch.cdiv(q.shape[0], block_m // group) + num_seqs
    _prefill_attention_kernel[grid](
        q, k, v, out, cu_seqlens_q, cu_seqlens_k, block_tables, scale * LOG2_E,
        q.stride(0), out.stride(0), 0 if block_tables is None else block_tables.stride(0),
        k.stride(0) if paged else 0, k.stride(-3), k.stride(-2), num_seqs,
        HEAD_DIM=head_dim, GROUP=group, BLOCK_SIZE=k.shape[1] if paged else 1,
        BLOCK_SEQS=next(size for size in _BLOCK_SEQS if num_seqs <= size), BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_D=block_d, PAGED=paged, PDL=facts.pdl, STAGES=stages,
        num_warps=warps, num_stages=stages, launch_pdl=facts.pdl,
    )  # fmt: skip
    return out
