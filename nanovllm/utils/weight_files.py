"""The safetensors files of a checkpoint: which are read, what is in them, and reading it fast.

Owns the folder's rules. An index names plain files of its own folder, each tensor in the file that
has it; without one there is a single file, or all there are. Links are followed wherever they
lead, since the hub's cache is made of them and so are folders that borrow a model's weights:
whoever can put a link into a folder could put the weights there.

Values go straight to a GPU, from several threads with a piece of pinned memory each: read() copies
out of the page cache at several times the speed of a mapping, whose every page is a fault, and
holds no lock of Python's. The CPU copies from a mapping, which saves it one copy of two.
"""

import json
import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from threading import local

import torch
from safetensors import SafetensorError, safe_open

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
AGAIN = "downloading the checkpoint again"
MAX_NAMES = 5
NUM_THREADS = 4
PIECE = 4 << 20  # bytes; of pinned memory each thread has two
MAX_AHEAD = 1 << 29  # bytes of tensors that are read before they are asked for


class ModelLoadError(ValueError):
    """The checkpoint's files are damaged or do not belong to the model."""


def wrong(name: object, got: str, need: str, remedy: str) -> ModelLoadError:
    return ModelLoadError(f"{name}: got {got}, needs {need}, try {remedy}")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file's header describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int  # byte of the file at which its values begin
    num_bytes: int


def some(names: list[str]) -> str:
    """The first few names, and how many there are."""
    more = f", ... ({len(names)} in all)" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


# -- files and headers -----------------------------------------------------------------------------


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """All tensors of the checkpoint in `path`, without their values."""
    if not path.is_dir():
        raise wrong("model", repr(str(path)), "a directory", "the right path")
    weight_map = _read_index(path) if (path / INDEX_NAME).is_file() else {}
    stored: dict[str, StoredTensor] = {}
    for file in sorted({path / name for name in weight_map.values()}) or _unlisted_files(path):
        for name, tensor in _read_header(file).items():
            if name in stored:
                got = f"it in {stored[name].file.name} and in {file.name}"
                remedy = "removing the file that is not part of the checkpoint"
                raise wrong(name, got, "one of them", remedy)
            stored[name] = tensor
    for name, file_name in weight_map.items():
        if name not in stored or stored[name].file.name != file_name:
            where = f"only {stored[name].file.name} has it" if name in stored else "it is not there"
            got = f"{name} in {file_name}, where {where}"
            raise wrong(path / INDEX_NAME, got, "the index of these files", AGAIN)
    return stored


def _unlisted_files(path: Path) -> list[Path]:
    """The files of a folder without an index: the single one, or all."""
    files = sorted(filter(os.path.isfile, path.glob("*.safetensors")))
    if not files:
        others = [p.name for p in path.iterdir() if p.suffix in (".bin", ".gguf", ".pt", ".pth")]
        got = f"{str(path)!r} with {some(sorted(others)) or 'no weights'}"
        remedy = "the safetensors version of this checkpoint"
        raise wrong("model", got, "*.safetensors files", remedy)
    if path / SINGLE_NAME in files and len(files) > 1:
        ignored = [file.name for file in files if file.name != SINGLE_NAME]
        logger.info("%s is read, beside it are ignored: %s", SINGLE_NAME, some(ignored))
        files = [path / SINGLE_NAME]
    return files


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file; others in the folder, a consolidated copy say, are not read."""
    index_file = path / INDEX_NAME
    try:
        weight_map = dict(json.loads(index_file.read_text("utf-8"))["weight_map"].items())
        names = set(weight_map.values())
    except Exception as error:  # json also raises RecursionError
        got = f"no weight_map of tensor names to files ({error!r:.200})"
        raise wrong(index_file, got, "one", "downloading the file again") from error
    for name in sorted(names, key=repr):
        if not isinstance(name, str) or Path(name).name != name or "\\" in name:
            need = "plain names of files in this folder"
            raise wrong(index_file, f"the file {name!r}", need, "the original index")
        if not os.path.isfile(path / name):  # no error for a name that is too long
            got = f"{name!r} in its list but not in the folder"
            raise wrong(index_file, got, f"all {len(names)} files", AGAIN)
    if not names:
        raise wrong(index_file, "an empty list", "files", "the original index")
    return weight_map


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """What is in a file, by safetensors' own reading of it, and where."""
    stored = {}
    with _reading(file):
        # The library vouches for sizes, shapes and offsets; it does not tell where values begin.
        with safe_open(file, framework="pt") as tensors, open(file, "rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            header = json.loads(raw.read(length))
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                tensor = tensors.get_slice(name)
                shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
                start, end = header[name]["data_offsets"]
                if (list(shape), dtype) != (header[name]["shape"], header[name]["dtype"]):
                    raise ValueError(f"{name} is described twice")
                stored[name] = StoredTensor(file, shape, dtype, 8 + length + start, end - start)
    return stored


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """What goes wrong in reading a file is an error that names it."""
    try:
        yield
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        got, need = f"a file that cannot be read ({error!s:.200})", "a complete safetensors file"
        raise wrong(file, got, need, "downloading it again") from error


# -- values ----------------------------------------------------------------------------------------


def read_tensors(
    tensors: Mapping[str, StoredTensor], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and values, float [shape] in the stored type, of each tensor in the order of the files.

    On the CPU they are views of the files, to be copied from and not kept.
    """
    order = sorted(tensors, key=lambda name: (tensors[name].file, tensors[name].start))
    if device.type != "cpu":
        yield from read_ahead({name: tensors[name] for name in order}, device)
        return
    for file, names in groupby(order, lambda name: tensors[name].file):
        with _reading(file), safe_open(file, framework="pt") as opened:
            for name in names:
                yield name, opened.get_tensor(name)


def read_ahead(
    tensors: Mapping[str, StoredTensor], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and values of each tensor, in this order.

    Threads read, and on CUDA copy in the order of the current stream, so that whoever computes
    with a tensor there finds it complete and may free it at once.
    """
    stages = _Stages(device)
    pending: deque[tuple[str, Future[torch.Tensor]]] = deque()
    ahead = 0
    with ExitStack() as stack:
        fds: dict[Path, int] = {}
        pool = stack.enter_context(ThreadPoolExecutor(NUM_THREADS, "read-weights"))
        try:
            for name, tensor in tensors.items():
                while pending and ahead + tensor.num_bytes > MAX_AHEAD:
                    first, future = pending.popleft()
                    ahead -= tensors[first].num_bytes
                    yield first, future.result()
                if tensor.file not in fds:
                    with _reading(tensor.file):
                        fds[tensor.file] = os.open(tensor.file, os.O_RDONLY)
                    stack.callback(os.close, fds[tensor.file])
                pending.append((name, pool.submit(stages.read, tensor, fds[tensor.file])))
                ahead += tensor.num_bytes
            while pending:
                first, future = pending.popleft()
                yield first, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


class _Stages:
    """Each reading thread's memory between file and device: while one half of it is copied to the
    device, the other is read into."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.local = local()

    def read(self, tensor: StoredTensor, fd: int) -> torch.Tensor:
        """The tensor on the device; on CUDA, once the stream gets there."""
        on_stream = nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        with on_stream, _reading(tensor.file):
            if not hasattr(self.local, "halves"):
                self.local.halves = deque(self._make_half() for _ in range(2))
            values = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device=self.device)
            out = values.view(-1).view(torch.uint8)
            for offset in range(0, out.numel(), PIECE):
                self.local.halves.rotate()
                half, copied = self.local.halves[0]
                if copied is not None:
                    copied.synchronize()
                piece = out[offset : offset + PIECE]
                _read_into(half[: len(piece)], fd, tensor.start + offset)
                self._copy(piece, half[: len(piece)], copied)
            return values

    def _make_half(self) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Memory, and the event of the last copy out of it."""
        is_cuda = self.stream is not None
        memory = torch.empty(PIECE, dtype=torch.uint8, device="cpu", pin_memory=is_cuda)
        return memory, torch.cuda.Event() if is_cuda else None

    def _copy(
        self, piece: torch.Tensor, half: torch.Tensor, copied: torch.cuda.Event | None
    ) -> None:
        piece.copy_(half, non_blocking=True)
        if copied is not None:
            copied.record(self.stream)


def _read_into(out: torch.Tensor, fd: int, start: int) -> None:
    """Fill uint8 [n] of the host with the file's bytes from start on."""
    view = memoryview(out.numpy())  # type: ignore[arg-type]
    while view:
        num_read = os.preadv(fd, [view], start)
        if num_read == 0:
            raise OSError("it ends before its last tensor does")
        view, start = view[num_read:], start + num_read
