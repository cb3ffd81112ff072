"""RMSNorm: of hidden states, of the residual sum before a block, of query and key heads.

Owns the weights. Never changes its inputs: they may be the residual stream, in fp32 as well.
"""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.linear import ShardId, make_parameter


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32."""

    # float32 []: a tensor, because an operation with a Python number costs several on the CPU.
    eps_tensor: torch.Tensor

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = make_parameter((size,), {None: (size,)}, self.load_weight)
        self.size = size
        self.eps = eps
        self.register_buffer("eps_tensor", torch.tensor(eps, dtype=torch.float32), persistent=False)

    def load_weight(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copy the whole weight; every rank norms whole rows.

        loaded: float [size] the checkpoint's tensor
        """
        param.data.copy_(loaded)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: float [..., size]; returns it normed, in the same type."""
        if x.is_cuda:
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        # torch composes its own of more operations than these, which is what counts for few rows.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self.eps_tensor, norm, norm, value=1 / self.size).rsqrt_()
        return (x * scale).mul_(self.weight).to(x.dtype)

    def add_forward(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add, then norm.

        x, residual: float [..., size] a block's output and what it was added to
        returns: the normed sum, and the sum, which is the next residual
        """
        residual = x + residual
        return self.forward(residual), residual


class QKNorm(RMSNorm):
    """RMSNorm of each query and key head.

    The two differ in their weights only, so they are one operation on the packed heads, with the
    checkpoint's weight for queries in the first rows of this one and that for keys in the others.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__(head_dim, eps)
        self.rows: dict[ShardId, slice] = {"q": slice(num_heads), "k": slice(num_heads, None)}
        shapes = dict.fromkeys(self.rows, (head_dim,))
        self.weight = make_parameter((num_heads + num_kv_heads, head_dim), shapes, self.load_weight)

    def load_weight(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copy the weight to each of its heads' rows.

        loaded: float [head_dim] the checkpoint's tensor
        """
        param.data[self.rows[shard_id]].copy_(loaded)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: float [num_tokens, num_heads + num_kv_heads, head_dim]; returns it normed."""
        if x.is_cuda:
            return F.rms_norm(x, (self.size,), None, self.eps) * self.weight
        return super().forward(x)
