"""Attention in plain torch: the CPU's path, and what every other backend is tested against.

Owns nothing but indices derived from the current step. Gathers a sequence's K/V from the cache and
lets `scaled_dot_product_attention` do the rest; runs on every device torch knows.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanovllm.attention.base import AttentionBackend
from nanovllm.utils.context import Context


class TorchSDPABackend(AttentionBackend):
    """Prefill one sequence at a time without padding; decode all sequences in one padded batch."""

    name = "torch"

    def __init__(self) -> None:
        # All layers of a decode step share what was derived from its context by the first.
        self._step: _DecodeStep | None = None

    def unsupported_reason(
        self, device: torch.device, dtype: torch.dtype, head_dim: int
    ) -> str | None:
        return None

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor | None,
        v_cache: torch.Tensor | None,
        ctx: Context,
    ) -> torch.Tensor:
        assert ctx.seqlens_q is not None and ctx.seqlens_k is not None, "lengths are needed here"
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        start = 0
        for i, (num_q, num_k) in enumerate(zip(ctx.seqlens_q, ctx.seqlens_k, strict=True)):
            rows = slice(start, start + num_q)
            if ctx.block_tables is None:
                keys, values = k[rows], v[rows]
            else:
                assert k_cache is not None and v_cache is not None, "block tables need a cache"
                slots = _slots_of(ctx.block_tables[i], num_k, k_cache.size(1))
                keys, values = _gather(k_cache, slots), _gather(v_cache, slots)
            out[rows] = _attend_causal(q[rows], keys, values)
            start += num_q
        return out

    def decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: Context
    ) -> torch.Tensor:
        step = self._step
        if step is None or step.ctx is not ctx:
            step = self._step = _prepare_decode(ctx, k_cache)
        num_seqs, num_heads, head_dim = q.shape
        num_kv_heads = k_cache.size(2)
        # The query heads of one K/V head are as many query rows over it: no K/V is repeated.
        q = q.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
        kv_shape = (num_seqs, -1, num_kv_heads, head_dim)
        torch.index_select(k_cache.flatten(0, 1), 0, step.slots, out=step.k)
        torch.index_select(v_cache.flatten(0, 1), 0, step.slots, out=step.v)
        k, v = step.k.view(kv_shape).transpose(1, 2), step.v.view(kv_shape).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=step.mask)
        out = out.reshape(num_seqs, num_heads, head_dim)
        return out if step.is_padding is None else out.masked_fill(step.is_padding, 0.0)


@dataclass(frozen=True, eq=False, slots=True)
class _DecodeStep:
    """What every layer needs to gather and mask one step's keys."""

    ctx: Context
    # int [num_seqs * max_context_len]: slots to gather, sequence after sequence.
    slots: torch.Tensor
    # float [num_seqs * max_context_len, num_kv_heads, head_dim]: where they are gathered. Fresh
    # memory for each layer would cost more than the copy.
    k: torch.Tensor
    v: torch.Tensor
    # float [num_seqs, 1, 1, max_context_len]: 0 or -inf, added to the scores; None: all visible.
    mask: torch.Tensor | None
    # bool [num_seqs, 1, 1]: rows without any key; None: there are none.
    is_padding: torch.Tensor | None


def _prepare_decode(ctx: Context, cache: torch.Tensor) -> _DecodeStep:
    """cache: float [num_blocks, block_size, num_kv_heads, head_dim] any layer's K or V."""
    assert ctx.block_tables is not None and ctx.context_lens is not None, "decode needs both"
    block_size = cache.size(1)
    num_seqs, max_len = ctx.block_tables.size(0), max(ctx.max_context_len, 1)
    k, v = cache.new_empty(2, num_seqs * max_len, *cache.shape[2:]).unbind(0)
    if num_seqs == 1 and ctx.max_context_len > 0:
        slots = _slots_of(ctx.block_tables[0], max_len, block_size)
        return _DecodeStep(ctx, slots, k, v, mask=None, is_padding=None)
    lens = ctx.context_lens.unsqueeze(1)
    positions = torch.arange(max_len, device=lens.device).expand(num_seqs, -1)
    is_visible = positions < lens
    # Beyond a sequence's end its first key is read again: other slots may hold NaN, which no mask
    # stops (0 * NaN). Padding rows read slot 0 and are zeroed after the fact.
    positions = positions * is_visible
    blocks = ctx.block_tables.gather(1, positions // block_size).clamp_min_(0)
    slots = (blocks * block_size + positions % block_size).flatten()
    mask = cache.new_zeros(is_visible.shape).masked_fill_(~is_visible, float("-inf"))
    is_padding: torch.Tensor | None = (lens == 0).unsqueeze(-1)
    # Only here is it known at no cost; elsewhere it would be a wait for the device.
    if lens.device.type == "cpu" and int(lens.min()) > 0:
        is_padding = None
    return _DecodeStep(ctx, slots, k, v, mask[:, None, None, :], is_padding)


def _slots_of(block_table: torch.Tensor, num_keys: int, block_size: int) -> torch.Tensor:
    """Slots of a sequence's first `num_keys` keys.

    block_table: int32 [max_num_blocks] the sequence's blocks, tail padded
    returns: int32 [num_keys]
    """
    table = block_table[: -(-num_keys // block_size)]
    offsets = torch.arange(block_size, dtype=table.dtype, device=table.device)
    return (table.unsqueeze(1) * block_size + offsets).flatten()[:num_keys]


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows of the cache.

    cache: float [num_blocks, block_size, num_kv_heads, head_dim]
    slots: int32 or int64 [num_keys]
    returns: float [num_keys, num_kv_heads, head_dim]
    """
    return cache.flatten(0, 1).index_select(0, slots)


def _attend_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one sequence; the last query sees every key.

    q: float [num_q, num_heads, head_dim]
    k, v: float [num_k, num_kv_heads, head_dim], num_k >= num_q
    returns: float [num_q, num_heads, head_dim]
    """
    (num_q, num_heads, head_dim), (num_k, num_kv_heads, _) = q.shape, k.shape
    # K/V heads as the batch and their query heads as its heads: expand() shares K/V for free.
    group_size = num_heads // num_kv_heads
    q = q.reshape(num_q, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
    k = k.transpose(0, 1).unsqueeze(1).expand(-1, group_size, -1, -1)
    v = v.transpose(0, 1).unsqueeze(1).expand(-1, group_size, -1, -1)
    mask = None
    if 1 < num_q < num_k:
        # torch's own causal flag aligns the mask at the first key, which fits num_q == num_k only.
        mask = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device).tril(num_k - num_q)
    is_causal = num_q == num_k > 1
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
    return out.permute(2, 0, 1, 3).reshape(num_q, num_heads, head_dim)
