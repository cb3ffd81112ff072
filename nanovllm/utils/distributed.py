"""Tensor-parallel communication: the only file that calls torch.distributed.

Owns this process's rank, the number of ranks, the process group between them and, on GPUs that can
reach each other, memory that all ranks read. Knows nothing about what is sent. With one rank there
is no group and no port, and every function is the identity.
"""

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

logger = logging.getLogger("nanovllm")

# How a rank's PeerMemory is laid out: flags, pairs of words, two slots. In bytes but for counts.
MAX_MEETINGS = 1024  # programs of a kernel that meet themselves on other ranks
MAX_PAIRS = 1 << 16  # more than the rows that a sampler takes
_MAX_RANKS = 8
_LEAVE_SECONDS = 5.0
PAIRS_AT = 4 * MAX_MEETINGS * _MAX_RANKS
_SLOTS_AT = PAIRS_AT + 8 * MAX_PAIRS
_SLOT_BYTES = 8 << 20


class Slot(NamedTuple):
    rows: torch.Tensor  # [M, K] to write to, in this rank's memory
    offset: int  # bytes from the start of every rank's memory


@dataclass(frozen=True)
class PeerMemory:
    """Device memory of each rank that all of them read (kernels/all_reduce.py says how)."""

    rank: int
    size: int
    memory: torch.Tensor  # uint8, this rank's
    addresses: torch.Tensor  # int64 [size] on the device: where each rank's lies for this one
    abort: torch.Tensor  # int32 [1] of the host; not 0: nobody waits any longer
    handle: Any = None  # of torch, keeps the others' memory mapped
    _turn: Iterator[int] = field(default_factory=lambda: itertools.cycle((0, 1)))

    @staticmethod
    def num_bytes() -> int:
        return _SLOTS_AT + 2 * _SLOT_BYTES

    def rows_of_a_slot(self, row_bytes: int) -> int:
        """Rows of this size that fit; 0 for sizes that kernels do not read at once."""
        return 0 if row_bytes % 16 else _SLOT_BYTES // row_bytes

    def max_rows(self, row_bytes: int) -> int:
        """Rows up to which sums are faster here than by NCCL, where a rank does not read all that
        the others have. Of two ranks each has to."""
        rows = self.rows_of_a_slot(row_bytes)
        return rows // (self.size - 1) if self.size > 2 or not rows else 1 << 40

    def next_slot(self, like: torch.Tensor) -> Slot:
        """A place for this rank's addend to a sum like this one, [M, K]; every other call gives
        the same."""
        offset = _SLOTS_AT + next(self._turn) * _SLOT_BYTES
        num_bytes = like.numel() * like.element_size()
        assert num_bytes <= _SLOT_BYTES, like.shape
        rows = self.memory[offset : offset + num_bytes].view(like.dtype).view(like.shape)
        return Slot(rows, offset)


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
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
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
            _group = _connect(_group, row_bytes, f"nanovllm {init_method}")
        except BaseException:
            destroy()
            raise


def _connect(group: _Group, row_bytes: int, name: str) -> _Group:
    """The group with what its GPUs reach each other by."""
    peers, nccl = _share_memory(group.rank, group.size, group.device, name), None
    # Two ranks that share memory have no use for NCCL, whose groups may hang when they end.
    if peers is None or group.size > 2 or not peers.rows_of_a_slot(row_bytes):
        nccl = dist.new_group(backend="nccl")
        # It connects when it is first used: a broken link shows here and not in a step.
        dist.all_reduce(torch.zeros(1, device=group.device), group=nccl)
    return replace(group, peers=peers, nccl=nccl)


def _share_memory(rank: int, size: int, device: torch.device, name: Any) -> PeerMemory | None:
    """Memory between the ranks' GPUs, or None where one of them cannot have it.

    name: a string of this group and no other in the process's life, the same on every rank.
    """
    memory: torch.Tensor | None = None
    peers: PeerMemory | None = None
    try:
        from torch.distributed import _symmetric_memory as symmetric
        from torch.distributed.distributed_c10d import _register_process_group

        # torch's own name is the same for each group in turn, and before 2.11 leads to the store
        # of the first one, which is gone: this rank would wait there for the others.
        world: Any = dist.group.WORLD
        _register_process_group(name, world)
        # Other kinds of it free memory together with all ranks, for which a rank that closes waits.
        if symmetric.get_backend(device) != "CUDA":
            symmetric.set_backend("CUDA")
        memory = symmetric.empty(PeerMemory.num_bytes(), dtype=torch.uint8, device=device)
        memory.zero_()
        torch.cuda.synchronize(device)
    except (ImportError, AttributeError, RuntimeError) as error:
        logger.info("nanovllm: rank %d shares no memory with others (%s); NCCL sums", rank, error)
    # In the rendezvous a rank waits for all others, and hears of nothing else.
    if not min_over_ranks(memory is not None) or memory is None:
        return None
    try:
        handle = symmetric.rendezvous(memory, name)
        addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
        abort = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        peers = PeerMemory(rank, size, memory, addresses, abort, handle)
    except RuntimeError as error:
        logger.info("nanovllm: rank %d reaches no memory of others (%s); NCCL sums", rank, error)
    # Also the barrier that no rank's flags are touched before they are zero.
    return peers if min_over_ranks(peers is not None) else None


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
