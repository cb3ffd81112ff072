"""Steps with random K/V in a paged cache, and attention written out as the contract states it."""

from dataclasses import dataclass

import torch

from nanovllm.utils.context import Context


@dataclass
class Step:
    """One step's tensors; k and v are also in the cache where the context says."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    ctx: Context
    # For each sequence all keys and values, float [num_keys, num_kv_heads, head_dim].
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    num_new: list[int]

    def expected(self, dtype=torch.float64):
        """float [num_tokens, num_heads, head_dim], computed in `dtype`, zeros without keys."""
        outs = []
        seqs = zip(self.q.split(self.num_new), self.keys, self.values, strict=True)
        for q, k, v in seqs:
            num_q, num_k = len(q), len(k)
            group_size = q.size(1) // k.size(1)
            k = k.to(dtype).repeat_interleave(group_size, 1)
            v = v.to(dtype).repeat_interleave(group_size, 1)
            scores = torch.einsum("qhd,khd->hqk", q.to(dtype), k) * q.size(-1) ** -0.5
            visible = torch.arange(num_k) <= torch.arange(num_k - num_q, num_k)[:, None]
            scores = scores.masked_fill(~visible.to(q.device), -torch.inf)
            weights = scores.softmax(-1).nan_to_num(0)
            outs.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(outs)


def make_step(
    cached_and_new,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    block_size=8,
    dtype=torch.float32,
    device="cpu",
    poison=float("nan"),
    decode=False,
):
    """A step of sequences with so many (cached, new) tokens, their blocks scattered in the cache.

    Slots that belong to no sequence hold `poison`: reading one shows.
    """
    totals = [cached + new for cached, new in cached_and_new]
    num_blocks = [-(-total // block_size) for total in totals]
    shape = (sum(num_blocks) + 3, block_size, num_kv_heads, head_dim)
    k_cache = torch.full(shape, poison, dtype=dtype, device=device)
    v_cache = k_cache.clone()
    free = torch.randperm(shape[0]).tolist()
    tables = torch.full((len(totals), max([*num_blocks, 1]) + 1), -1, dtype=torch.int32)
    keys, values, slots = [], [], []
    for i, total in enumerate(totals):
        tables[i, : num_blocks[i]] = torch.tensor([free.pop() for _ in range(num_blocks[i])])
        positions = torch.arange(total)
        slot = tables[i, positions // block_size] * block_size + positions % block_size
        keys.append(torch.randn(total, *shape[2:]).to(dtype).to(device))
        values.append(torch.randn(total, *shape[2:]).to(dtype).to(device))
        k_cache.flatten(0, 1)[slot.to(device)] = keys[-1]
        v_cache.flatten(0, 1)[slot.to(device)] = values[-1]
        slots.append(slot[cached_and_new[i][0] :])
    num_new = [new for _, new in cached_and_new]
    q = torch.randn(sum(num_new), num_heads, head_dim).to(dtype).to(device)
    k, v = (
        torch.cat([x[len(x) - new :] for x, new in zip(all_seqs, num_new, strict=True)])
        for all_seqs in (keys, values)
    )
    common = {
        "is_prefill": not decode,
        "slot_mapping": torch.cat(slots).int().to(device),
        "block_tables": tables.to(device),
    }
    if decode:
        lens = torch.tensor(totals, dtype=torch.int32, device=device)
        ctx = Context(**common, context_lens=lens, max_context_len=max(totals))
    else:
        if sum(cached for cached, _ in cached_and_new) == 0:
            common["block_tables"] = None
        ctx = Context(
            **common,
            cu_seqlens_q=cumulative(num_new).to(device),
            cu_seqlens_k=cumulative(totals).to(device),
            max_seqlen_q=max(num_new),
            max_seqlen_k=max(totals),
            seqlens_q=num_new,
            seqlens_k=totals,
        )
    return Step(q, k, v, k_cache, v_cache, ctx, keys, values, num_new)


def make_decode_step(context_lens, **kwargs):
    """One new token for each context length, which counts it; 0 is a padding row."""
    step = make_step([(max(n - 1, 0), min(n, 1)) for n in context_lens], decode=True, **kwargs)
    if 0 in context_lens:
        step.q = torch.randn(len(context_lens), *step.q.shape[1:]).to(step.q)
        step.num_new = [1] * len(context_lens)
    return step


def cumulative(lens):
    return torch.tensor([0, *lens]).cumsum(0).int()
