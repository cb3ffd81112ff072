"""Write new keys and values into their slots of the paged cache.

Owns that one copy. Knows slots only, not which sequence they belong to.

Block size 4, three tokens of one sequence with block table [7, 2], the third, fourth and fifth of
it, and one padding row: slot_mapping = [30, 31, 8, -1].

    block 7: slots 28 29 30 31      block 2: slots 8 9 10 11
                         ^  ^                      ^             the last row goes nowhere
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # there are no Triton packages for macOS and for CPU-only builds
    triton = None


def store_kvcache_ref(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """The same as `store_kvcache`, in plain torch."""
    assert k_cache.is_contiguous() and v_cache.is_contiguous(), "slots must be rows of the cache"
    slots = slot_mapping.long()
    if slots.numel() and int(slots.min()) < 0:
        is_stored = slots >= 0
        slots, k, v = slots[is_stored], k[is_stored], v[is_stored]
    k_cache.flatten(0, 1).index_copy_(0, slots, k)
    v_cache.flatten(0, 1).index_copy_(0, slots, v)


if triton is not None:

    @triton.jit
    def _store_kvcache_kernel(
        k_ptr,
        v_ptr,
        k_cache_ptr,
        v_cache_ptr,
        slot_mapping_ptr,
        k_stride,
        v_stride,
        WIDTH: tl.constexpr,
        PADDED_WIDTH: tl.constexpr,
    ):
        """One program copies one token's `num_kv_heads * head_dim` = WIDTH values of K and of V."""
        # 64 bits: slot * WIDTH passes 2**31 in the cache of a small model on a large device.
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
        if slot < 0:
            return
        offsets = tl.arange(0, PADDED_WIDTH)
        mask = offsets < WIDTH
        k = tl.load(k_ptr + token * k_stride + offsets, mask=mask)
        v = tl.load(v_ptr + token * v_stride + offsets, mask=mask)
        tl.store(k_cache_ptr + slot * WIDTH + offsets, k, mask=mask)
        tl.store(v_cache_ptr + slot * WIDTH + offsets, v, mask=mask)


def store_kvcache_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """The same as `store_kvcache`, in one kernel."""
    num_tokens, num_kv_heads, head_dim = k.shape
    width = num_kv_heads * head_dim
    assert k_cache.is_contiguous() and v_cache.is_contiguous(), "slots must be rows of the cache"
    # Within a token the values must be neighbours; tokens may lie apart, as in the packed qkv.
    k, v = k.flatten(1), v.flatten(1)
    if num_tokens == 0:
        return
    _store_kvcache_kernel[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        WIDTH=width,
        PADDED_WIDTH=triton.next_power_of_2(width),
    )


def store_kvcache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Copy each token's K/V to its slot; only the caches change.

    k, v: float [num_tokens, num_kv_heads, head_dim] any distance between tokens
    k_cache, v_cache: float [num_blocks, block_size, num_kv_heads, head_dim]
    slot_mapping: int32 [num_tokens] distinct slots, -1 for a padding row, which is not stored
    """
    if k.is_cuda and triton is not None:
        store_kvcache_triton(k, v, k_cache, v_cache, slot_mapping)
    else:
        store_kvcache_ref(k, v, k_cache, v_cache, slot_mapping)
