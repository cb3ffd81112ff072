"""The gated activation between the two halves of an MLP. Has no parameters."""

import torch
import torch.nn.functional as F
from torch import nn


class SiluAndMul(nn.Module):
    """silu(gate) * up, of the packed output of the gate and up projections."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up: float [num_tokens, 2 * size] gate, then up; returns float [num_tokens, size]."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)
