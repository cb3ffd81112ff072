"""Attention backends: which there are, and which one to use.

Owns the list, fastest first. Knows nothing about how one works; their files know nothing about
each other.
"""

import torch

from nanovllm.attention.base import AttentionBackend
from nanovllm.attention.flash_attn2 import FlashAttn2Backend
from nanovllm.attention.torch_sdpa import TorchSDPABackend

__all__ = ["AttentionBackend", "select_backend"]

# "auto" takes the first that can run, so the fastest comes first; the last can always run.
_BACKENDS: list[type[AttentionBackend]] = [FlashAttn2Backend, TorchSDPABackend]


def select_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> tuple[AttentionBackend, str]:
    """The backend called `name`, or for "auto" the fastest that can run.

    Returns it with a sentence on why the faster ones were not chosen ("" when none is faster).
    """
    names = [backend.name for backend in _BACKENDS]
    if name != "auto" and name not in names:
        raise ValueError(
            f"attention_backend: got {name!r}, needs 'auto' or one of {names}, try 'auto'"
        )
    reasons: dict[str, str | None] = {}
    for backend_class in _BACKENDS:
        backend = backend_class()
        reason = backend.unsupported_reason(device, dtype, head_dim)
        if reason is None and block_size % backend.block_size_multiple:
            reason = (
                f"it needs a block size that is a multiple of {backend.block_size_multiple}, "
                f"not {block_size}"
            )
        if reason is None and name in ("auto", backend.name):
            return backend, "; ".join(f"{other}: {why}" for other, why in reasons.items() if why)
        reasons[backend.name] = reason
    states = "; ".join(f"{other}: {why or 'can run'}" for other, why in reasons.items())
    raise ValueError(
        f"attention_backend: got {name!r}, needs one that can run here ({states}), try 'auto'"
    )
