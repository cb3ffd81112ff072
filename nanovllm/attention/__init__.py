"""Attention backends: which there are, and which one to use.

Owns the lists, fastest first. Knows nothing about how one works; their files know nothing about
each other.
"""

from typing import Any

import torch

from nanovllm.attention.base import AttentionBackend
from nanovllm.attention.flash_attn2 import FlashAttn2Backend
from nanovllm.attention.flash_attn3 import FlashAttn3Backend
from nanovllm.attention.torch_sdpa import TorchSDPABackend
from nanovllm.attention.triton_attn import TritonBackend

__all__ = ["AttentionBackend", "select_backend"]

# For each phase the fastest comes first, and the last can always run.
_PREFILL = FlashAttn3Backend, FlashAttn2Backend, TritonBackend, TorchSDPABackend
# FlashAttention's decode tiles hold 64 or 128 query rows, of which a group of 2 to 8 fills few.
_DECODE = TritonBackend, FlashAttn3Backend, FlashAttn2Backend, TorchSDPABackend


class PairedBackend(AttentionBackend):
    """One backend's prefill with another's decode; both use the same cache layout."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self._prefill, self._decode = prefill, decode
        self.name = f"{prefill.name} (prefill) + {decode.name} (decode)"
        self.is_graph_safe = decode.is_graph_safe  # only decode steps are captured
        self.fused_max_batch = decode.fused_max_batch
        self.min_shared_batch = decode.min_shared_batch

    def unsupported_reason(
        self, device: torch.device, dtype: torch.dtype, head_dim: int
    ) -> str | None:
        return None  # both were asked before they were paired

    def shared_items(self, *args: Any) -> tuple[int, int, int]:
        return self._decode.shared_items(*args)

    def prefill(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._prefill.prefill(*args, **kwargs)

    def decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._decode.decode(*args, **kwargs)

    def fused_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._decode.fused_decode(*args, **kwargs)


def select_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> tuple[AttentionBackend, str]:
    """The backend called `name`, or for "auto" the fastest that can run each phase.

    Returns it with a sentence on why faster ones were not chosen ("" when none is faster). Raises
    ValueError, with every backend's reason, for a name that is unknown or cannot run.
    """
    backends: dict[str, AttentionBackend] = {kind.name: kind() for kind in _PREFILL}
    reasons = {}
    for other, backend in backends.items():
        reason = backend.unsupported_reason(device, dtype, head_dim)
        multiple = backend.block_size_multiple
        if reason is None and block_size % multiple:
            reason = f"it needs a block size that is a multiple of {multiple}, not {block_size}"
        reasons[other] = reason
    if name == "auto":
        prefill, decode = (
            next(backends[kind.name] for kind in order if reasons[kind.name] is None)
            for order in (_PREFILL, _DECODE)
        )
        faster = [kind.name for kind in _PREFILL[: list(backends).index(prefill.name)]]
        why = "; ".join(f"{other}: {reasons[other]}" for other in faster)
        return prefill if prefill is decode else PairedBackend(prefill, decode), why
    if name not in backends:
        raise ValueError(
            f"attention_backend: got {name!r}, needs 'auto' or one of {list(backends)}, try 'auto'"
        )
    if reasons[name] is not None:
        states = "; ".join(f"{other}: {why or 'can run'}" for other, why in reasons.items())
        raise ValueError(
            f"attention_backend: got {name!r}, needs one that can run here ({states}), try 'auto'"
        )
    return backends[name], ""
