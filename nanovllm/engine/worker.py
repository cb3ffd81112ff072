"""WorkerGroup: the processes of ranks 1 and up, and the channel that makes them mirror rank 0.

Each worker is a fresh interpreter holding one end of a socket pair. The socket has no name, no
port and no size limit, and closes with either process. A frame is a method name and arrays, so
nothing is pickled:

    | header length: uint32 | header: JSON {"call", "scalars", "arrays": [[name, dtype, shape]]} |
    | the arrays' bytes, end to end |

Every call is acknowledged, with the worker's traceback when it failed.
"""

import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nanovllm.config import Config, load_hf_config
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.sequence import ScheduledBatch

_CLOSE_TIMEOUT_S = 10.0
# Fields of ScheduledBatch that are not arrays, and those that only rank 0 needs.
_SCALARS = ("is_prefill", "all_greedy", "is_redrawn")
_NOT_SENT = ("special",)


class WorkerGroup:
    """Ranks 1 and up of one engine, seen from rank 0."""

    def __init__(self, config: Config, checkpoint: Path, max_model_len: int) -> None:
        """Start the processes; they load while rank 0 does, and acknowledge that like any call."""
        # Ranks find each other through a file in a private folder: no port to collide on.
        self._folder = tempfile.mkdtemp(prefix="nanovllm-")
        self.init_method = f"file://{self._folder}/rendezvous"
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        # Ranks talk on the loopback interface only, unless the user chose another.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        for rank in range(1, config.tensor_parallel_size):
            ours, theirs = socket.socketpair()
            with theirs:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "nanovllm.engine.worker", str(theirs.fileno())],
                        pass_fds=[theirs.fileno()],
                        env=_worker_environment(config),
                        stdin=subprocess.DEVNULL,
                    )
                )
            connection = Connection(ours.detach())
            self._connections.append(connection)
            scalars = {
                "config": asdict(config),
                "checkpoint": str(checkpoint),
                "max_model_len": max_model_len,
                "rank": rank,
                "init_method": self.init_method,
            }
            connection.send_bytes(encode("start", scalars, {}))

    def send_batch(self, batch: ScheduledBatch) -> None:
        """Make every worker launch this batch; rank 0 launches it itself meanwhile."""
        arrays = {
            name: getattr(batch, name)
            for name in ScheduledBatch.__dataclass_fields__
            if name not in _SCALARS + _NOT_SENT
        }
        frame = encode("launch", {name: getattr(batch, name) for name in _SCALARS}, arrays)
        for connection in self._connections:
            connection.send_bytes(frame)

    def wait(self) -> None:
        """Wait for each worker's acknowledgement; RuntimeError with its traceback if one failed."""
        for rank, connection in enumerate(self._connections, 1):
            try:
                call, scalars, _ = decode(connection.recv_bytes())
            except (EOFError, OSError) as error:
                code = self._processes[rank - 1].poll()
                raise RuntimeError(f"rank {rank} is gone (exit code {code})") from error
            if call == "error":
                raise RuntimeError(f"rank {rank} failed:\n{scalars['traceback']}")

    def ask_to_close(self) -> None:
        """Tell the workers to leave; harmless when they are gone already."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(encode("close", {}, {}))
            connection.close()
        self._connections = []

    def close(self) -> None:
        """End the workers, by force after a while, and remove what they met through."""
        self.ask_to_close()
        for process in self._processes:
            try:
                process.wait(_CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes = []
        shutil.rmtree(self._folder, ignore_errors=True)


def encode(call: str, scalars: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> bytes:
    """One frame; scalars must be JSON values, arrays of any dtype and shape."""
    layout = [[name, a.dtype.str, a.shape] for name, a in arrays.items()]
    header = json.dumps({"call": call, "scalars": scalars, "arrays": layout}).encode()
    parts = [np.ascontiguousarray(a).tobytes() for a in arrays.values()]
    return b"".join([struct.pack("<I", len(header)), header, *parts])


def decode(frame: bytes) -> tuple[str, dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """The call, scalars and arrays of a frame; the arrays are read-only views of it."""
    (size,) = struct.unpack_from("<I", frame)
    header = json.loads(frame[4 : 4 + size])
    arrays, offset = {}, 4 + size
    for name, dtype, shape in header["arrays"]:
        count = int(np.prod(shape))
        array = np.frombuffer(frame, dtype, count, offset)
        arrays[name] = array.reshape(shape)
        offset += array.nbytes
    return header["call"], header["scalars"], arrays


def _worker_environment(config: Config) -> dict[str, str]:
    env = dict(os.environ)
    cores = os.cpu_count() or 1
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // config.tensor_parallel_size)))
    # The package may have been found through sys.path alone.
    package_root = str(Path(__file__).parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, env.get("PYTHONPATH")]))
    return env


def _frames(connection: Connection) -> Iterator[bytes]:
    """Frames until rank 0 closes its end or dies."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            yield connection.recv_bytes()


def main(fd: int) -> None:
    """A worker's life: obey frames until told to close or rank 0 is gone."""
    connection = Connection(fd)
    runner: ModelRunner | None = None
    for frame in _frames(connection):
        call, scalars, arrays = decode(frame)
        if call == "close":
            break
        try:
            if call == "start":
                checkpoint = Path(scalars["checkpoint"])
                runner = ModelRunner(
                    Config(**scalars["config"]),
                    load_hf_config(checkpoint),
                    checkpoint,
                    scalars["max_model_len"],
                    scalars["rank"],
                    scalars["init_method"],
                )
            else:
                assert runner is not None, f"call {call!r} before start"
                fields: dict[str, Any] = {**scalars, **arrays}
                runner.launch(ScheduledBatch(**fields))
            reply = encode("done", {}, {})
        except Exception:
            reply = encode("error", {"traceback": traceback.format_exc()}, {})
        connection.send_bytes(reply)
    if runner is not None:
        runner.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
