"""Linear layers whose weights are split over the tensor-parallel ranks.

Owns each rank's shard and the rule by which it is cut from the checkpoint's tensor. Knows nothing
about checkpoints' names and files: the loader asks a parameter for its `checkpoint_shapes` and
hands tensors of these shapes to its `weight_loader`. What is fused with a product (the norm before
it, the activation or the residual after it) is up to kernels/norm_linear.py.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels.norm_linear import (
    NormInput,
    linear_into,
    norm_linear,
    norm_linear_silu_mul,
    normalize,
    residual_linear,
)
from nanovllm.kernels.rms_norm import add_rms_norm
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.kernels.small_linear import LinearWorkspace, linear_workspace
from nanovllm.layers.collectives import sum_add_norm
from nanovllm.utils import distributed

# Which part of a parameter a checkpoint tensor fills; None for a parameter of one part.
ShardId = str | int | None


@functools.cache
def _workspace(device: torch.device) -> LinearWorkspace:
    """Scratch of the linear layers: a device runs one step at a time, so they share it."""
    return linear_workspace(device)


def make_parameter(
    shape: tuple[int, ...],
    checkpoint_shapes: Mapping[ShardId, tuple[int, ...]],
    weight_loader: Callable[[nn.Parameter, torch.Tensor, ShardId], None],
) -> nn.Parameter:
    """An uninitialised parameter of this rank's `shape` that knows how to be loaded.

    checkpoint_shapes: full shape, before sharding, of each checkpoint tensor that fills a part
    weight_loader: called with the parameter, such a tensor and its part
    """
    param = nn.Parameter(torch.empty(shape), requires_grad=False)
    param.checkpoint_shapes = checkpoint_shapes  # type: ignore[attr-defined]
    param.weight_loader = weight_loader  # type: ignore[attr-defined]
    return param


def shard_size(name: str, size: int) -> int:
    """This rank's share of `size` rows or columns."""
    tp_size = distributed.tp_size()
    if size % tp_size:
        raise ValueError(
            f"tensor_parallel_size: got {tp_size}, needs a divisor of {name} = {size}, try 1"
        )
    return size // tp_size


def num_kv_replicas(num_kv_heads: int, tp_size: int) -> int | None:
    """How many neighbouring ranks hold the same KV head; None for numbers that do not fit.

    Several heads a rank, or several ranks a head: rank 0 of 2 with 3 heads would need half of one.
    """
    if num_kv_heads % tp_size == 0:
        return 1
    return None if tp_size % num_kv_heads else tp_size // num_kv_heads


class _Part(NamedTuple):
    """Where a projection lies in this rank's weight, and where it comes from."""

    start: int  # first row here
    size: int  # number of rows
    source: int  # first row in the checkpoint's tensor


class ColumnParallelLinear(nn.Module):
    """Output rows are split; several projections of one input may be packed, each split by itself.

    The shard of rank 1 of 2 for parts q, k, v of 4, 2, 2 rows, in the rows of the full tensors:

        weight row     0   1   2   3        what forward() returns has this order too
        holds         q2  q3  k1  v1
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: dict[ShardId, int],
        bias: bool,
        replicas: Mapping[ShardId, int] | None = None,
    ) -> None:
        """replicas: of parts that are cut into fewer shards than there are ranks, how many
        neighbouring ranks hold the same one
        """
        super().__init__()
        # As it is now: another engine of this process may form a group later.
        tp_rank = distributed.tp_rank()
        self.parts: dict[ShardId, _Part] = {}
        num_rows = 0
        for shard_id, size in output_sizes.items():
            copies = (replicas or {}).get(shard_id, 1)
            local_size = shard_size("the output size", size * copies)
            self.parts[shard_id] = _Part(num_rows, local_size, tp_rank // copies * local_size)
            num_rows += local_size
        shapes = {shard_id: (size, input_size) for shard_id, size in output_sizes.items()}
        self.weight = make_parameter((num_rows, input_size), shapes, self.load_shard)
        self.bias: nn.Parameter | None = None
        if bias:
            bias_shapes = {shard_id: (size,) for shard_id, size in output_sizes.items()}
            self.bias = make_parameter((num_rows,), bias_shapes, self.load_shard)

    def load_shard(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copy this rank's rows of one part.

        loaded: float [output_size, input_size] or [output_size] the checkpoint's tensor
        """
        start, size, source = self.parts[shard_id]
        param.data.narrow(0, start, size).copy_(loaded.narrow(0, source, size))

    def forward(self, x: NormInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Norm and project.

        x: rows [num_tokens, input_size]
        returns: float [num_tokens, local rows], and what is left to apply, see `norm_linear`
        """
        if self.bias is None:
            return norm_linear(x, self.weight, _workspace(x.hidden.device))
        return F.linear(normalize(x), self.weight, self.bias), None


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Parts 0, 1, ... packed in one weight, such as the gate and up projections."""

    def __init__(self, input_size: int, output_sizes: list[int], bias: bool = False) -> None:
        super().__init__(input_size, dict(enumerate(output_sizes)), bias)

    def silu_mul(self, x: NormInput) -> torch.Tensor:
        """Norm, project to gate and up, SiLU(gate) * up.

        x: rows [num_tokens, input_size]
        returns: float [num_tokens, local rows / 2]
        """
        if self.bias is None:
            return norm_linear_silu_mul(x, self.weight, _workspace(x.hidden.device))
        return silu_and_mul(F.linear(normalize(x), self.weight, self.bias))


class QKVParallelLinear(ColumnParallelLinear):
    """Parts "q", "k", "v" packed in one weight; every rank gets whole heads of each.

    With fewer KV heads than ranks a head lives on several, next to the query heads that read it:
    8 query heads, 2 KV heads, 4 ranks

        rank              0       1       2       3
        query heads     0 1     2 3     4 5     6 7
        KV head           0       0       1       1
    """

    def __init__(
        self, hidden_size: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool = False
    ) -> None:
        self.num_heads = shard_size("num_attention_heads", num_heads)
        tp_size = distributed.tp_size()
        replicas = num_kv_replicas(num_kv_heads, tp_size)
        if replicas is None:
            raise ValueError(
                f"tensor_parallel_size: got {tp_size}, needs a divisor or a multiple of "
                f"num_key_value_heads = {num_kv_heads}, try 1"
            )
        self.num_kv_heads = num_kv_heads * replicas // tp_size
        sizes: dict[ShardId, int] = {"q": num_heads * head_dim}
        sizes["k"] = sizes["v"] = num_kv_heads * head_dim
        super().__init__(hidden_size, sizes, bias, replicas={"k": replicas, "v": replicas})


class RowParallelLinear(nn.Module):
    """Input columns are split, and the ranks' partial outputs summed."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        super().__init__()
        # As they are now: another engine of this process may form a group later.
        self.tp_size, self.tp_rank = distributed.tp_size(), distributed.tp_rank()
        self.local_input_size = shard_size("the input size", input_size)
        self.weight = make_parameter(
            (output_size, self.local_input_size), {None: (output_size, input_size)}, self.load_shard
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = make_parameter((output_size,), {None: (output_size,)}, self.load_shard)

    def load_shard(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copy this rank's columns; the bias belongs to the sum and is not split.

        loaded: float [output_size, input_size] or [output_size] the checkpoint's tensor
        """
        if loaded.dim() == 2:
            start = self.tp_rank * self.local_input_size
            loaded = loaded.narrow(1, start, self.local_input_size)
        param.data.copy_(loaded)

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
    ) -> NormInput:
        """Project, sum over the ranks, add to the stream.

        hidden_states: float [num_tokens, local columns]
        residual: float [num_tokens, output_size] the stream, left as it is
        norm_weight: float [output_size] and eps, of the norm that reads the new stream
        returns: the new stream with that norm
        """
        workspace = _workspace(residual.device)
        if self.tp_size == 1 and self.bias is None:
            return residual_linear(
                hidden_states, self.weight, residual, norm_weight, eps, workspace
            )

        def addend(rows: slice, out: torch.Tensor) -> None:
            linear_into(hidden_states[rows], self.weight, workspace, out)
            # One rank adds the bias, or the sum would hold it tp_size times.
            if self.bias is not None and self.tp_rank == 0:
                out += self.bias

        if self.tp_size == 1:
            out = torch.empty_like(residual)
            addend(slice(None), out)
            normed, stream = add_rms_norm(out, residual, norm_weight, eps)
        else:
            normed, stream = sum_add_norm(addend, residual, norm_weight, eps)
        return NormInput(stream, norm_weight, eps, normed=normed)
