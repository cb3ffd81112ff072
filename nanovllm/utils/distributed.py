"""Tensor-parallel communication: the only file that calls torch.distributed.

Owns this process's rank, the number of ranks and the process group between them. Knows nothing
about what is sent. With one rank there is no group and no port, and every function is the identity.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class _Group:
    rank: int = 0
    size: int = 1
    # Where small tensors made here must live for the backend to accept them.
    device: torch.device = torch.device("cpu")


_ALONE = _Group()
_group = _ALONE


def init(
    rank: int,
    size: int,
    init_method: str,
    backend: str,
    device: torch.device,
    is_hopeless: Callable[[], bool] = lambda: False,
) -> None:
    """Join the group of `size` ranks as `rank`; one rank needs none and joins none.

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
    # Naming the device lets NCCL connect now, so a broken link shows here and not in a step.
    device_id = device if device.type == "cuda" else None
    # Nothing gets a thread out of that call, so it is one that may be left behind.
    failures: list[BaseException] = []

    def join() -> None:
        try:
            dist.init_process_group(
                backend, init_method=init_method, world_size=size, rank=rank, device_id=device_id
            )
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


def destroy() -> None:
    """Leave the group; harmless when there is none."""
    global _group
    if _group is not _ALONE:
        _group = _ALONE
        dist.destroy_process_group()


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
        dist.all_reduce(tensor)
    return tensor


def gather_to_rank0(tensor: torch.Tensor, dim: int = -1) -> torch.Tensor | None:
    """Join the ranks' tensors along `dim` on rank 0; None on the others.

    tensor: any float [...] of the same shape on every rank.
    """
    if _group.size == 1:
        return tensor
    tensor = tensor.contiguous()
    if _group.rank > 0:
        dist.gather(tensor, None, dst=0)
        return None
    parts = [torch.empty_like(tensor) for _ in range(_group.size)]
    dist.gather(tensor, parts, dst=0)
    return torch.cat(parts, dim)


def broadcast(tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
    """Copy rank `src`'s values to every rank, in place.

    tensor: any type [...] of the same shape on every rank; returned.
    """
    if _group.size > 1:
        dist.broadcast(tensor, src)
    return tensor


def min_over_ranks(value: int) -> int:
    """The smallest `value` of all ranks, on every rank."""
    if _group.size == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.int64, device=_group.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return int(tensor.item())
