"""The mixture-of-experts MLP: a router and its experts, every expert split over the ranks.

Owns the experts' packed weights and which checkpoint tensor fills which part of them. Every rank
routes all tokens, alike since all hold the same stream and the same router, and computes its share
of each expert's intermediate columns; the ranks' outputs are summed as a dense MLP's are.
"""

import torch
from torch import nn

from nanovllm.kernels.grouped_gemm import (
    expert_copies,
    sum_copies,
    sum_copies_add_rms_norm,
)
from nanovllm.kernels.norm_linear import NormInput, normalize
from nanovllm.layers.collectives import sum_add_norm
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import ColumnParallelLinear, ShardId, make_parameter, shard_size
from nanovllm.utils import distributed


def packed_experts(num_experts: int) -> dict[str, tuple[str, ShardId]]:
    """Lines of a model's `packed_modules_mapping` for checkpoints with a tensor per projection.

    Expert 3's up_proj is part 7 of the module gate_up, gate_proj part 6; its down_proj part 3 of
    down.
    """
    parts: dict[str, tuple[str, ShardId]] = {}
    for expert in range(num_experts):
        parts[f"{expert}.gate_proj"] = ("gate_up", 2 * expert)
        parts[f"{expert}.up_proj"] = ("gate_up", 2 * expert + 1)
        parts[f"{expert}.down_proj"] = ("down", expert)
    return parts


class GateUpExperts(nn.Module):
    """Gate rows, then up rows of each expert; this rank's rows of either."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        # As it is now: another engine of this process may form a group later.
        self.tp_rank = distributed.tp_rank()
        self.local_size = shard_size("moe_intermediate_size", intermediate_size)
        self.weight = make_parameter(
            (num_experts, 2 * self.local_size, hidden_size),
            dict.fromkeys(range(2 * num_experts), (intermediate_size, hidden_size)),
            self.load_shard,
        )

    def load_shard(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copy this rank's rows of one expert's gate or up projection.

        loaded: float [intermediate_size, hidden_size] the checkpoint's tensor
        """
        assert isinstance(shard_id, int), shard_id
        rows = loaded.narrow(0, self.tp_rank * self.local_size, self.local_size)
        param.data.flatten(0, 1).unflatten(0, (-1, self.local_size))[shard_id].copy_(rows)


class DownExperts(nn.Module):
    """Each expert's down projection; this rank's columns."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        # As it is now: another engine of this process may form a group later.
        self.tp_rank = distributed.tp_rank()
        self.local_size = shard_size("moe_intermediate_size", intermediate_size)
        self.weight = make_parameter(
            (num_experts, hidden_size, self.local_size),
            dict.fromkeys(range(num_experts), (hidden_size, intermediate_size)),
            self.load_shard,
        )

    def load_shard(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copy this rank's columns of one expert.

        loaded: float [hidden_size, intermediate_size] the checkpoint's tensor
        """
        assert isinstance(shard_id, int), shard_id
        columns = loaded.narrow(1, self.tp_rank * self.local_size, self.local_size)
        param.data[shard_id].copy_(columns)


class Experts(nn.Module):
    """The experts' weights; the product is the whole block's."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up = GateUpExperts(num_experts, hidden_size, intermediate_size)
        self.down = DownExperts(num_experts, hidden_size, intermediate_size)


class SparseMoE(nn.Module):
    """Gated MLPs, of which each token goes through the num_experts_per_tok that its router likes
    best, weighted by the softmax over all of them."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        norm_topk_prob: bool,
    ) -> None:
        """intermediate_size: of one expert; norm_topk_prob: make a token's weights sum to 1"""
        super().__init__()
        # As it is now: another engine of this process may form a group later.
        self.tp_size = distributed.tp_size()
        self.num_experts_per_tok = num_experts_per_tok
        self.norm_topk_prob = norm_topk_prob
        # Every rank holds the same rows, all of them.
        self.gate = ColumnParallelLinear(
            hidden_size, {None: num_experts}, bias=False, replicas={None: self.tp_size}
        )
        self.experts = Experts(num_experts, hidden_size, intermediate_size)

    def forward(self, x: NormInput, next_norm: RMSNorm) -> NormInput:
        """x: rows [num_tokens, hidden_size]; returns the stream for next_norm's reader."""
        normed = normalize(x)
        logits, _ = self.gate(NormInput(x.hidden, x.weight, x.eps, normed=normed))
        gate_up, down = self.experts.gate_up.weight, self.experts.down.weight
        copies = expert_copies(
            normed, logits, gate_up, down, self.num_experts_per_tok, self.norm_topk_prob
        )
        normed, stream = self._add_to_stream(copies, x.hidden, next_norm.weight, next_norm.eps)
        return NormInput(stream, next_norm.weight, next_norm.eps, normed=normed)

    def _add_to_stream(
        self, copies: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum over experts and ranks, residual add, norm; arguments and result as of
        `sum_copies_add_rms_norm`."""
        if self.tp_size == 1:
            return sum_copies_add_rms_norm(copies, residual, norm_weight, eps)
        return sum_add_norm(
            lambda rows, out: sum_copies(copies[rows], out), residual, norm_weight, eps
        )
