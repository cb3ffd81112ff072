"""Device memory of each rank that all of them map, by CUDA's virtual memory API.

Owns how it is laid out, the driver's calls that make it, and how ranks hand theirs to each other:
as file descriptors, through sockets in a folder of their own. Knows nothing of torch.distributed;
how ranks agree is passed in. The driver counts who maps memory over all processes, so a rank that
dies does not take its own from under a kernel of another. (torch's symmetric memory names ranks'
exchanges by counters of each process: one that had an engine before and a new one never meet.)
"""

import contextlib
import ctypes
import functools
import itertools
import logging
import os
import socket
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

logger = logging.getLogger("nanovllm")

# How a rank's PeerMemory is laid out: flags, pairs of words, two slots. In bytes but for counts.
MAX_MEETINGS = 1024  # programs of a kernel that meet themselves on other ranks
MAX_PAIRS = 1 << 16  # more than the rows that a sampler takes
_MAX_RANKS = 8
PAIRS_AT = 4 * MAX_MEETINGS * _MAX_RANKS
_SLOTS_AT = PAIRS_AT + 8 * MAX_PAIRS
_SLOT_BYTES = 8 << 20

_TICK_SECONDS = 0.02
# CU_MEM_ALLOCATION_TYPE_, _HANDLE_TYPE_ and _LOCATION_TYPE_, and _ACCESS_FLAGS_PROT_ of cuda.h.
_PINNED = _POSIX_FD = _ON_DEVICE = 1
_READ_WRITE = 3
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
_INT, _SIZE, _WORD, _POINTER = ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_void_p
# Without these ctypes would pass addresses and handles as 32 bits.
_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [_INT],
    "cuGetErrorName": [_INT, _POINTER],
    "cuDeviceGetP2PAttribute": [_POINTER, _INT, _INT, _INT],
    "cuMemGetAllocationGranularity": [_POINTER, _POINTER, _INT],
    "cuMemCreate": [_POINTER, _SIZE, _POINTER, _WORD],
    "cuMemExportToShareableHandle": [_POINTER, _WORD, _INT, _WORD],
    "cuMemImportFromShareableHandle": [_POINTER, _POINTER, _INT],
    "cuMemAddressReserve": [_POINTER, _SIZE, _SIZE, _WORD, _WORD],
    "cuMemMap": [_WORD, _SIZE, _SIZE, _WORD, _WORD],
    "cuMemSetAccess": [_WORD, _SIZE, _POINTER, _SIZE],
    "cuMemUnmap": [_WORD, _SIZE],
    "cuMemAddressFree": [_WORD, _SIZE],
    "cuMemRelease": [_WORD],
}


class _Location(ctypes.Structure):  # CUmemLocation
    _fields_ = [("type", _INT), ("id", _INT)]


class _Properties(ctypes.Structure):  # CUmemAllocationProp; the last 16 bytes stay zero
    _fields_ = [("type", _INT), ("handle_types", _INT), ("location", _Location), ("_", _WORD * 2)]


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = [("location", _Location), ("flags", _INT)]


class DeviceMapping:
    """Device memory at an address of this process, for as long as this object lives.

    `torch.as_tensor(mapping, device=device)` is a view, uint8 [num_bytes], that keeps it alive.
    """

    def __init__(self, handle: ctypes.c_uint64, num_bytes: int, device: torch.device) -> None:
        """handle: the driver's, of memory that this device can reach; the caller releases it.

        num_bytes: a multiple of the granularity. Raises RuntimeError with the driver's reason.
        """
        driver, address = _driver(), _WORD()
        access = _Access(_Location(_ON_DEVICE, device.index), _READ_WRITE)
        with contextlib.ExitStack() as undo:
            _call("cuMemAddressReserve", ctypes.byref(address), num_bytes, 0, 0, 0)
            undo.callback(driver.cuMemAddressFree, address, num_bytes)
            _call("cuMemMap", address, num_bytes, 0, handle, 0)
            undo.callback(driver.cuMemUnmap, address, num_bytes)
            _call("cuMemSetAccess", address, num_bytes, ctypes.byref(access), 1)
            undo.callback(_finish_kernels, device)
            # The end of the process unmaps too, and the driver may be gone before Python is.
            weakref.finalize(self, undo.pop_all().close).atexit = False
        self.address, self.num_bytes = address.value, num_bytes
        where = {"shape": (num_bytes,), "typestr": "|u1", "data": (address.value, False)}
        self.__cuda_array_interface__ = {**where, "version": 2}


def create(num_bytes: int, device: torch.device) -> tuple[DeviceMapping, int]:
    """Memory of this device, and a file descriptor by which other processes attach to it.

    num_bytes: rounded up to the granularity. Raises RuntimeError with the driver's reason, OSError
    or AttributeError where there is no such driver.
    """
    handle, fd, page = _WORD(), _INT(), _SIZE()
    kind = _Properties(_PINNED, _POSIX_FD, _Location(_ON_DEVICE, device.index))
    _call("cuMemGetAllocationGranularity", ctypes.byref(page), ctypes.byref(kind), 0)
    num_bytes = -(-num_bytes // page.value) * page.value
    _call("cuMemCreate", ctypes.byref(handle), num_bytes, ctypes.byref(kind), 0)
    try:
        mapping = DeviceMapping(handle, num_bytes, device)
        _call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, _POSIX_FD, 0)
    finally:
        _driver().cuMemRelease(handle)  # what is mapped needs no handle to stay
    return mapping, fd.value


def attach(fd: int, num_bytes: int, device: torch.device, owner: int) -> DeviceMapping:
    """Map for this device what another process has created, of num_bytes as its mapping says.

    fd: stays open. owner: the number of the device that it is on. Raises RuntimeError with the
    driver's reason, or where these devices have no atomic operations on each other's memory.
    """
    handle, has_atomics = _WORD(), _INT(1)
    if owner != device.index:  # over PCIe there may be none
        pair = _NATIVE_ATOMICS, device.index, owner
        _call("cuDeviceGetP2PAttribute", ctypes.byref(has_atomics), *pair)
    if not has_atomics.value:
        raise RuntimeError(f"GPUs {device.index} and {owner} have no atomics over their link")
    _call("cuMemImportFromShareableHandle", ctypes.byref(handle), fd, _POSIX_FD)
    try:
        return DeviceMapping(handle, num_bytes, device)
    finally:
        _driver().cuMemRelease(handle)


def _finish_kernels(device: torch.device) -> None:
    """They may read what is about to be unmapped; one that has failed has no more to read."""
    with contextlib.suppress(Exception):
        torch.cuda.synchronize(device)


@functools.cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    for name, types in _SIGNATURES.items():
        getattr(driver, name).argtypes = types
    driver.cuInit(0)
    return driver


def _call(name: str, *args: Any) -> None:
    code = getattr(_driver(), name)(*args)
    if code:
        reason = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(reason))
        raise RuntimeError(f"{name}: {(reason.value or b'error %d' % code).decode()}")


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
    mappings: tuple[DeviceMapping, ...] = ()  # of each rank, what lies at these addresses
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


def share_memory(
    rank: int,
    size: int,
    device: torch.device,
    folder: Path,
    agree: Callable[[int], int],
    is_hopeless: Callable[[], bool],
) -> PeerMemory | None:
    """Memory between the ranks' GPUs, or None on all of them where one cannot have it.

    folder: of this group alone, the same on every rank.
    agree: gives every rank the smallest of what the ranks call it with, once all have.
    is_hopeless: looked at while the others' memory has not come; True raises ConnectionError.
    """
    paths = [folder / f"memory-{peer}" for peer in range(size)]
    is_ready, peers = False, None
    with contextlib.ExitStack() as stack:
        try:
            abort = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
            own, fd = create(PeerMemory.num_bytes(), device)
            stack.callback(os.close, fd)
            memory = torch.as_tensor(own, device=device).zero_()
            torch.cuda.synchronize(device)
            link = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            link.bind(str(paths[rank]))
            stack.callback(paths[rank].unlink, missing_ok=True)
            link.settimeout(_TICK_SECONDS)
            is_ready = True
        except (OSError, AttributeError, RuntimeError) as error:
            logger.info("nanovllm: rank %d has no memory to share (%s); NCCL sums", rank, error)
        # Who sends finds every socket there.
        if not agree(is_ready):
            return None
        # Not socket.send_fds, which drops the address that it takes.
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _INT(fd))]
        for path in paths[:rank] + paths[rank + 1 :]:
            # A rank that is gone sends nothing either, which is noticed below.
            with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
                link.sendmsg([bytes([rank, device.index or 0])], rights, 0, str(path))
        try:
            mappings = {rank: own}
            while len(mappings) < size:
                (peer, owner), theirs = _receive(link, is_hopeless)
                try:
                    mappings[peer] = attach(theirs, own.num_bytes, device, owner)
                finally:
                    os.close(theirs)
            places = tuple(mappings[peer] for peer in range(size))
            addresses = torch.tensor([m.address for m in places], dtype=torch.int64, device=device)
            peers = PeerMemory(rank, size, memory, addresses, abort, places)
        except RuntimeError as error:
            logger.info("nanovllm: rank %d cannot map the others (%s); NCCL sums", rank, error)
        # Also the barrier that no socket is closed, nor any flag touched, before all have theirs.
        return peers if agree(peers is not None) else None


def _receive(link: socket.socket, is_hopeless: Callable[[], bool]) -> tuple[bytes, int]:
    """Of the next rank to be heard: its number and its device's, and a descriptor to close."""
    while True:
        try:
            message, fds, _, _ = socket.recv_fds(link, 2, 1)
        except TimeoutError:
            if is_hopeless():
                raise ConnectionError("waiting for ranks that will not share memory") from None
            continue
        if not fds:
            raise RuntimeError("this process may not open another file")
        return message, fds[0]
