"""The mixture-of-experts MLP: a router and its experts, every expert split over the ranks.

Owns the experts' packed weights and which checkpoint tensor fills which part of them. Every rank
routes all tokens, alike since all hold the same stream and the same router, and computes its share
of each expert's intermediate columns; the ranks' outputs are summed as a dense MLP's are.
"""

import torch
from torch import nn

from nanovllm.kernels.grouped_gemm import expert_copies, sum_copies, sum_copies_add_rms_norm
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


class PackedExperts(nn.Module):
    """A projection of every expert; this rank's share of its rows (dim 0) or columns (dim 1)."""

    def __init__(self, num_experts: int, parts: int, full_shape: tuple[int, int], dim: int) -> None:
        """parts: of an expert, one below the other; full_shape: of a part in the checkpoint"""
        super().__init__()
        # As it is now: another engine of this process may form a group later.
        self.tp_rank, self.dim = distributed.tp_rank(), dim
        self.local_size = shard_size("moe_intermediate_size", full_shape[dim])
        shape = list(full_shape)
        shape[dim] = self.local_size
        self.weight = make_parameter(
            (num_experts, parts * shape[0], shape[1]),
            dict.fromkeys(range(parts * num_experts), full_shape),
            self.load_shard,
        )

    def load_shard(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copy this rank's share of one part of one expert.

        loaded: float, of the full shape, the checkpoint's tensor
        """
        assert isinstance(shard_id, int), shard_id
        share = loaded.narrow(self.dim, self.tp_rank * self.local_size, self.local_size)
        param.data.view(-1, *share.shape)[shard_id].copy_(share)


class Experts(nn.Module):
    """The experts' weights, gate rows before up rows; the product is the whole block's."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up = PackedExperts(num_experts, 2, (intermediate_size, hidden_size), dim=0)
        self.down = PackedExperts(num_experts, 1, (hidden_size, intermediate_size), dim=1)


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
        stream, norm = x.hidden, (next_norm.weight, next_norm.eps)
        if self.tp_size == 1:
            normed, stream = sum_copies_add_rms_norm(copies, stream, *norm)
        else:
            normed, stream = sum_add_norm(
                lambda rows, out: sum_copies(copies[rows], out), stream, *norm
            )
        return NormInput(stream, *norm, normed=normed)
