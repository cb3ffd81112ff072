"""Tensor-parallel communication: the only file that calls torch.distributed.

Owns this process's rank, the number of ranks, the process group between them and, on GPUs that can
reach each other, memory that all ranks read. Knows nothing about what is sent. With one rank there
is no group and no port, and every function is the identity.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanovllm.utils.peer_memory import PeerMemory, share_memory

logger = logging.getLogger("nanovllm")

_LEAVE_SECONDS = 5.0


@dataclass(frozen=True)
class _Group:
    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    peers: PeerMemory | None = None
    nccl: Any = None  # torch's group for tensors on GPUs, where peers do not serve for all of them


_ALONE = _Group()
_group = _ALONE


def init(
    rank: int,
    size: int,
    init_method: str,
    device: torch.device,
    row_bytes: int,
    is_hopeless: Callable[[], bool] = lambda: False,
) -> None:
    """Join the group of `size` ranks as `rank`; one rank needs none and joins none.

    init_method: "file://FOLDER/NAME", in a folder of this group alone.
    row_bytes: of the rows that are summed over ranks.
    is_hopeless: looked at while the others have not come; True raises ConnectionError.
    """
    global _group
    if _group is not _ALONE:
        raise RuntimeError(
            f"tensor_parallel_size: got {size} for a second group of ranks in this process, needs "
            f"the first one, of {_group.size}, to be gone, try closing its engine"
        )
    if not 0 <= rank < size:
        raise ValueError(f"rank: got {rank}, needs 0 <= rank < {size}, try one of these ranks")
    if size == 1:
        return
    if dist.is_initialized():
        raise RuntimeError(
            f"tensor_parallel_size: got {size} in a process that has a group of torch.distributed,"
            " of its own or left behind by ranks that did not end, needs none, try a new process"
        )
    # NCCL's watchdog would end this process, which may be the user's, when another rank dies.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    # Programs that use multicast over NVLink can put a host's GPUs out of service.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    # Nothing gets a thread out of that call, so it is one that may be left behind.
    failures: list[BaseException] = []

    def join() -> None:
        try:
            dist.init_process_group("gloo", init_method=init_method, world_size=size, rank=rank)
        except BaseException as error:
            failures.append(error)

    joining = threading.Thread(target=join, daemon=True, name="rendezvous")
    joining.start()
    while joining.is_alive():
        joining.join(0.02)
        if joining.is_alive() and is_hopeless():
            raise ConnectionError(f"rank {rank} of {size} waits for ranks that will not come")
    if failures:
        raise failures[0]
    _group = _Group(rank, size, device)
    if device.type == "cuda":
        try:
            folder = Path(init_method.removeprefix("file://")).parent
            _group = _connect(_group, row_bytes, folder, is_hopeless)
        except BaseException:
            destroy()
            raise


def _connect(
    group: _Group, row_bytes: int, folder: Path, is_hopeless: Callable[[], bool]
) -> _Group:
    """The group with what its GPUs reach each other by."""
    who = group.rank, group.size, group.device
    peers, nccl = share_memory(*who, folder, min_over_ranks, is_hopeless), None
    # Two ranks that share memory have no use for NCCL, whose groups may hang when they end.
    if peers is None or group.size > 2 or not peers.rows_of_a_slot(row_bytes):
        nccl = dist.new_group(backend="nccl")
        # It connects when it is first used: a broken link shows here and not in a step.
        dist.all_reduce(torch.zeros(1, device=group.device), group=nccl)
    return replace(group, peers=peers, nccl=nccl)


def destroy() -> None:
    """Leave the group; harmless when there is none."""
    global _group
    group, _group = _group, _ALONE
    if group is _ALONE:
        return
    group = _ALONE  # its memory goes first
    # Nothing gets a thread out of that call either, should another rank be gone.
    leaving = threading.Thread(target=dist.destroy_process_group, daemon=True, name="leaving")
    leaving.start()
    leaving.join(_LEAVE_SECONDS)
    if leaving.is_alive():
        logger.warning("nanovllm: the ranks' process group did not end and is left behind")


def abort() -> None:
    """Let nobody here wait for other ranks any longer, from any thread; what they share is void.

    Work in flight then ends with values of no meaning; of the group only `destroy` is left.
    """
    group = _group
    if group.device.type != "cuda":
        return  # gloo notices by itself
    if group.peers is not None:
        group.peers.abort.fill_(1)
    with contextlib.suppress(Exception):
        group.nccl._get_backend(group.device).abort()


def max_rows_of_sums(row_bytes: int) -> int:
    """Rows of this size up to which sums over ranks need no library."""
    if _group.peers is None:
        return 1 << 40 if _group.size == 1 else 0
    return _group.peers.max_rows(row_bytes)


def peer_memory() -> PeerMemory | None:
    """What all ranks read, where there is such memory."""
    return _group.peers


def tp_rank() -> int:
    """This process's rank, 0 when it is alone."""
    return _group.rank


def tp_size() -> int:
    """Number of ranks that share the model."""
    return _group.size


def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks, in place.

    tensor: any float [...] one addend per rank; returned holding the sum on every rank.
    """
    if _group.size > 1:
        dist.all_reduce(tensor, group=_group.nccl)
    return tensor


def gather_to_rank0(tensor: torch.Tensor, dim: int = -1) -> torch.Tensor | None:
    """Join the ranks' tensors along `dim` on rank 0; None on the others.

    tensor: any float [...] of the same shape on every rank.
    """
    if _group.size == 1:
        return tensor
    tensor, parts = tensor.contiguous(), None
    if _group.rank == 0:
        parts = [torch.empty_like(tensor) for _ in range(_group.size)]
    dist.gather(tensor, parts, dst=0, group=_group.nccl)
    return None if parts is None else torch.cat(parts, dim)


def all_gather(tensor: torch.Tensor) -> torch.Tensor:
    """Every rank's tensor, on each of them.

    tensor: any type [...] of the same shape on every rank; returns [ranks, ...].
    """
    if _group.size == 1:
        return tensor[None]
    parts = [torch.empty_like(tensor) for _ in range(_group.size)]
    dist.all_gather(parts, tensor.contiguous(), group=_group.nccl)
    return torch.stack(parts)


def min_over_ranks(value: int) -> int:
    """The smallest `value` of all ranks, on every rank."""
    if _group.size == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return int(tensor.item())
