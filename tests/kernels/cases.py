"""What all kernel tests and the benchmark share: the error rule, random paged caches."""

import math

import torch

POISON = 1e4  # fills what must not be read or written; NaN would hide in a comparison


def assert_error_at_most_twice_torch(actual, plain, exact, what=""):
    """The error against an fp32 reference is at most twice that of plain torch in the same dtype,
    plus a floor of a few units in the last place of the largest value, as maximum and as mean."""
    actual, plain, exact = actual.float(), plain.float(), exact.float()
    assert actual.shape == exact.shape == plain.shape, (actual.shape, plain.shape, exact.shape)
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    floor = 4 * torch.finfo(torch.float32).eps * float(exact.abs().max().clamp_min(1e-3))
    ours, theirs = (actual - exact).abs(), (plain - exact).abs()
    assert ours.max() <= 2 * theirs.max() + 8 * floor, (
        what,
        float(ours.max()),
        float(theirs.max()),
    )
    assert ours.mean() <= 2 * theirs.mean() + floor, (
        what,
        float(ours.mean()),
        float(theirs.mean()),
    )


def to_float(tensors):
    """The same values in fp32, for the exact reference; integer tensors stay as they are."""
    return [
        t.float() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in tensors
    ]


class PagedCache:
    """One layer's K and V in shuffled blocks; every slot that no sequence owns is poisoned."""

    def __init__(self, lens, num_kv_heads, head_dim, block_size, dtype, device, spare_blocks=2):
        per_seq = [max(math.ceil(length / block_size), 1) for length in lens]
        total = sum(per_seq) + spare_blocks
        order = torch.randperm(total)
        width = max(per_seq) + 1
        tables = torch.full((len(lens), width), int(order[-1]), dtype=torch.int32)
        shape = (total, block_size, num_kv_heads, head_dim)
        k, v = torch.full(shape, POISON), torch.full(shape, POISON)
        at = 0
        for seq, (length, blocks) in enumerate(zip(lens, per_seq, strict=True)):
            ids = order[at : at + blocks]
            at += blocks
            tables[seq, :blocks] = ids
            slots = (ids[:, None] * block_size + torch.arange(block_size)).flatten()[:length]
            k.view(-1, num_kv_heads, head_dim)[slots] = torch.randn(length, num_kv_heads, head_dim)
            v.view(-1, num_kv_heads, head_dim)[slots] = torch.randn(length, num_kv_heads, head_dim)
        self.k, self.v = k.to(device, dtype), v.to(device, dtype)
        self.block_tables = tables.to(device)
        self.context_lens = torch.tensor(lens, dtype=torch.int32, device=device)


def rope_table(head_dim, length=4096, device="cpu"):
    """fp32 [length, head_dim]: cosines, then sines."""
    inverse = 1e6 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * inverse
    return torch.cat([angles.cos(), angles.sin()], 1).float().to(device)
