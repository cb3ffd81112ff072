"""Frames: whatever arrives is a whole frame in its turn, or a FrameError."""

import random
import socket
import threading
import tracemalloc

import numpy as np
import pytest

from nanovllm.engine.channel import Channel, FrameError, decode, encode


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    channels = Channel(ours), Channel(theirs)
    yield channels
    for channel in channels:
        channel.close()


def test_frames_go_both_ways_in_order(pair):
    a, b = pair
    for n in range(5):
        a.send("launch", {"n": n}, {"x": np.arange(n, dtype=np.int32)})
        b.send("done", {})
    for n in range(5):
        call, scalars, arrays = b.receive()
        assert (call, scalars["n"], len(arrays["x"])) == ("launch", n, n)
        assert a.receive() == ("done", {}, {})


def test_a_frame_of_64_mib_passes(pair):
    a, b = pair
    array = np.random.default_rng(0).integers(0, 2**31, (1 << 24), dtype=np.int32)
    sending = threading.Thread(target=a.send, args=("launch", {}, {"x": array}))
    sending.start()
    assert np.array_equal(b.receive(30).arrays["x"], array)
    sending.join()


def test_the_other_end_gone_is_seen_at_once(pair):
    a, b = pair
    a.close()
    with pytest.raises(EOFError):
        b.receive()
    with pytest.raises(OSError):
        for _ in range(100):
            b.send("launch", {}, {"x": np.zeros(1 << 16)})


def test_a_frame_that_stops_half_way(pair):
    a, b = pair
    frame = encode("launch", {}, {"x": np.zeros(100)})
    a._socket.sendall(frame[:-1])
    with pytest.raises(TimeoutError):
        b.receive(timeout=0.05)


def test_a_frame_out_of_turn(pair):
    a, b = pair
    a.send("launch", {})
    b.receive()
    a._socket.sendall(encode("launch", {}, {}, counter=0))
    with pytest.raises(FrameError, match="number 0, needs 1"):
        b.receive()


def mutations(rng: random.Random, frame: bytes) -> bytes:
    kind = rng.randrange(5)
    at = rng.randrange(len(frame))
    if kind == 0:  # a flipped bit
        return frame[:at] + bytes([frame[at] ^ 1 << rng.randrange(8)]) + frame[at + 1 :]
    if kind == 1:
        return frame[:at]
    if kind == 2:
        return frame + rng.randbytes(rng.randint(1, 40))
    if kind == 3:
        return rng.randbytes(rng.randint(0, 200))
    n = rng.randint(1, 8)
    return frame[:at] + rng.randbytes(n) + frame[at + n :]


def test_malformed_frames_are_refused():
    """100,000 of them; and none makes the reader allocate what a wrong length promises."""
    rng = random.Random(0)
    arrays = {"rows": np.arange(7, dtype=np.int32), "flags": np.ones((2, 3), np.bool_)}
    frame = encode("launch", {"is_prefill": True, "nested": {"a": [1, None]}}, arrays)
    num_equal = 0
    tracemalloc.start()
    for _ in range(100_000):
        mutated = mutations(rng, frame)
        if mutated == frame:
            num_equal += 1
            continue
        with pytest.raises(FrameError):
            decode(mutated)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_equal < 100 and peak < 32 << 20


def with_header(text: bytes, body: bytes = b"") -> bytes:
    """A frame with a right CRC around a header that encode would not write."""
    import struct
    import zlib

    prefix = struct.pack("<4sIQIQ", b"nvLM", 2, 0, len(text), len(body))
    return prefix + struct.pack("<I", zlib.crc32(prefix + text + body)) + text + body


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'{"call": 1, "scalars": {}, "arrays": []}',
        b'{"call": "x", "scalars": [], "arrays": []}',
        b'{"call": "x", "scalars": {}, "arrays": [["a", "<i4", [1]]]}',
        b'{"call": "x", "scalars": {}, "arrays": [["a", "<i4", [-1]]]}',
        b'{"call": "x", "scalars": {}, "arrays": [["a", "O", [1]]]}',
        b'{"call": "x", "scalars": {}, "arrays": [["a", "V8", [0]]]}',
        b'{"call": "x", "scalars": {}, "arrays": [["a", "<i4", [99999999999999]]]}',
        b'{"call": "x", "scalars": {}, "arrays": [["a"]]}',
        b'{"call": "x", "scalars": {}, "arrays": 7}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_headers_that_say_nonsense(header):
    with pytest.raises(FrameError):
        decode(with_header(header))
    with pytest.raises(FrameError):
        decode(with_header(header, b"12345678"))
