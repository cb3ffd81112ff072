"""Per-head QK RMSNorm, RoPE and the KV store, from packed QKV rows, for decode and prefill.

    one row of qkv, 4 query and 2 kv heads:   q0 q1 q2 q3 | k0 k1 | v0 v1
                                              norm, rotate  norm,   as is
                                              -> in place   rotate  |
                                                            |  +----+-> v_cache[slot]
                                                            +-> in place and k_cache[slot]

Knows no attention. The cache is [num_blocks, block_size, num_kv_heads, head_dim]. Positions and
slots are read ahead of the PDL wait (see `launch`).
"""

import torch

from nanovllm.kernels import launch
from nanovllm.kernels.launch import gdc_launch_dependents, gdc_wait, tl, triton
from nanovllm.kernels.rms_norm import inverse_rms


def norm_rope_ref(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """x: dtype [T, heads, D]. The norm is rounded before its weight multiplies; RoPE is fp32.

    norm_weight: dtype [D], or [heads, D] for heads with different weights.
    """
    if norm_weight is not None:
        x = (x * inverse_rms(x, eps)).to(x.dtype).mul_(norm_weight)
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, -1)
    x1, x2 = x.float().chunk(2, -1)
    first = torch.addcmul(x1 * cos, x2, sin, value=-1)
    return torch.cat((first, torch.addcmul(x2 * cos, x1, sin)), -1).to(x.dtype)


def store_kv_ref(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write k, v [T, Hkv, D] into their slots; -1 is skipped."""
    slots = slot_mapping.long()
    if slots.min() < 0:
        stored = slots >= 0
        k, v, slots = k[stored], v[stored], slots[stored]
    k_cache.flatten(0, 1).index_copy_(0, slots, k)
    v_cache.flatten(0, 1).index_copy_(0, slots, v)


def qk_norm_rope_ref(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    k_cache: torch.Tensor | None = None,
    v_cache: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    sum_squares: torch.Tensor | None = None,
    hidden_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `qk_norm_rope`, which see."""
    heads = qkv.unflatten(-1, (-1, head_dim))
    num_heads = heads.shape[1] - 2 * num_kv_heads
    if sum_squares is not None:
        rstd = torch.rsqrt(sum_squares.sum(0)[: len(qkv), None, None] / hidden_size + eps)
        heads.copy_((heads * rstd).to(qkv.dtype))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], 1)
    # q and k heads stand side by side: one pass over both is half the operations of two.
    weights = None
    if q_norm is not None and k_norm is not None:
        weights = torch.cat((q_norm.expand(num_heads, -1), k_norm.expand(num_kv_heads, -1)))
    rotated = norm_rope_ref(heads[:, :-num_kv_heads], weights, positions, cos_sin, eps)
    heads[:, :-num_kv_heads] = rotated
    if slot_mapping is not None:
        assert k_cache is not None and v_cache is not None, "slots of no cache"
        store_kv_ref(k, v, k_cache, v_cache, slot_mapping)
    return q, k, v


@triton.jit(do_not_specialize=["parts"])
def _qk_norm_rope_kernel(
    qkv_ptr, q_out_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr, positions_ptr, cos_sin_ptr,
    q_norm_ptr, k_norm_ptr, sum_squares_ptr, qkv_stride, q_stride, block_stride, slot_stride,
    head_stride, parts, parts_stride, hidden_size, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, NORM: tl.constexpr,
    STORE: tl.constexpr, BLOCK_PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token, HEADS of its q|k|v heads. A row's two halves stay in one thread each, so that a
    rotation needs no exchange and writing in place is safe after the barrier."""
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    dim = tl.arange(0, BLOCK_HALF)
    in_half = (dim < HALF)[None, :]
    is_q = (head < NUM_HEADS)[:, None]
    is_k = (head >= NUM_HEADS)[:, None] & (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
    is_v = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    live = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_half
    if NORM:
        q_weight1 = tl.load(q_norm_ptr + dim, mask=dim < HALF, other=0.0)[None, :]
        q_weight2 = tl.load(q_norm_ptr + HALF + dim, mask=dim < HALF, other=0.0)[None, :]
        k_weight1 = tl.load(k_norm_ptr + dim, mask=dim < HALF, other=0.0)[None, :]
        k_weight2 = tl.load(k_norm_ptr + HALF + dim, mask=dim < HALF, other=0.0)[None, :]
        weight1 = tl.where(is_q, q_weight1, k_weight1).to(tl.float32)
        weight2 = tl.where(is_q, q_weight2, k_weight2).to(tl.float32)
    table_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * HEAD_DIM + dim
    cos = tl.load(table_ptr, mask=dim < HALF, other=0.0)[None, :]
    sin = tl.load(table_ptr + HALF, mask=dim < HALF, other=0.0)[None, :]
    if STORE:
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    dtype = qkv_ptr.dtype.element_ty
    row_ptr = qkv_ptr + token.to(tl.int64) * qkv_stride + head[:, None] * HEAD_DIM + dim[None, :]
    raw1 = tl.load(row_ptr, mask=live, other=0.0)
    raw2 = tl.load(row_ptr + HALF, mask=live, other=0.0)
    x1 = raw1.to(tl.float32)
    x2 = raw2.to(tl.float32)
    if BLOCK_PARTS > 0:
        part = tl.arange(0, BLOCK_PARTS)
        squares = tl.load(
            sum_squares_ptr + part * parts_stride + token, mask=part < parts, other=0.0
        )
        rstd = tl.rsqrt(tl.sum(squares, 0) / hidden_size + eps)
        raw1 = (x1 * rstd).to(dtype)
        raw2 = (x2 * rstd).to(dtype)
        x1 = raw1.to(tl.float32)
        x2 = raw2.to(tl.float32)
    if NORM:
        squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
        rstd = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        x1 = ((x1 * rstd).to(dtype).to(tl.float32) * weight1).to(dtype).to(tl.float32)
        x2 = ((x2 * rstd).to(dtype).to(tl.float32) * weight2).to(dtype).to(tl.float32)
    y1 = (x1 * cos - x2 * sin).to(dtype)
    y2 = (x2 * cos + x1 * sin).to(dtype)
    tl.debug_barrier()
    q_ptr = q_out_ptr + token.to(tl.int64) * q_stride + head[:, None] * HEAD_DIM + dim[None, :]
    tl.store(q_ptr, y1, mask=is_q & in_half)
    tl.store(q_ptr + HALF, y2, mask=is_q & in_half)
    tl.store(row_ptr, y1, mask=is_k & in_half)
    tl.store(row_ptr + HALF, y2, mask=is_k & in_half)
    if BLOCK_PARTS > 0:
        tl.store(row_ptr, raw1, mask=is_v & live)
        tl.store(row_ptr + HALF, raw2, mask=is_v & live)
    if STORE:
        if slot >= 0:
            slot_offset = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride
            offset = slot_offset + kv_head[:, None] * head_stride + dim[None, :]
            tl.store(k_cache_ptr + offset, y1, mask=is_k & in_half)
            tl.store(k_cache_ptr + offset + HALF, y2, mask=is_k & in_half)
            tl.store(v_cache_ptr + offset, raw1, mask=is_v & live)
            tl.store(v_cache_ptr + offset + HALF, raw2, mask=is_v & live)


def qk_norm_rope(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    k_cache: torch.Tensor | None = None,
    v_cache: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    sum_squares: torch.Tensor | None = None,
    hidden_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm and rotate q and k, put k and v into their cache slots. Writes qkv in place.

    qkv: dtype [T, (Hq + 2 * Hkv) * D] packed rows at any row stride. Afterwards its k heads hold
        the rotated keys, and its q heads the rotated queries.
    q_norm, k_norm: dtype [D] norm weights, both or neither (families without QK norm).
    positions: int32 or int64 [T] in the sequence.
    cos_sin: fp32 [max_position, D] D/2 cosines, then D/2 sines.
    k_cache, v_cache: dtype [num_blocks, block_size, Hkv, D] of one layer, same strides; written.
    slot_mapping: int32 or int64 [T] block_id * block_size + offset, -1 to store nothing; None
        together with the caches stores nothing at all.
    sum_squares: fp32 [parts, >= T], if the matmul before was fed h * norm weight: parts of the sum
        of h * h, from which 1/rms over hidden_size is applied here.
    Returns (q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]), views of qkv.
    """
    if not launch.use_triton(qkv) or qkv.numel() == 0:
        return qk_norm_rope_ref(
            qkv, q_norm, k_norm, positions, cos_sin, num_kv_heads, head_dim, eps, k_cache, v_cache,
            slot_mapping, sum_squares, hidden_size,
        )  # fmt: skip
    num_tokens = qkv.shape[0]
    heads = qkv.unflatten(-1, (-1, head_dim))
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], 1)
    block_size, strides = 1, [0, 0, 0]
    if slot_mapping is not None:
        assert k_cache is not None and v_cache is not None, "slots of no cache"
        assert k_cache.stride() == v_cache.stride(), (k_cache.stride(), v_cache.stride())
        block_size, strides = k_cache.shape[1], list(k_cache.stride()[:3])
    # Few tokens: small programs, for latency, and beside which attention's find room on every SM
    # (64 rows of 2,000 keys: 155 us a step less than with all heads of a token in one; fewer than
    # that, 48 of 600: 74 us less again with half the threads). Many: a token's heads share one.
    heads_per_program = 8 if num_tokens <= 128 else min(32, launch.next_power_of_2(heads.shape[1]))
    parts, stride = (0, 0) if sum_squares is None else (len(sum_squares), sum_squares.stride(0))
    pdl = launch.gpu(qkv.device).pdl
    _qk_norm_rope_kernel[(num_tokens, launch.cdiv(heads.shape[1], heads_per_program))](
        qkv, q, k_cache, v_cache, slot_mapping, positions, cos_sin, q_norm, k_norm, sum_squares,
        qkv.stride(0), q.stride(0), *strides, parts, stride, hidden_size, eps,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size, HEADS=heads_per_program,
        BLOCK_HALF=launch.next_power_of_2(head_dim // 2), NORM=q_norm is not None,
        STORE=slot_mapping is not None, BLOCK_PARTS=launch.next_power_of_2(parts) if parts else 0,
        PDL=pdl, num_warps=2 if 32 < num_tokens < 64 else 4, launch_pdl=pdl,
    )  # fmt: skip
    return q, k, v
