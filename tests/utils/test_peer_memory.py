"""Memory that ranks share: real processes with the host's memory, the driver's calls, and a GPU.

On the host a memfd stands for a GPU's memory: what is shared is a file descriptor too, and what it
names stays for as long as anybody maps it.
"""

import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from nanovllm.utils import distributed, peer_memory
from nanovllm.utils.peer_memory import PAIRS_AT, DeviceMapping, PeerMemory, share_memory

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")

CPU = torch.device("cpu")
MEMFD = "memory of a rank"
spawn = mp.get_context("spawn")


class HostMapping(torch.Tensor):
    address = property(lambda self: self.data_ptr())
    num_bytes = property(lambda self: self.numel())


def attach(fd, num_bytes, device, owner=0):
    # Keeps no descriptor of its own.
    path = f"/proc/self/fd/{fd}"
    memory = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    return memory.as_subclass(HostMapping)


def create(num_bytes, device):
    fd = os.memfd_create(MEMFD)
    os.truncate(fd, num_bytes)
    memory = attach(fd, num_bytes, device)
    return memory.fill_(255), fd  # as a device's memory may come


def use_the_host(setattr=setattr):
    setattr(peer_memory, "create", create)
    setattr(peer_memory, "attach", attach)
    setattr(torch.cuda, "synchronize", lambda device: None)


@pytest.fixture
def on_the_host(monkeypatch):
    use_the_host(monkeypatch.setattr)


@pytest.fixture
def start_ranks():
    """start_ranks(function, ranks, *args): a new process for each of these ranks."""
    processes = []

    def start(function, ranks, *args):
        started = [spawn.Process(target=function, args=(rank, *args)) for rank in ranks]
        for process in started:
            process.start()
        processes.extend(started)
        return started

    yield start
    for process in processes:
        process.kill()
        process.join()


@contextlib.contextmanager
def group(rank, size, folder, device=CPU):
    distributed.init(rank, size, f"file://{folder}/rendezvous", device, 64)
    try:
        yield
    finally:
        distributed.destroy()


def never():
    return False


def share(rank, size, folder, agree=distributed.min_over_ranks, is_hopeless=never):
    return share_memory(rank, size, CPU, Path(folder), agree, is_hopeless)


def barrier():
    distributed.min_over_ranks(0)


def left(rank, folder):
    """What this process has open of a rank's files, and what of them is still in the folder."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    found = [name for name in found if MEMFD in name]
    path = folder / f"memory-{rank}"
    if f" {path}\n" in Path("/proc/net/unix").read_text():
        found.append("socket")
    return found + [path] * path.exists()


def words(peers):
    """A word of each rank's memory, as this rank sees it."""
    return [ctypes.c_int32.from_address(address + PAIRS_AT) for address in peers.addresses.tolist()]


# -- between processes -----------------------------------------------------------------------------


def test_what_is_left_is_seen(tmp_path):
    """Or the tests below would show nothing."""
    fd = os.memfd_create(MEMFD)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.bind(str(tmp_path / "memory-1"))
        assert len(left(1, tmp_path)) == 3
    os.close(fd)
    assert left(1, tmp_path) == [tmp_path / "memory-1"]


def see_each_other(rank, size, folder):
    with group(rank, size, folder):
        peers = share(rank, size, folder)
        assert left(rank, folder) == []
        assert (peers.rank, peers.size, peers.abort.item()) == (rank, size, 0)
        assert len(peers.memory) == PeerMemory.num_bytes() and not peers.memory.any()
        seen = words(peers)
        assert not any(word.value for word in seen)
        barrier()
        # Each rank writes one byte of every rank's word.
        for word in seen:
            ctypes.c_uint8.from_address(ctypes.addressof(word) + rank).value = rank + 1
        barrier()
        expected = int.from_bytes(range(1, size + 1), "little")
        assert [word.value for word in seen] == [expected] * size
        assert peers.memory[PAIRS_AT : PAIRS_AT + 4].view(torch.int32).item() == expected
        assert not [name for name in os.listdir(folder) if name.startswith("memory")]


def see_each_other_as_a_worker(rank, size, folder):
    use_the_host()
    see_each_other(rank, size, folder)


@pytest.mark.parametrize(("size", "num_engines"), [(2, 3), (3, 2)])
def test_a_rank_with_a_history_shares_memory_with_new_ones(
    size, num_engines, tmp_path, on_the_host, start_ranks
):
    """As where one process has engines in turn, each with workers of its own. What rank 0 kept of
    the first engine and the workers never had, such as a count, would keep them apart."""
    folders = [tmp_path / str(i) for i in range(num_engines)]
    engines = []
    for folder in folders:
        folder.mkdir()
        engines.append(start_ranks(see_each_other_as_a_worker, range(1, size), size, folder))
    for folder, workers in zip(folders, engines, strict=True):
        see_each_other(0, size, folder)
        for worker in workers:
            worker.join()
        assert [worker.exitcode for worker in workers] == [0] * len(workers)


def die_before_sending(rank, size, folder, have_agreed):
    use_the_host()

    def agree(value):
        value = distributed.min_over_ranks(value)
        if rank == size - 1:
            have_agreed.wait()  # or another rank's agreement would fail
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    with group(rank, size, folder):
        share(rank, size, folder, agree)


def test_nobody_waits_for_a_rank_that_died_before_it_sent(tmp_path, on_the_host, start_ranks):
    """Rank 0 waits until it is told, and what tells it is another thread: it has to run."""
    have_agreed, is_asked, is_told = spawn.Event(), threading.Event(), threading.Event()
    alive, dying = start_ranks(die_before_sending, (1, 2), 3, tmp_path, have_agreed)

    def agree(value):
        value = distributed.min_over_ranks(value)
        have_agreed.set()
        return value

    def is_hopeless():
        is_asked.set()
        return is_told.is_set()

    def watch():
        is_asked.wait()
        dying.join()
        is_told.set()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with group(0, 3, tmp_path):
        with pytest.raises(ConnectionError, match="will not share memory"):
            share(0, 3, tmp_path, agree, is_hopeless)
        assert dying.exitcode == -signal.SIGKILL and is_told.is_set()
        assert left(0, tmp_path) == []
    watcher.join()
    alive.kill()


def test_a_rank_that_is_gone_when_the_others_send(tmp_path, on_the_host):
    """Its socket's file may still be there, or not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as gone:
        gone.bind(str(tmp_path / "memory-1"))
    for _ in range(2):
        with pytest.raises(ConnectionError, match="will not share memory"):
            share(0, 2, tmp_path, lambda value: value, lambda: True)
        (tmp_path / "memory-1").unlink(missing_ok=True)
        assert left(0, tmp_path) == []


def fail(*_):
    raise RuntimeError("not here")


FAILURES = {
    "create": lambda: (peer_memory, "create", fail),
    "attach": lambda: (peer_memory, "attach", fail),
    "synchronize": lambda: (torch.cuda, "synchronize", fail),
    "recv_fds": lambda: (socket, "recv_fds", lambda *_: (b"\1", [], 0, None)),  # too many are open
}


def get_nothing(rank, size, folder):
    """In turn rank 0 fails, then the last rank, at every place; a folder for each."""
    for who in (0, size - 1):
        for name, failure in FAILURES.items():
            place = folder / f"{name} {who}"
            with pytest.MonkeyPatch.context() as monkeypatch:
                if rank == who:
                    monkeypatch.setattr(*failure())
                assert share(rank, size, place) is None, (name, who)
            assert left(rank, place) == [], (name, who)
    assert share(rank, size, folder / ("x" * 200)) is None  # no address is as long
    assert share(rank, size, folder) is not None


def get_nothing_as_a_worker(rank, size, folder):
    use_the_host()
    with group(rank, size, folder):
        get_nothing(rank, size, folder)


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_do_without_where_one_has_to(size, tmp_path, on_the_host, start_ranks):
    for who in (0, size - 1):
        for name in FAILURES:
            (tmp_path / f"{name} {who}").mkdir()
    workers = start_ranks(get_nothing_as_a_worker, range(1, size), size, tmp_path)
    with group(0, size, tmp_path):
        get_nothing(0, size, tmp_path)
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0


@pytest.mark.parametrize("error", [OSError("libcuda.so.1: no such file"), AttributeError("cuMem")])
def test_no_driver_is_a_reason_to_do_without(error, tmp_path, monkeypatch, caplog):
    zeros = torch.zeros

    def no_driver():
        raise error

    monkeypatch.setattr(peer_memory, "_driver", no_driver)
    monkeypatch.setattr(torch, "zeros", lambda n, dtype, pin_memory: zeros(n, dtype=dtype))
    with caplog.at_level(logging.INFO, "nanovllm"):
        device = torch.device("cuda", 0)
        assert share_memory(0, 1, device, tmp_path, lambda value: value, never) is None
    assert f"({error}); NCCL sums" in caplog.text


# -- the driver ------------------------------------------------------------------------------------


class Driver:
    """Counts what it has given and not got back; `failing` is a call that fails."""

    def __init__(self, failing=None, has_atomics=1):
        self.failing, self.calls, self.held = failing, [], Counter()
        self.has_atomics = has_atomics

    def __getattr__(self, name):
        def call(*args):
            self.calls.append(name)
            if name == self.failing:
                return 2
            if name == "cuGetErrorName":
                args[1]._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"
            elif name == "cuDeviceGetP2PAttribute":
                assert args[1:] == (3, 0, 1)
                args[0]._obj.value = self.has_atomics
            elif name == "cuMemGetAllocationGranularity":
                args[0]._obj.value = 1 << 21
            elif name in ("cuMemCreate", "cuMemImportFromShareableHandle"):
                args[0]._obj.value = 1 << 40
                self.held["handle"] += 1
            elif name == "cuMemAddressReserve":
                args[0]._obj.value = 1 << 45
                self.held["address", args[1]] += 1
            elif name == "cuMemMap":
                assert (args[0].value, args[3].value) == (1 << 45, 1 << 40)
                self.held["mapping", args[1]] += 1
            elif name == "cuMemUnmap":
                self.held["mapping", args[1]] -= 1
            elif name == "cuMemAddressFree":
                assert not self.held["mapping", args[1]]
                self.held["address", args[1]] -= 1
            elif name == "cuMemRelease":
                assert args[0].value == 1 << 40
                self.held["handle"] -= 1
            elif name == "cuMemExportToShareableHandle":
                args[0]._obj.value = os.memfd_create(MEMFD)
            return 0

        return call


@pytest.fixture
def use_driver(monkeypatch):
    def use(driver):
        monkeypatch.setattr(peer_memory, "_driver", lambda: driver)
        # As a context after a fault of the device does.
        monkeypatch.setattr(
            torch.cuda, "synchronize", lambda _: driver.calls.append("wait") or fail()
        )
        return driver

    return use


GPU = torch.device("cuda", 0)
MAP = ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
CREATE = ["cuMemGetAllocationGranularity", "cuMemCreate", *MAP, "cuMemExportToShareableHandle"]
ATTACH = ["cuMemImportFromShareableHandle", *MAP]
UNMAP = ["wait", "cuMemUnmap", "cuMemAddressFree"]


def test_structures_have_the_size_of_the_drivers():
    sizes = [peer_memory._Location, peer_memory._Properties, peer_memory._Access]
    assert [ctypes.sizeof(structure) for structure in sizes] == [8, 32, 12]
    assert peer_memory._Properties.location.offset == peer_memory._Access.flags.offset == 8


def test_memory_is_held_for_as_long_as_its_mapping(use_driver):
    num_bytes = 5 << 21
    for make, calls in ((lambda: create_(num_bytes - 1), CREATE), (attach_, ATTACH)):
        driver = use_driver(Driver())
        mapping = make()
        assert driver.calls == [*calls, "cuMemRelease"]
        assert +driver.held == {("address", num_bytes): 1, ("mapping", num_bytes): 1}
        assert (mapping.address, mapping.num_bytes) == (1 << 45, num_bytes)
        view = mapping.__cuda_array_interface__
        assert (view["shape"], view["data"]) == ((num_bytes,), (1 << 45, False))
        del driver.calls[:], mapping
        assert driver.calls == UNMAP and not +driver.held


def create_(num_bytes=5 << 21):
    mapping, fd = peer_memory.create(num_bytes, GPU)
    os.close(fd)
    return mapping


def attach_():
    return peer_memory.attach(0, 5 << 21, GPU, 0)


@pytest.mark.parametrize(
    ("make", "failing"),
    [*((create_, name) for name in CREATE), *((attach_, name) for name in ATTACH)],
)
def test_a_call_that_fails_gives_back_what_was_made_before(make, failing, use_driver, tmp_path):
    driver = use_driver(Driver(failing))
    with pytest.raises(RuntimeError, match=f"^{failing}: CUDA_ERROR_OUT_OF_MEMORY$"):
        make()
    gc.collect()  # the error's frames are gone
    assert failing in driver.calls and not +driver.held
    assert left(0, tmp_path) == []


def test_memory_without_atomic_operations_is_not_shared(use_driver):
    """Flags that ranks wait for are counted up from afar; over PCIe that may not work."""
    driver = use_driver(Driver(has_atomics=0))
    with pytest.raises(RuntimeError, match="^GPUs 0 and 1 have no atomics over their link$"):
        peer_memory.attach(0, 5 << 21, GPU, 1)
    assert driver.calls == ["cuDeviceGetP2PAttribute"]
    driver = use_driver(Driver())
    assert peer_memory.attach(0, 5 << 21, GPU, 1).address == 1 << 45


# -- a GPU -----------------------------------------------------------------------------------------


def views(peers):
    """Each rank's memory, as this rank sees it."""
    return [torch.as_tensor(mapping, device=GPU)[PAIRS_AT:] for mapping in peers.mappings]


def write_to_each_other(rank):
    """Both directions, through the mappings and through the addresses that kernels get."""
    peers = distributed.peer_memory()
    assert peers is not None and distributed._group.nccl is None
    assert peers.addresses.tolist() == [mapping.address for mapping in peers.mappings]
    assert peers.memory.data_ptr() == peers.mappings[rank].address and not peers.memory.any()
    mine, theirs = views(peers)[rank], views(peers)[1 - rank]
    barrier()
    mine[:1000] = 10 + rank
    theirs[1000:2000] = 20 + rank
    torch.cuda.synchronize()
    barrier()
    assert mine[:1000].eq(10 + rank).all() and mine[1000:2000].eq(21 - rank).all()
    assert theirs[:1000].eq(11 - rank).all() and theirs[1000:2000].eq(20 + rank).all()
    torch.cuda.synchronize()
    barrier()
    return theirs


def write_and_stay(rank, folder):
    with group(rank, 2, folder, GPU):
        write_to_each_other(rank)
        signal.pause()


@pytest.mark.gpu
def test_memory_of_a_gpu_outlives_the_rank_that_made_it(tmp_path, start_ranks):
    folders = [tmp_path / str(i) for i in range(3)]
    workers = []
    for folder in folders:
        folder.mkdir()
        workers += start_ranks(write_and_stay, [1], folder)
    for folder, worker in zip(folders, workers, strict=True):
        with group(0, 2, folder, GPU):
            theirs = write_to_each_other(0)
            worker.kill()
            worker.join()
            assert worker.exitcode == -signal.SIGKILL
            assert theirs[:1000].eq(11).all() and theirs[1000:2000].eq(20).all()
            theirs.fill_(3)
            assert int(theirs[:1000].sum()) == 3000
        del theirs
        assert torch.ones(1000, device=GPU).sum().item() == 1000


@pytest.mark.gpu
def test_memory_of_a_gpu_comes_back():
    """More of it in turn than there is, whoever else has some of it now."""
    total = torch.cuda.mem_get_info(GPU)[1]
    num_bytes = total // 64
    for i in range(70):
        own, fd = peer_memory.create(num_bytes, GPU)
        try:
            other = peer_memory.attach(fd, own.num_bytes, GPU, 0)
        finally:
            os.close(fd)
        assert isinstance(other, DeviceMapping) and own.address != other.address
        torch.as_tensor(own, device=GPU)[-4:] = i
        del own
        assert torch.as_tensor(other, device=GPU)[-4:].tolist() == [i] * 4
        del other


@pytest.mark.gpu
def test_the_driver_says_what_is_wrong():
    with pytest.raises(RuntimeError, match="^cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY$"):
        peer_memory.create(torch.cuda.mem_get_info(GPU)[1] * 2, GPU)
    with open(os.devnull) as file, pytest.raises(RuntimeError, match="^cuMemImport.*: CUDA_ERROR_"):
        peer_memory.attach(file.fileno(), 1 << 21, GPU, 0)
