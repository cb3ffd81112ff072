"""RMSNorm: of the residual stream before a block, and of query and key heads.

Owns the weights. The norm is fused into what reads or writes the stream (kernels/norm_linear.py)
and, for heads, into the rotation (kernels/qk_norm_rope.py).
"""

import torch
from torch import nn

from nanovllm.kernels.norm_linear import NormInput
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

    def forward(self, hidden_states: torch.Tensor) -> NormInput:
        """The stream with this norm before it, for the linear layer that reads it to apply.

        hidden_states: float [num_tokens, size]
        """
        return NormInput(hidden_states, self.weight, self.eps)
