"""Putting a row's attention together from partial results, each over some of its keys.

A part is its values, weighted by their softmax, and what weighs them: log2 of the sum of exp2 of
their scores.
"""

import torch

from nanovllm.kernels.launch import tl, triton

# Query heads of one turn of the loop that merges them: all of 71 unrolled took minutes to compile.
UNROLLED = tl.constexpr(16)


def merge_partials_ref(values: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """fp32 [num_partials, H, D], divided by their sums, and [num_partials, H] -> [H, D]."""
    return (lse.softmax(0)[..., None] * values).sum(0)


@triton.jit
def _merge_two(
    values_ptr, lse_ptr, row_a, row_b, num_partials, stride, STEP: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add up the partial results of two query heads; number i of them is in row + i * stride.
    All loads of a step are in flight at once: the weights first would add a round trip.
    Returns of each head: weighted values, the sum of the weights, what they are relative to."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    max_a = -float("inf")
    max_b = -float("inf")
    sum_a = 0.0
    sum_b = 0.0
    acc_a = tl.zeros([BLOCK_D], tl.float32)
    acc_b = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, num_partials, STEP):
        i = first + tl.arange(0, STEP)
        live = i < num_partials
        a = (row_a + i * stride).to(tl.int64)
        b = (row_b + i * stride).to(tl.int64)
        lse_a = tl.load(lse_ptr + a, live, -float("inf"), cache_modifier=".cg")
        lse_b = tl.load(lse_ptr + b, live, -float("inf"), cache_modifier=".cg")
        a_ptr = values_ptr + a[:, None] * BLOCK_D + dim
        b_ptr = values_ptr + b[:, None] * BLOCK_D + dim
        values_a = tl.load(a_ptr, live[:, None], 0.0, cache_modifier=".cg").to(tl.float32)
        values_b = tl.load(b_ptr, live[:, None], 0.0, cache_modifier=".cg").to(tl.float32)
        new_a = tl.maximum(max_a, tl.max(lse_a, 0))
        new_b = tl.maximum(max_b, tl.max(lse_b, 0))
        weight_a = tl.exp2(lse_a - new_a)
        weight_b = tl.exp2(lse_b - new_b)
        rescale_a = tl.exp2(max_a - new_a)
        rescale_b = tl.exp2(max_b - new_b)
        sum_a = sum_a * rescale_a + tl.sum(weight_a, 0)
        sum_b = sum_b * rescale_b + tl.sum(weight_b, 0)
        acc_a = acc_a * rescale_a + tl.sum(values_a * weight_a[:, None], 0)
        acc_b = acc_b * rescale_b + tl.sum(values_b * weight_b[:, None], 0)
        max_a = new_a
        max_b = new_b
    return acc_a, sum_a, max_a, acc_b, sum_b, max_b


@triton.jit
def _merge_shared(
    row_max, row_sum, acc, values_ptr, lse_ptr, first_partial, end_partial, first_head, num_heads,
    ROWS: tl.constexpr, STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Fold the partial results of shared keys into the running softmax of ROWS query heads."""
    row = tl.arange(0, BLOCK_M)
    first_row = first_partial * num_heads + first_head
    for first in range(0, ROWS, UNROLLED):
        for i in tl.static_range(0, min(ROWS, UNROLLED), 2):
            g = first + i
            a, sum_a, max_a, b, sum_b, max_b = _merge_two(
                values_ptr, lse_ptr, first_row + min(g, ROWS - 1), first_row + min(g + 1, ROWS - 1),
                end_partial - first_partial, num_heads, STEP, BLOCK_D,
            )  # fmt: skip
            row_max, row_sum, acc = _fold(row_max, row_sum, acc, row == g, max_a, sum_a, a)
            if g + 1 < ROWS:
                row_max, row_sum, acc = _fold(row_max, row_sum, acc, row == g + 1, max_b, sum_b, b)
    return row_max, row_sum, acc


@triton.jit
def _fold(row_max, row_sum, acc, is_row, part_max, part_sum, part_acc):
    """Fold one head's merged partial results into its row."""
    new_max = tl.where(is_row, tl.maximum(row_max, part_max), row_max)
    rescale = tl.exp2(row_max - new_max)
    weight = tl.where(is_row, tl.exp2(part_max - new_max), 0.0)
    row_sum = row_sum * rescale + part_sum * weight
    acc = acc * rescale[:, None] + part_acc[None, :] * weight[:, None]
    return new_max, row_sum, acc
