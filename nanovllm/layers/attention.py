"""The attention layer: norms and rotates q and k, stores the step's K/V, lets a backend attend.

Owns its layer's share of the cache once bound. Knows neither how the cache was sized nor how
attention is computed.
"""

import torch
from torch import nn

from nanovllm.attention.base import AttentionBackend
from nanovllm.attention.torch_sdpa import TorchSDPABackend
from nanovllm.kernels.qk_norm_rope import qk_norm_rope
from nanovllm.utils.context import get_context


class Attention(nn.Module):
    """Causal attention over this rank's heads, with a paged K/V cache."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, hidden_size: int) -> None:
        """num_heads, num_kv_heads: of this rank. hidden_size: of what the projection read."""
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.hidden_size = hidden_size
        self.backend: AttentionBackend = TorchSDPABackend()
        self.k_cache: torch.Tensor | None = None
        self.v_cache: torch.Tensor | None = None

    def bind(
        self, k_cache: torch.Tensor | None, v_cache: torch.Tensor | None, backend: AttentionBackend
    ) -> None:
        """Use this cache and this backend from now on.

        k_cache, v_cache: float [num_blocks, block_size, num_kv_heads, head_dim], contiguous; None
            for the warm-up, in which the cache's size is not known: prefill works, nothing is kept
        """
        self.k_cache, self.v_cache, self.backend = k_cache, v_cache, backend

    def forward(
        self,
        qkv: torch.Tensor,
        sum_squares: torch.Tensor | None,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Attend from the step's tokens to all they may see.

        qkv: float [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] packed; overwritten
        sum_squares: what is left to apply to qkv, see `norm_linear`
        positions: int [num_tokens]; cos_sin: the rotation table, see `qk_norm_rope`
        q_norm, k_norm: float [head_dim] norm weights, both or neither; eps: of all norms
        returns: float [num_tokens, num_heads * head_dim]
        """
        ctx = get_context()
        k_cache, v_cache, backend = self.k_cache, self.v_cache, self.backend
        if not ctx.is_prefill:
            assert k_cache is not None and v_cache is not None, "decode before bind()"
            if sum_squares is None and len(qkv) <= backend.fused_max_batch:
                return backend.fused_decode(
                    qkv, q_norm, k_norm, cos_sin, eps, k_cache, v_cache, ctx
                ).flatten(1)
        heads = self.num_kv_heads, self.head_dim
        stored = k_cache, v_cache, None if k_cache is None else ctx.slot_mapping
        left = sum_squares, self.hidden_size
        q, k, v = qk_norm_rope(qkv, q_norm, k_norm, positions, cos_sin, *heads, eps, *stored, *left)
        if ctx.is_prefill:
            return backend.prefill(q, k, v, k_cache, v_cache, ctx).flatten(1)
        assert k_cache is not None and v_cache is not None
        return backend.decode(q, k_cache, v_cache, ctx).flatten(1)
