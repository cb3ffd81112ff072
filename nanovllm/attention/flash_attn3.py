"""Adapter to FlashAttention 3 (module flash_attn_interface), an optional package for Hopper.

Owns the translation of our words into its arguments: its page table is our block table, and a
prefill with cached context goes through its decode entry point, which takes packed queries too.
"""

from typing import Any

import torch

from nanovllm.attention.base import AttentionBackend
from nanovllm.utils.context import Context


class FlashAttn3Backend(AttentionBackend):
    name = "flash_attn_3"
    is_graph_safe = True
    _flash_attn: Any = None  # the package, once it was asked for

    def unsupported_reason(
        self, device: torch.device, dtype: torch.dtype, head_dim: int
    ) -> str | None:
        if device.type != "cuda":
            return f"it needs a CUDA device, not {device.type}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it needs float16 or bfloat16, not {dtype}"
        if head_dim not in (64, 128, 192, 256):
            return f"it needs a head_dim of 64, 128, 192 or 256, not {head_dim}"
        if torch.cuda.get_device_capability(device)[0] != 9:
            return "it needs a Hopper GPU"
        try:
            import flash_attn_interface
        except ImportError as error:
            return f"it cannot be imported ({error})"
        self._flash_attn = flash_attn_interface
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
        assert ctx.cu_seqlens_q is not None and ctx.cu_seqlens_k is not None, "prefill needs both"
        if ctx.block_tables is None:
            return self._flash_attn.flash_attn_varlen_func(
                q,
                k,
                v,
                cu_seqlens_q=ctx.cu_seqlens_q,
                cu_seqlens_k=ctx.cu_seqlens_k,
                max_seqlen_q=ctx.max_seqlen_q,
                max_seqlen_k=ctx.max_seqlen_k,
                causal=True,
            )
        return self._flash_attn.flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=ctx.cu_seqlens_k.diff(),
            page_table=ctx.block_tables,
            cu_seqlens_q=ctx.cu_seqlens_q,
            max_seqlen_q=ctx.max_seqlen_q,
            causal=True,
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
            page_table=ctx.block_tables,
            causal=True,
        )
        return out.squeeze(1)
