"""Attention in plain torch: the CPU's path, and what every other backend is tested against.

Owns nothing but indices derived from the current step. Gathers a sequence's K/V from the cache and
lets `scaled_dot_product_attention` do the rest; runs on every device torch knows. What rows of a
decode share is read once for all of them, on the CPU.
"""

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanovllm.attention.base import AttentionBackend
from nanovllm.kernels.rms_norm import inverse_rms
from nanovllm.kernels.shared_prefix import attend_ref, cached_keys
from nanovllm.utils.context import Context

# K and V of one group of a decode batch on the CPU. Around the size of a second-level cache:
# gathering more at once means reading it back from further away.
GROUP_BYTES = 2**20


class TorchSDPABackend(AttentionBackend):
    """Prefill one sequence at a time, without padding; decode in padded batches."""

    name = "torch"

    def __init__(self) -> None:
        # All layers of a decode step share what was derived from its context by the first.
        self._step: _DecodeStep | None = None
        self._new_tokens: _NewTokens | None = None
        # float [2, num_rows, num_kv_heads, head_dim]: where every layer of every step gathers its
        # K and V. Touching fresh memory each time would cost more than the copy.
        self._buffers: torch.Tensor | None = None

    def unsupported_reason(
        self, device: torch.device, dtype: torch.dtype, head_dim: int
    ) -> str | None:
        # Elsewhere kernels norm, rotate and store in fewer operations than can be done here.
        self.fused_max_batch = sys.maxsize if device.type == "cpu" else 0
        # Which rows share what can be looked at here; a GPU would have to be waited for.
        self.min_shared_batch = 1 if device.type == "cpu" else None
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
                slots = _slots_of(ctx.block_tables[i : i + 1], num_k, k_cache.size(1))[0]
                keys, values = _gather(k_cache, slots), _gather(v_cache, slots)
            out[rows] = _attend_causal(q[rows], keys, values)
            start += num_q
        return out

    def decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: Context
    ) -> torch.Tensor:
        step = self._step
        if step is None or step.ctx is not ctx:
            step = self._step = self._prepare_decode(ctx, k_cache)
        num_seqs, num_heads, head_dim = q.shape
        # The query heads of one K/V head are as many query rows over it: no K/V is repeated.
        grouped = q.reshape(num_seqs, k_cache.size(2), -1, head_dim)
        if step.order is not None:
            grouped = grouped.index_select(0, step.order)
        k_slots, v_slots = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        attend = F.scaled_dot_product_attention if ctx.shared is None else _attend_with_lse
        outs = []
        parts = grouped.split_with_sizes(step.group_sizes)
        for group, group_q in zip(step.groups, parts, strict=True):
            torch.index_select(k_slots, 0, group.slots, out=group.k_rows)
            torch.index_select(v_slots, 0, group.slots, out=group.v_rows)
            outs.append(attend(group_q, group.k, group.v, group.mask))
        out = outs[0] if step.inverse is None else torch.cat(outs).index_select(0, step.inverse)
        out = out.reshape(num_seqs, num_heads, -1)
        if ctx.shared is not None:
            out = _merge_shared(out, q, k_cache, v_cache, step)
        return out if step.is_padding is None else out.masked_fill(step.is_padding, 0.0)

    def fused_decode(
        self,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        cos_sin: torch.Tensor,
        eps: float,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        ctx: Context,
    ) -> torch.Tensor:
        new = self._new_tokens
        if new is None or new.ctx is not ctx:
            new = self._new_tokens = _prepare_new_tokens(ctx, cos_sin)
        num_kv_heads, head_dim = k_cache.shape[2:]
        heads = qkv.view(len(qkv), -1, head_dim)
        # Query and key heads stand side by side: what they share is one operation.
        qk, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
        if q_norm is not None and k_norm is not None:
            qk = (qk * inverse_rms(qk, eps)).to(qkv.dtype)
            qk[:, :-num_kv_heads].mul_(q_norm)
            qk[:, -num_kv_heads:].mul_(k_norm)
        swapped = qk.roll(head_dim // 2, -1)
        qk = torch.addcmul(qk * new.cos, swapped, new.signed_sin).to(qkv.dtype)
        q, k = qk[:, :-num_kv_heads], qk[:, -num_kv_heads:]
        if new.rows is not None:
            k, v = k[new.rows], v[new.rows]
        k_cache.flatten(0, 1).index_copy_(0, new.slots, k)
        v_cache.flatten(0, 1).index_copy_(0, new.slots, v)
        return self.decode(q, k_cache, v_cache, ctx)

    def _prepare_decode(self, ctx: Context, cache: torch.Tensor) -> "_DecodeStep":
        """cache: float [num_blocks, block_size, num_kv_heads, head_dim] any layer's K or V."""
        assert ctx.block_tables is not None and ctx.context_lens is not None, "decode needs both"
        lens, tables, items = ctx.context_lens.unsqueeze(1), ctx.block_tables, []
        skipped = torch.zeros_like(lens)  # first keys of the first block
        if ctx.shared is not None:  # what is left are the rows' own parts
            items = ctx.shared.items[: int(ctx.shared.num_items), :4].tolist()
            first_block = ctx.shared.own_starts[:, None] // cache.size(1)
            skipped = ctx.shared.own_starts[:, None] % cache.size(1)
            lens = lens - first_block * cache.size(1)
            columns = torch.arange(tables.size(1)) + first_block
            tables = tables.gather(1, columns.clamp_max_(tables.size(1) - 1))
        shapes = [(tables.size(0), max(ctx.max_context_len, 1))]
        order = inverse = is_padding = None
        if lens.device.type == "cpu":
            # Only here are the lengths free to look at; a GPU would have to be waited for.
            bytes_per_key = 2 * cache.size(2) * cache.size(3) * cache.element_size()
            shapes, rows = _group_by_length(lens[:, 0].tolist(), bytes_per_key)
            if len(shapes) > 1:
                order = torch.tensor(rows)
                inverse = order.argsort()
                lens, tables, skipped = lens[order], tables[order], skipped[order]
        if lens.device.type != "cpu" or int(lens.min()) == 0:
            is_padding = (ctx.context_lens == 0)[:, None, None]
        max_len = shapes[0][1]
        slots = _slots_of(tables, max_len, cache.size(1)).clamp_min_(0)
        mask: torch.Tensor | None = None
        if tables.size(0) > 1 or ctx.shared is not None:
            keys = torch.arange(max_len, dtype=lens.dtype, device=lens.device)
            is_visible = (keys >= skipped) & (keys < lens)
            # Beyond a sequence's end its first key is read again: other slots may hold NaN, which
            # no mask stops (0 * NaN). Padding rows read any slot and are zeroed after the fact.
            slots = torch.where(is_visible, slots, slots[:, :1])
            mask = cache.new_full((), float("-inf")).masked_fill(is_visible, 0.0)[:, None, None]
        groups, first = [], 0
        for num_seqs, num_keys in shapes:
            is_whole = num_seqs == 1 and ctx.shared is None
            group = slice(first, first + num_seqs)
            k_rows, v_rows = self._gather_buffers(cache, num_seqs * num_keys)
            kv_shape = (num_seqs, num_keys, *cache.shape[2:])
            groups.append(
                _DecodeGroup(
                    slots=slots[group, :num_keys].flatten(),
                    k_rows=k_rows,
                    v_rows=v_rows,
                    k=k_rows.view(kv_shape).transpose(1, 2),
                    v=v_rows.view(kv_shape).transpose(1, 2),
                    mask=None if mask is None or is_whole else mask[group, ..., :num_keys],
                )
            )
            first += num_seqs
        return _DecodeStep(ctx, order, inverse, is_padding, [n for n, _ in shapes], groups, items)

    def _gather_buffers(
        self, cache: torch.Tensor, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """float [num_rows, num_kv_heads, head_dim] for K and for V."""
        buffers = self._buffers
        if buffers is None or buffers.size(1) < num_rows or buffers.dtype != cache.dtype:
            # Some room to grow: contexts get longer with every step.
            buffers = cache.new_empty(2, num_rows + num_rows // 4 + 64, *cache.shape[2:])
            self._buffers = buffers
        return buffers[0, :num_rows], buffers[1, :num_rows]


@dataclass(frozen=True, eq=False, slots=True)
class _DecodeGroup:
    """Sequences of similar length that are computed as one padded batch."""

    # int32 [num_seqs * num_keys]: slots to gather, sequence after sequence.
    slots: torch.Tensor
    # float [num_seqs * num_keys, num_kv_heads, head_dim]: where they are gathered.
    k_rows: torch.Tensor
    v_rows: torch.Tensor
    # float [num_seqs, num_kv_heads, num_keys, head_dim]: the same memory.
    k: torch.Tensor
    v: torch.Tensor
    # float [num_seqs, 1, 1, num_keys]: 0 or -inf, added to the scores; None: all visible.
    mask: torch.Tensor | None


@dataclass(frozen=True, eq=False, slots=True)
class _DecodeStep:
    """What the layers of one decode step share."""

    ctx: Context
    # int64 [num_seqs]: batch row of each row of the groups, and the way back; None: the same.
    order: torch.Tensor | None
    inverse: torch.Tensor | None
    # bool [num_seqs, 1, 1]: batch rows without any key; None: there are none.
    is_padding: torch.Tensor | None
    # Sequences in each group.
    group_sizes: list[int]
    groups: list[_DecodeGroup]
    # Of what rows share: first row and end, first key and end.
    items: list[list[int]]


@dataclass(frozen=True, eq=False, slots=True)
class _NewTokens:
    """What the layers of one decode step share before attention."""

    ctx: Context
    # float32 [num_seqs, 1, head_dim]: cos | cos and -sin | sin of each new token's position. With
    # the minus sign in the table, "rotate half" is a swap of the halves.
    cos: torch.Tensor
    signed_sin: torch.Tensor
    # int64 [num_stored]: where K/V go, and the batch rows they come from; None: all of them.
    slots: torch.Tensor
    rows: torch.Tensor | None


def _prepare_new_tokens(ctx: Context, cos_sin: torch.Tensor) -> _NewTokens:
    """cos_sin: float32 [max_position, head_dim] cosines, then sines."""
    assert ctx.context_lens is not None, "decode needs context lengths"
    positions = (ctx.context_lens - 1).clamp_min_(0)
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, -1)
    slots, rows = ctx.slot_mapping.long(), None
    if int(slots.min()) < 0:
        rows = (slots >= 0).nonzero().squeeze(1)
        slots = slots[rows]
    return _NewTokens(ctx, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), slots, rows)


def _attend_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """scaled_dot_product_attention, in float32, with the scores' log-sum-exp as one value more."""
    scores = (q @ k.transpose(-1, -2)).float() * q.size(-1) ** -0.5
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1, keepdim=True)
    return torch.cat([((scores - lse).exp().to(v.dtype) @ v).float(), lse], -1)


def _merge_shared(
    own: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    step: _DecodeStep,
) -> torch.Tensor:
    """Attention over each row's own part and over all items that it has a share in.

    own: float32 [num_seqs, num_heads, head_dim + 1] as _attend_with_lse gives it; overwritten.
    """
    assert (tables := step.ctx.block_tables) is not None, "decode needs them"
    out, lse = own[..., :-1], own[..., -1:]
    for first, end, start, stop in step.items:
        k = cached_keys(k_cache, tables[first], start, stop)
        v = cached_keys(v_cache, tables[first], start, stop)
        values, item_lse = attend_ref(q[first:end], k, v, q.size(-1) ** -0.5)
        rows, item_lse = slice(first, end), item_lse[..., None]
        merged = torch.logaddexp(lse[rows], item_lse)
        out[rows] = (lse[rows] - merged).exp() * out[rows] + (item_lse - merged).exp() * values
        lse[rows] = merged
    return out.to(q.dtype)


def _group_by_length(
    lens: list[int], bytes_per_key: int
) -> tuple[list[tuple[int, int]], list[int]]:
    """Cut a batch into groups whose K/V stays in the processor's cache and is little padded.

    Returns (sequences, keys) of each group and the batch rows in the groups' order, longest first.
    """
    rows = sorted(range(len(lens)), key=lens.__getitem__, reverse=True)
    shapes: list[tuple[int, int]] = []
    for row in rows:
        num_seqs, num_keys = shapes[-1] if shapes else (0, 0)
        if shapes and (num_seqs + 1) * num_keys * bytes_per_key <= GROUP_BYTES:
            shapes[-1] = (num_seqs + 1, num_keys)
        else:
            shapes.append((1, max(lens[row], 1)))
    return shapes, rows


def _slots_of(block_tables: torch.Tensor, num_keys: int, block_size: int) -> torch.Tensor:
    """Slots of each sequence's first `num_keys` keys; of no use where it has fewer.

    block_tables: int32 [num_seqs, max_num_blocks] tails padded
    returns: int32 [num_seqs, num_keys]
    """
    tables = block_tables[:, : -(-num_keys // block_size), None]
    offsets = torch.arange(block_size, dtype=tables.dtype, device=tables.device)
    return torch.add(offsets, tables, alpha=block_size).flatten(1)[:, :num_keys]


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
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=num_q == num_k > 1)
    return out.permute(2, 0, 1, 3).reshape(num_q, num_heads, head_dim)
