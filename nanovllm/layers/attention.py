"""The attention layer: stores the step's keys and values, then lets a backend attend.

Owns its layer's share of the cache once bound. Knows neither how the cache was sized nor how
attention is computed.
"""

import torch
from torch import nn

from nanovllm.attention.base import AttentionBackend
from nanovllm.attention.torch_sdpa import TorchSDPABackend
from nanovllm.kernels.store_kvcache import store_kvcache
from nanovllm.utils.context import get_context


class Attention(nn.Module):
    """Causal attention over this rank's heads, with a paged K/V cache."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        # Heads of this rank.
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.backend: AttentionBackend = TorchSDPABackend()
        self.k_cache: torch.Tensor | None = None
        self.v_cache: torch.Tensor | None = None

    def bind(
        self,
        k_cache: torch.Tensor | None,
        v_cache: torch.Tensor | None,
        backend: AttentionBackend,
    ) -> None:
        """Use this cache and this backend from now on.

        k_cache, v_cache: float [num_blocks, block_size, num_kv_heads, head_dim], contiguous; None
            for the warm-up, in which the cache's size is not known: prefill works, nothing is kept
        """
        self.k_cache, self.v_cache, self.backend = k_cache, v_cache, backend

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend from the step's tokens to all they may see.

        q: float [num_tokens, num_heads, head_dim]
        k, v: float [num_tokens, num_kv_heads, head_dim]
        returns: float [num_tokens, num_heads, head_dim]
        """
        ctx = get_context()
        k_cache, v_cache = self.k_cache, self.v_cache
        if k_cache is not None and v_cache is not None:
            store_kvcache(k, v, k_cache, v_cache, ctx.slot_mapping)
        if ctx.is_prefill:
            return self.backend.prefill(q, k, v, k_cache, v_cache, ctx)
        assert k_cache is not None and v_cache is not None, "decode before bind()"
        return self.backend.decode(q, k_cache, v_cache, ctx)
