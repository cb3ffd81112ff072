"""Adapter to flash-attn 2, an optional package for CUDA.

Owns the translation of our words into its arguments. The package is imported here only, once, when
first asked for; if that fails, the import error is the reason the backend is refused.
"""

from typing import Any

import torch

from nanovllm.attention.base import AttentionBackend
from nanovllm.utils.context import Context

MAX_HEAD_DIM = 256


class FlashAttn2Backend(AttentionBackend):
    """flash_attn_varlen_func for prefill, flash_attn_with_kvcache for decode, both paged."""

    name = "flash_attn"
    # The paged kernels load whole tiles of a block.
    block_size_multiple = 256
    is_graph_safe = True
    _flash_attn: Any = None  # the package, once it was asked for

    def unsupported_reason(
        self, device: torch.device, dtype: torch.dtype, head_dim: int
    ) -> str | None:
        if device.type != "cuda":
            return f"it needs a CUDA device, not {device.type}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it needs float16 or bfloat16, not {dtype}"
        if head_dim % 8 or head_dim > MAX_HEAD_DIM:
            return f"it needs a head_dim in steps of 8 up to {MAX_HEAD_DIM}, not {head_dim}"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs an Ampere GPU or a newer one"
        try:
            import flash_attn
        except ImportError as error:
            return f"it cannot be imported ({error})"
        self._flash_attn = flash_attn
        return None

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor | None,
        v_cache: torch.Tensor | None,
        ctx: Context,
    ) -> torch.Tensor:
        is_paged = ctx.block_tables is not None
        return self._flash_attn.flash_attn_varlen_func(
            q,
            k_cache if is_paged else k,
            v_cache if is_paged else v,
            cu_seqlens_q=ctx.cu_seqlens_q,
            cu_seqlens_k=ctx.cu_seqlens_k,
            max_seqlen_q=ctx.max_seqlen_q,
            max_seqlen_k=ctx.max_seqlen_k,
            causal=True,
            block_table=ctx.block_tables,
        )

    def decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: Context
    ) -> torch.Tensor:
        # Its query has a length dimension, here one token.
        out = self._flash_attn.flash_attn_with_kvcache(
            q.unsqueeze(1),
            k_cache,
            v_cache,
            cache_seqlens=ctx.context_lens,
            block_table=ctx.block_tables,
            causal=True,
        )
        return out.squeeze(1)
