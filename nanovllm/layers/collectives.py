"""What ranks do together: through memory that they share where there is some, else by the library.

Owns this choice. Between two GPUs of one host nothing but shared memory is used, so that a step may
be captured whole and no library has to be told when a rank dies.
"""

from collections.abc import Callable

import torch

from nanovllm.kernels.all_reduce import pick_best, pick_best_ref, sum_add_rms_norm, sum_over_ranks
from nanovllm.kernels.rms_norm import add_rms_norm
from nanovllm.utils import distributed
from nanovllm.utils.peer_memory import PeerMemory

# Writes this rank's addend for these rows to its second argument, [rows, K].
Addend = Callable[[slice, torch.Tensor], object]


def sum_rows(addend: Addend, like: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, dtype [M, K] like `like`, the same bits on each of them."""
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    peers, pieces = _shared_pieces(like)
    if peers is None:
        addend(slice(None), out)
        return distributed.all_reduce(out)
    for rows in pieces:
        slot = peers.next_slot(like[rows])
        addend(rows, slot.rows)
        sum_over_ranks(peers, slot, out[rows])
    return out


def sum_add_norm(
    addend: Addend, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` of the sum over ranks.

    residual: dtype [M, K] contiguous, the stream.
    Returns (normed, residual + sum), dtype [M, K].
    """
    peers, pieces = _shared_pieces(residual)
    if peers is None:
        return add_rms_norm(sum_rows(addend, residual), residual, norm_weight, eps)
    normed, stream = torch.empty_like(residual), torch.empty_like(residual)
    for rows in pieces:
        slot = peers.next_slot(residual[rows])
        addend(rows, slot.rows)
        sum_add_rms_norm(peers, slot, residual[rows], norm_weight, eps, normed[rows], stream[rows])
    return normed, stream


def gather_columns(x: torch.Tensor) -> torch.Tensor | None:
    """The ranks' columns side by side, dtype [M, ranks * K], on rank 0; None on the others."""
    size, rank, width = distributed.tp_size(), distributed.tp_rank(), x.size(1)
    joined = x.new_empty(1, size * width).expand(len(x), -1)  # a shape
    if _shared_pieces(joined)[0] is None:
        return distributed.gather_to_rank0(x)

    def addend(rows: slice, out: torch.Tensor) -> None:
        out.zero_()[:, rank * width : (rank + 1) * width] = x[rows]

    everybodys = sum_rows(addend, joined)
    return everybodys if rank == 0 else None


def best_of_ranks(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Of every rank's token the one with the largest value, int64 [n]; the first rank's of equals.

    values: fp32 [n]. tokens: int64 [n].
    """
    peers = distributed.peer_memory()
    if peers is not None:
        return pick_best(peers, values, tokens)
    drawn = distributed.all_gather(torch.stack((values.double(), tokens.double())))
    return pick_best_ref(drawn[:, 0], drawn[:, 1]).long()


def share_tokens_of_rank0(tokens: torch.Tensor) -> None:
    """Make rank 0's tokens, int64 [n], everybody's, in place."""
    if distributed.tp_size() > 1 and len(tokens):
        value = 0.0 if distributed.tp_rank() == 0 else -torch.inf
        values = torch.full((len(tokens),), value, device=tokens.device)
        tokens.copy_(best_of_ranks(values, tokens))


def _shared_pieces(like: torch.Tensor) -> tuple[PeerMemory | None, list[slice]]:
    """The shared memory and the rows, [M, K], piece by piece as they fit there; or None where the
    library is to sum them."""
    peers, row_bytes = distributed.peer_memory(), like.size(1) * like.element_size()
    if peers is None or len(like) > peers.max_rows(row_bytes):
        return None, []
    step = max(peers.rows_of_a_slot(row_bytes), 1)  # no rows need no slot
    return peers, [slice(first, first + step) for first in range(0, len(like), step)]
