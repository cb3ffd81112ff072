"""RMSNorm, alone or with the residual addition before it.

Owns one weight. Never changes its inputs: they may be the residual stream, in fp32 as well.
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
        self.shape = (size,)
        self.weight = make_parameter((size,), {None: (size,)}, self.load)

    def load(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copy the whole weight: norms see whole rows or whole heads on every rank.

        loaded: float [size] the checkpoint's tensor
        """
        param.data.copy_(loaded)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: float [..., size]; returns the normed ones, in the same type."""
        return F.rms_norm(hidden_states, self.shape, self.weight, self.eps)

    def add_forward(
        self, hidden_states: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add, then norm.

        hidden_states, residual: float [..., size] a block's output and what went around it
        returns: the normed sum, and the sum as the next residual
        """
        residual = hidden_states + residual
        return self.forward(residual), residual
