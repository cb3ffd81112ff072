"""Putting a row's attention together from partial results, each over some of its keys.

A part is its weighted values and what weighs it: the maximum of its scores and the sum of their
exponentials relative to it, or, where the values are divided by that sum, the log of both.
"""

import torch

from nanovllm.kernels.launch import tl, triton


def merge_partials_ref(values: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """fp32 [num_partials, H, D], divided by their sums, and [num_partials, H] -> [H, D]."""
    return (lse.softmax(0)[..., None] * values).sum(0)


@triton.jit
def _merge_two(
    partial_ptr, stats_ptr, row_a, row_b, num_splits,
    GROUP: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of two query heads; split s left its own in row + s * GROUP.
    All loads of a step are in flight at once: the statistics first would add a round trip."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    max_a = -float("inf")
    max_b = -float("inf")
    sum_a = 0.0
    sum_b = 0.0
    acc_a = tl.zeros([BLOCK_D], tl.float32)
    acc_b = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, num_splits, STEP):
        split = first + tl.arange(0, STEP)
        live = split < num_splits
        a = row_a + split * GROUP
        b = row_b + split * GROUP
        part_max_a = tl.load(stats_ptr + a * 2, live, -float("inf"), cache_modifier=".cg")
        part_max_b = tl.load(stats_ptr + b * 2, live, -float("inf"), cache_modifier=".cg")
        part_sum_a = tl.load(stats_ptr + a * 2 + 1, live, 0.0, cache_modifier=".cg")
        part_sum_b = tl.load(stats_ptr + b * 2 + 1, live, 0.0, cache_modifier=".cg")
        a_ptr = partial_ptr + a[:, None] * BLOCK_D + dim
        b_ptr = partial_ptr + b[:, None] * BLOCK_D + dim
        part_a = tl.load(a_ptr, live[:, None], 0.0, cache_modifier=".cg")
        part_b = tl.load(b_ptr, live[:, None], 0.0, cache_modifier=".cg")
        new_a = tl.maximum(max_a, tl.max(part_max_a, 0))
        new_b = tl.maximum(max_b, tl.max(part_max_b, 0))
        weight_a = tl.exp2(part_max_a - new_a)
        weight_b = tl.exp2(part_max_b - new_b)
        rescale_a = tl.exp2(max_a - new_a)
        rescale_b = tl.exp2(max_b - new_b)
        sum_a = sum_a * rescale_a + tl.sum(part_sum_a * weight_a, 0)
        sum_b = sum_b * rescale_b + tl.sum(part_sum_b * weight_b, 0)
        acc_a = acc_a * rescale_a + tl.sum(part_a * weight_a[:, None], 0)
        acc_b = acc_b * rescale_b + tl.sum(part_b * weight_b[:, None], 0)
        max_a = new_a
        max_b = new_b
    return acc_a / sum_a, acc_b / sum_b


@triton.jit
def _merge_shared(
    row_max, row_sum, acc, shared_ptr, lse_ptr, first_partial, end_partial, first_head, num_heads,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Fold in the partial results of shared keys: into each other first, then once into acc, whose
    layout is another. Two at a time, loaded at once; more take registers that programs lack."""
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    live = row < GROUP
    shared_max = tl.full([BLOCK_M], -1e30, tl.float32)
    shared_sum = tl.zeros([BLOCK_M], tl.float32)
    shared_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i in range(first_partial, end_partial, 2):
        at_a = i * num_heads + first_head + row
        at_b = at_a + num_heads
        live_b = live & (0 * row + i + 1 < end_partial)  # a block, for the interpreter
        lse_a = tl.load(lse_ptr + at_a, mask=live, other=-float("inf"))
        lse_b = tl.load(lse_ptr + at_b, mask=live_b, other=-float("inf"))
        a_ptr = shared_ptr + at_a.to(tl.int64)[:, None] * BLOCK_D + dim[None, :]
        b_ptr = shared_ptr + at_b.to(tl.int64)[:, None] * BLOCK_D + dim[None, :]
        value_a = tl.load(a_ptr, mask=live[:, None], other=0.0)
        value_b = tl.load(b_ptr, mask=live_b[:, None], other=0.0)
        new_max = tl.maximum(shared_max, tl.maximum(lse_a, lse_b))
        rescale = tl.exp2(shared_max - new_max)
        weight_a = tl.exp2(lse_a - new_max)
        weight_b = tl.exp2(lse_b - new_max)
        shared_sum = shared_sum * rescale + weight_a + weight_b
        shared_acc = shared_acc * rescale[:, None] + value_a * weight_a[:, None]
        shared_acc += value_b * weight_b[:, None]
        shared_max = new_max
    new_max = tl.maximum(row_max, shared_max)
    rescale = tl.exp2(row_max - new_max)
    weight = tl.exp2(shared_max - new_max)
    row_sum = row_sum * rescale + shared_sum * weight
    acc = acc * rescale[:, None] + shared_acc * weight[:, None]
    return new_max, row_sum, acc
