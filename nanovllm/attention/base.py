"""The contract between the attention layer and the ways of computing attention.

Owns shapes, the mask and the cache layout. Knows nothing about how a backend does it, nor about
storing K/V: that has happened before a backend is called.

Cache layout, the same for all backends: `[num_blocks, block_size, num_kv_heads, head_dim]`.
A slot is `block_id * block_size + offset`. Block size 4, a sequence of 6 keys, block table [7, 2]:

    key       0   1   2   3   4   5
    slot     28  29  30  31   8   9        slots 10, 11 are free, their contents are undefined

The mask is causal and aligned at the end: the last query sees every key. q = 3 new tokens of a
sequence of k = 5 (two were computed in an earlier step):

                key 0  1  2  3  4
    query 0 (2)     x  x  x  .  .
    query 1 (3)     x  x  x  x  .
    query 2 (4)     x  x  x  x  x

Query heads share K/V heads in groups of neighbours: query head h reads K/V head
`h // (num_heads // num_kv_heads)`. Scores are scaled by `head_dim ** -0.5`.
"""

from abc import ABC, abstractmethod

import torch

from nanovllm.utils.context import Context


class AttentionBackend(ABC):
    """One way of computing attention over the paged cache."""

    # What `select_backend` and the log call it.
    name: str
    # Tokens; the cache's block size must be a multiple of it.
    block_size_multiple: int = 1
    # Whether decode may be captured in a CUDA graph: all it does depends on the contents of the
    # context's tensors, nothing on the host's numbers.
    is_graph_safe: bool = False

    # Decode batches up to this size go through fused_decode; 0: the backend has none.
    fused_max_batch: int = 0

    # Decode batches from this size on may come with ctx.shared; None: none may.
    min_shared_batch: int | None = None

    @abstractmethod
    def unsupported_reason(
        self, device: torch.device, dtype: torch.dtype, head_dim: int
    ) -> str | None:
        """Why this backend cannot run such a model here, as a clause; None if it can."""

    @abstractmethod
    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor | None,
        v_cache: torch.Tensor | None,
        ctx: Context,
    ) -> torch.Tensor:
        """Attention of packed prompt chunks.

        q: float [num_tokens, num_heads, head_dim] new queries, sequences back to back
        k, v: float [num_tokens, num_kv_heads, head_dim] new keys and values; all there is when
            ctx.block_tables is None, otherwise already in the cache and read from there
        k_cache, v_cache: float [num_blocks, block_size, num_kv_heads, head_dim], or None in the
            warm-up, in which ctx.block_tables is None too
        returns: float [num_tokens, num_heads, head_dim]
        """

    @abstractmethod
    def decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: Context
    ) -> torch.Tensor:
        """Attention of one new token per sequence over its whole context.

        q: float [num_seqs, num_heads, head_dim]
        k_cache, v_cache: float [num_blocks, block_size, num_kv_heads, head_dim], the new token's
            K/V included
        returns: float [num_seqs, num_heads, head_dim]; rows of context length 0 are padding and
            their values are of no use, but never an error
        """

    def shared_items(
        self, num_heads: int, num_kv_heads: int, device: torch.device
    ) -> tuple[int, int, int]:
        """What ctx.shared's items are to be: rows at most, keys at least, and how many of them keep
        the device busy, so that where there are more they take more keys each."""
        return 1 << 20, 1 << 20, 1  # as large as groups are

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
        """decode from the packed projection: also norms, rotates and stores the new token's K/V.

        qkv: float [num_seqs, (num_heads + 2 * num_kv_heads) * head_dim]; the rest as qk_norm_rope
        returns: float [num_seqs, num_heads, head_dim]
        """
        raise NotImplementedError(f"{self.name} has fused_max_batch {self.fused_max_batch}")
