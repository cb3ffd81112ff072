"""The attention metadata of one step, and the rule for who may see it when.

Owns the `Context` value and the single place where the current one is kept. Knows nothing about
sequences, schedulers or models: whoever builds a step fills it in, `layers/attention.py` and
`layers/embed_head.py` read it, attention backends get it as an argument.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False, slots=True)
class SharedPrefixes:
    """Leading keys that rows of a decode have in common, as items of work; prefix_groups.py has an
    example."""

    # int32 [max_items, 8]: first row and end, first key and end, slot; the rest is unused.
    items: torch.Tensor
    num_items: torch.Tensor  # int32 [1]
    own_starts: torch.Tensor  # int32 [num_seqs] the key at which the row's own part begins
    # int32 [num_seqs + 1] where a row's partial results begin, one for each item over it.
    partial_starts: torch.Tensor


# eq=False: a step is identified by the object, so per-step work can be remembered by identity.
@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Context:
    """What attention and the LM head must know about one step besides its tokens.

    The contents of the tensors must not change while the value is in use: a backend may derive
    indices from them once and use these in every layer.
    """

    # True: prompt chunks packed without padding; False: one new token for each sequence.
    is_prefill: bool
    # int32 [num_tokens]: slot where each token's K/V is stored, -1 for a padding row.
    slot_mapping: torch.Tensor
    # int32 [num_seqs, max_num_blocks]: block ids, tail padded; None in a prefill in which no
    # sequence has cached context (K/V then come from the step itself, not from the cache).
    block_tables: torch.Tensor | None = None

    # Prefill: int32 [num_seqs + 1], where each sequence's new tokens / visible keys begin.
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    # Prefill: longest sequence of each kind, and all lengths, kept on the host.
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    seqlens_q: list[int] | None = None
    seqlens_k: list[int] | None = None

    # Decode: int32 [num_seqs], keys visible including this token's; 0 for a padding row.
    context_lens: torch.Tensor | None = None
    # Decode: the largest context length, kept on the host.
    max_context_len: int = 0
    # Decode: what some rows share and attention reads once; None: nothing.
    shared: SharedPrefixes | None = None

    # int32 [num_logits]: rows of the packed batch that need logits; None: all of them.
    logits_indices: torch.Tensor | None = None


_current: Context | None = None


@contextmanager
def use_context(ctx: Context) -> Iterator[Context]:
    """Make `ctx` the current context for the body of the `with`, whatever happens inside."""
    global _current
    if _current is not None:
        raise RuntimeError(
            "use_context: got a second context inside an active one, needs one step at a time, "
            "try leaving the first `with use_context(...)` before entering the next, and calling"
            " engines from one thread only"
        )
    _current = ctx
    try:
        yield ctx
    finally:
        _current = None


def get_context() -> Context:
    """The context of the step that is running."""
    if _current is None:
        raise RuntimeError(
            "get_context: got a call outside of a step, needs an active context, "
            "try running the model inside `with use_context(...)`"
        )
    return _current
