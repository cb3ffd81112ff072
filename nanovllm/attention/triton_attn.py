"""Attention by our own Triton kernels: any GPU from sm_80, any block size from 16.

Owns the scratch memory of split decode. The kernels are in kernels/.
"""

import torch

from nanovllm.attention.base import AttentionBackend
from nanovllm.kernels.launch import gpu, missing_triton
from nanovllm.kernels.paged_attention import (
    FUSED_MAX_BATCH,
    DecodeWorkspace,
    SharedPartials,
    decode_workspace,
    fused_decode_attention,
    paged_decode_attention,
)
from nanovllm.kernels.prefill_attention import prefill_attention
from nanovllm.kernels.shared_prefix import (
    ITEM_KEYS,
    ITEM_ROWS,
    shared_partials,
    shared_prefix_attention,
)
from nanovllm.utils.context import Context, SharedPrefixes


class TritonBackend(AttentionBackend):
    """Paged prefill with cached context; decode split over the whole GPU at any batch."""

    name = "triton"
    block_size_multiple = 16
    is_graph_safe = True
    fused_max_batch = FUSED_MAX_BATCH
    min_shared_batch = FUSED_MAX_BATCH + 1

    def __init__(self) -> None:
        # (batch, block table width, heads, kv heads, head dim) that the workspace is enough for.
        self._sizes: tuple[int, ...] = ()
        self._workspace: DecodeWorkspace | None = None
        self._partials: SharedPartials | None = None

    def unsupported_reason(
        self, device: torch.device, dtype: torch.dtype, head_dim: int
    ) -> str | None:
        if device.type != "cuda":
            return f"it needs a CUDA device, not {device.type}"
        if missing_triton is not None:
            return f"triton cannot be imported ({missing_triton})"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs an Ampere GPU or a newer one"
        if head_dim > 256:
            return f"it needs a head_dim of at most 256, not {head_dim}"
        return None

    def shared_items(
        self, num_heads: int, num_kv_heads: int, device: torch.device
    ) -> tuple[int, int, int]:
        rows = max(ITEM_ROWS * num_kv_heads // num_heads, 1)
        return rows, ITEM_KEYS, max(gpu(device).num_sms // num_kv_heads, 1)

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
        if ctx.block_tables is not None:
            assert k_cache is not None and v_cache is not None, "block tables without a cache"
            k, v = k_cache, v_cache
        return prefill_attention(
            q, k, v, ctx.cu_seqlens_q, ctx.cu_seqlens_k, q.size(-1) ** -0.5, ctx.block_tables
        )

    def decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: Context
    ) -> torch.Tensor:
        assert ctx.block_tables is not None and ctx.context_lens is not None, "decode needs both"
        workspace = self._scratch(q.size(1), k_cache, ctx.block_tables)
        scale = q.size(-1) ** -0.5
        cache = k_cache, v_cache, ctx.block_tables
        shared: SharedPartials | None = None
        if ctx.shared is not None:
            shared = self._shared_scratch(q, ctx.shared)
            lists = ctx.shared.items, ctx.shared.num_items
            shared_prefix_attention(q, *cache, *lists, shared, scale)
        return paged_decode_attention(
            q, *cache, ctx.context_lens, scale, workspace=workspace, shared=shared
        )

    def fused_decode(
        self,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        cos_sin: torch.Tensor,
        eps: float,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        ctx: Context,
    ) -> torch.Tensor:
        assert ctx.block_tables is not None and ctx.context_lens is not None, "decode needs both"
        num_kv_heads, head_dim = k_cache.shape[2:]
        num_heads = qkv.size(1) // head_dim - 2 * num_kv_heads
        return fused_decode_attention(
            qkv,
            q_norm,
            k_norm,
            cos_sin,
            k_cache,
            v_cache,
            ctx.block_tables,
            ctx.context_lens,
            head_dim**-0.5,
            eps,
            workspace=self._scratch(num_heads, k_cache, ctx.block_tables),
        )

    def _scratch(
        self, num_heads: int, cache: torch.Tensor, block_tables: torch.Tensor
    ) -> DecodeWorkspace:
        """The workspace, grown when a batch needs more. Graphs are captured largest first, so
        that what they hold is never replaced."""
        batch, width = block_tables.shape
        num_kv_heads, head_dim = cache.shape[2:]
        sizes = (batch, width, num_heads, num_kv_heads, head_dim)
        fits = self._sizes and batch <= self._sizes[0] and sizes[1:] == self._sizes[1:]
        if self._workspace is None or not fits:
            max_context = width * cache.size(1)
            self._workspace = decode_workspace(
                batch, num_heads, num_kv_heads, head_dim, max_context, cache.device
            )
            self._sizes = sizes
        return self._workspace

    def _shared_scratch(self, q: torch.Tensor, prefixes: SharedPrefixes) -> SharedPartials:
        """Room for the partial results of a step's items, grown likewise."""
        starts = prefixes.own_starts, prefixes.partial_starts
        num, room = len(prefixes.items), self._partials
        if room is None or len(room.values) < num or room.values.size(1) != q.size(1):
            room = self._partials = shared_partials(num, q, *starts)
        return SharedPartials(*starts, room.values, room.lse)
