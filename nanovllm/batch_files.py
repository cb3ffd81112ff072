"""Files of a bulk job: lines in, results out, and what a job that was killed had finished."""

import fcntl
import gzip
import os
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, cast

import xxhash

MAX_LINE_BYTES = 32 * 2**20  # so that a file without line ends does not fill the memory
BOM = b"\xef\xbb\xbf"
PAGE = 128  # lines of Held
# What damaged or torn gzip files raise.
GZIP_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error)
KnownResult = tuple[int, str | None, bool]


def open_input(path: str) -> IO[bytes]:
    """path: "-" is standard input. Raises ValueError for a file that cannot be read."""
    if path == "-":
        return sys.stdin.buffer
    try:
        stream = open_file(path)
        stream.peek(1)
    except (OSError, *GZIP_ERRORS) as error:
        raise _bad_file(path, error, "read") from error
    return cast(IO[bytes], stream)


def open_file(path: str) -> BufferedReader | gzip.GzipFile:
    """path: *.gz is decompressed."""
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")


def _bad_file(path: str, error: Exception, verb: str) -> ValueError:
    why = getattr(error, "strerror", None) or error
    return ValueError(f"{path}: got {why}, needs a file that can be {verb}")


def read_lines(stream: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Each line's number, from 1, and content; None for one that is too long. Blank ones are left
    out, and so is a byte order mark."""
    number = 0
    while raw := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            while not raw.endswith(b"\n") and (raw := stream.readline(MAX_LINE_BYTES)):
                pass
            yield number, None
            continue
        if number == 1:
            raw = raw.removeprefix(BOM)
        if line := raw.strip(b" \t\r\n"):
            yield number, line


def count_lines(path: str) -> int | None:
    """How many lines there are to read; None where only reading them would tell."""
    if not Path(path).is_file():  # a pipe too
        return None
    num, last = 0, b"\n"
    with open_input(path) as stream:
        try:
            while block := stream.read(2**20):
                num += block.count(b"\n")
                last = block[-1:]
        except GZIP_ERRORS:  # told when it is read
            return None
    return num + (last != b"\n")


class TextSet:
    """Texts that were seen, each by 63 bits of its hash, in about 16 bytes instead of 100.

    Among ten million texts the chance that any two are taken for the same is 1 in 100,000.
    """

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * 1024))  # open addressing; 0: free
        self._num = 0

    def add(self, text: str) -> bool:
        """False if it was there already."""
        if 3 * self._num > 2 * len(self._slots):
            old, self._slots = self._slots, array("Q", bytes(16 * len(self._slots)))
            for key in old:
                if key:
                    self._insert(key)
        is_new = self._insert(text_key(text))
        self._num += is_new
        return is_new

    def _insert(self, key: int) -> bool:
        slots, mask = self._slots, len(self._slots) - 1
        place = (key >> 1) & mask
        while found := slots[place]:
            if found == key:
                return False
            place = (place + 1) & mask
        slots[place] = key
        return True


def text_key(text: str) -> int:
    """Not 0, and odd."""
    return xxhash.xxh3_64_intdigest(text.encode()) | 1


class Held:
    """Lines of input whose results are there, in about 10 bytes for each."""

    def __init__(self) -> None:
        self.num = self.num_failed = self.last = 0  # last: the highest number
        # By line number, in pages, as a foreign file may have any number. 0: has no result, 2: has
        # one without custom_id.
        self._pages: dict[int, array[int]] = {}

    def add(self, number: int, custom_id: str | None, is_failed: bool) -> None:
        page, place = divmod(number, PAGE)
        keys = self._pages.get(page) or self._pages.setdefault(page, array("Q", bytes(8 * PAGE)))
        if keys[place]:
            raise ValueError(f"it has two results for line {number}")
        keys[place] = 2 if custom_id is None else text_key(custom_id)
        self.last = max(self.last, number)
        self.num += 1
        self.num_failed += is_failed

    def has(self, number: int, custom_id: str | None) -> bool:
        """Raises ValueError if that line was another one."""
        keys = self._pages.get(number // PAGE)
        found = keys[number % PAGE] if keys else 0
        if found and found != (2 if custom_id is None else text_key(custom_id)):
            got = f"custom_id {custom_id!r:.80}, which is not that of its result"
            need = "the input that the output was made from, try it or another output file"
            raise ValueError(f"line {number}: got {got}, needs {need}")
        return found != 0


class ResultFile:
    """Results, each line written whole as soon as it is there."""

    def __init__(
        self, path: str, resume: bool, known_result: Callable[[bytes], KnownResult]
    ) -> None:
        """path: "-" is standard output. resume: keep and read what it holds, without a torn end.

        known_result: what a line of it says; ValueError if it is none. Raises ValueError for a file
        that would be lost or mixed up, or cannot be written.
        """
        self.held = Held()
        self._compressor = zlib.compressobj(wbits=31) if path.endswith(".gz") else None
        if path == "-":
            if resume:
                raise ValueError("--resume: got - as output, needs a file")
            self._fd = os.dup(1)
            return
        exists = os.path.exists(path) and os.path.getsize(path) > 0
        if exists and not resume and os.path.isfile(path):
            need = "--resume to go on with them, or another name"
            raise ValueError(f"{path}: has results already, needs {need}")
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise _bad_file(path, error, "written") from error
        try:
            self._lock(path)
            if exists and resume:
                self._read_held(path, known_result)
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, line: bytes) -> None:
        if self._compressor is not None:
            line = self._compressor.compress(line) + self._compressor.flush(zlib.Z_SYNC_FLUSH)
        self._write(line)

    def close(self) -> None:
        try:
            if self._compressor is not None:
                self._write(self._compressor.flush())
        finally:
            os.close(self._fd)

    def _write(self, data: bytes) -> None:
        while (num := os.write(self._fd, data)) < len(data):
            data = data[num:]

    def _lock(self, path: str) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path}: another run-batch is writing to it") from None

    def _read_held(self, path: str, known_result: Callable[[bytes], KnownResult]) -> None:
        if self._compressor is not None:
            self._rewrite_whole(path)
        num_bytes = 0
        with open_file(path) as stream:
            for line in whole_lines(stream):
                num_bytes += len(line)
                if text := line.strip():
                    try:
                        self.held.add(*known_result(text))
                    except (ValueError, TypeError) as error:
                        raise ValueError(f"{path}: cannot go on with it, {error}") from error
        if self._compressor is None:
            os.ftruncate(self._fd, num_bytes)

    def _rewrite_whole(self, path: str) -> None:
        """A gzip file cannot be cut in its middle."""
        real = os.path.realpath(path)  # a link stays one
        copy = f"{real}.resume"
        with open_file(path) as old, gzip.open(copy, "wb") as new:
            new.writelines(whole_lines(old))
        os.replace(copy, real)
        os.close(self._fd)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND)
        self._lock(path)


def whole_lines(stream: Iterable[bytes]) -> Iterator[bytes]:
    try:
        for line in stream:
            if not line.endswith(b"\n"):
                return
            yield line
    except GZIP_ERRORS:
        return
