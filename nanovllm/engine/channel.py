"""Channel: framed messages between rank 0 and one worker, over a socket pair without a name.

    | magic | version | counter | header length | body length | CRC-32 of all else |  32 bytes
    | header: JSON {"call", "scalars", "arrays": [[name, dtype, shape], ...]}
    | body: the arrays' bytes, end to end

Nothing is pickled and no message is too long. Whatever is not such a frame is a FrameError, found
before anything is allocated for it.
"""

import json
import math
import socket
import struct
import time
import zlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_PREFIX = struct.Struct("<4sIQIQI")  # padding-free, little-endian
_MAGIC, _VERSION = b"nvLM", 2
_PIECE = 1 << 20  # bytes received at a time, so that a length gone wrong allocates no more


class FrameError(ValueError):
    """What was received is not a frame of this version, whole and in its turn."""


class Frame(NamedTuple):
    call: str
    scalars: dict[str, Any]  # JSON values
    arrays: dict[str, npt.NDArray[Any]]  # read-only


def encode(
    call: str, scalars: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], counter: int = 0
) -> bytes:
    """One frame; scalars must be JSON values, arrays of numbers or bools of any shape."""
    layout = [[name, a.dtype.str, a.shape] for name, a in arrays.items()]
    header = json.dumps({"call": call, "scalars": scalars, "arrays": layout}).encode()
    body = b"".join(np.ascontiguousarray(a).tobytes() for a in arrays.values())
    prefix = _PREFIX.pack(_MAGIC, _VERSION, counter, len(header), len(body), 0)[:-4]
    crc = zlib.crc32(body, zlib.crc32(header, zlib.crc32(prefix)))
    return b"".join([prefix, struct.pack("<I", crc), header, body])


def decode(frame: bytes, counter: int = 0) -> Frame:
    """The content of a whole frame; counter: its turn."""
    if len(frame) < _PREFIX.size:
        raise FrameError(f"a frame of {len(frame)} bytes, needs at least {_PREFIX.size}")
    header_size, body_size = _read_prefix(frame[: _PREFIX.size], counter)
    if len(frame) != _PREFIX.size + header_size + body_size:
        raise FrameError(f"a frame of {len(frame)} bytes whose parts do not add up to it")
    rest = memoryview(frame)[_PREFIX.size :]
    (crc,) = struct.unpack_from("<I", frame, _PREFIX.size - 4)
    if zlib.crc32(rest, zlib.crc32(frame[: _PREFIX.size - 4])) != crc:
        raise FrameError("a frame whose CRC-32 does not fit")
    try:
        header = json.loads(bytes(rest[:header_size]))
        call, scalars, layout = header["call"], header["scalars"], header["arrays"]
        arrays, at = {}, header_size
        for name, dtype, shape in layout:
            kind = np.dtype(dtype)
            count = math.prod(shape)
            if kind.kind not in "biuf" or any(n < 0 for n in shape):
                raise ValueError(f"an array {name!r} of {dtype} {shape}")
            if at + count * kind.itemsize > len(rest):
                raise ValueError(f"an array {name!r} beyond the end")
            arrays[name] = np.frombuffer(rest, kind, count, at).reshape(shape)
            at += count * kind.itemsize
        if type(call) is not str or type(scalars) is not dict or at != len(rest):
            raise ValueError("call, scalars or arrays are not what they should be")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FrameError(f"a frame with a bad header: {error!r:.200}") from error
    return Frame(call, scalars, arrays)


def _read_prefix(prefix: bytes, counter: int) -> tuple[int, int]:
    """Lengths of header and body."""
    magic, version, turn, header_size, body_size, _ = _PREFIX.unpack(prefix)
    if magic != _MAGIC or version != _VERSION:
        raise FrameError(f"a frame of {magic!r} {version}, needs {_MAGIC!r} {_VERSION}")
    if turn != counter:
        raise FrameError(f"frame number {turn}, needs {counter}: one was lost or came twice")
    return header_size, body_size


class Channel:
    """One end; not for two threads to receive from, nor for two to send to."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._num_sent = self._num_received = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(
        self, call: str, scalars: dict[str, Any], arrays: dict[str, npt.NDArray[Any]] | None = None
    ) -> None:
        """Raises OSError when the other end is gone."""
        self._socket.sendall(encode(call, scalars, arrays or {}, self._num_sent))
        self._num_sent += 1

    def receive(self, timeout: float | None = None) -> Frame:
        """The next frame. Raises EOFError or OSError when the other end is gone, TimeoutError when
        it did not come whole within these seconds, FrameError when it is none."""
        deadline = None if timeout is None else time.monotonic() + timeout
        prefix = self._read(_PREFIX.size, deadline)
        header_size, body_size = _read_prefix(prefix, self._num_received)
        rest = self._read(header_size + body_size, deadline)
        frame = decode(prefix + rest, self._num_received)
        self._num_received += 1
        return frame

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int, deadline: float | None) -> bytes:
        data = bytearray()
        while len(data) < size:
            if deadline is not None:
                self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            piece = self._socket.recv(min(size - len(data), _PIECE))
            if not piece:
                raise EOFError("the other end of the channel is gone")
            data += piece
        self._socket.settimeout(None)
        return bytes(data)
