"""WorkerGroup: the processes of ranks 1 and up, seen from rank 0.

A thread of its own, the watch, receives the workers' replies and notices what no reply tells: a
process that ended, a deadline that passed. On a fault it ends every worker at once, so that rank 0,
which may be inside a collective with one of them, gets out of it with an error and can say why.
"""

import contextlib
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.channel import Channel, Frame, FrameError
from nanovllm.engine.sequence import ScheduledBatch
from nanovllm.errors import EngineDeadError, EngineTimeoutError
from nanovllm.utils import distributed

logger = logging.getLogger("nanovllm")

_CLOSE_SECONDS = 5.0  # to leave when asked, and after SIGTERM one more
_TICK_SECONDS = 0.05
# Fields of ScheduledBatch that are not arrays, and those that only rank 0 needs.
_SCALARS = ("is_prefill", "as_decode", "all_greedy", "is_redrawn")
_NOT_SENT = ("special",)


class WorkerGroup:
    def __init__(self, config: Config, checkpoint: Path, max_model_len: int) -> None:
        """Start the processes, wait until they can meet, and let them load while rank 0 does.

        Raises EngineDeadError. Before ranks meet each can be waited for with an eye on it; while
        they do, nothing gets a rank out of waiting for one that died.
        """
        # Ranks find each other through a file in a private folder: no port to collide on.
        self._folder = tempfile.mkdtemp(prefix="nanovllm-")
        self.init_method = f"file://{self._folder}/rendezvous"
        self._config = config
        self._channels: dict[int, Channel] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._lifelines: list[int] = []
        self._replies: dict[int, Frame] = {}  # to the call that is being waited for
        self._deadline = float("inf")
        self._fault: EngineDeadError | None = None
        self._is_closing = False
        self._changed = threading.Condition()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="nanovllm watch")
        # Ranks talk on the loopback interface only, unless the user chose another.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        try:
            for rank in range(1, config.tensor_parallel_size):
                self._spawn(rank)
            if not self._processes:
                return
            self._watcher.start()
            self._send_all("prepare", lambda rank: {}, config.start_timeout)
            self.wait()
            start = {
                "config": asdict(config),
                "checkpoint": str(checkpoint),
                "max_model_len": max_model_len,
                "init_method": self.init_method,
            }
            self._send_all("start", lambda rank: {**start, "rank": rank}, config.start_timeout)
        except BaseException:
            self.close()
            raise

    def has_failed(self) -> bool:
        return self._fault is not None

    def send_batch(self, batch: ScheduledBatch) -> None:
        """Make every worker launch this batch; rank 0 launches it itself meanwhile."""
        if not self._channels:
            return
        scalars = {name: getattr(batch, name) for name in _SCALARS}
        names = batch.__dataclass_fields__.keys() - {*_SCALARS, *_NOT_SENT}
        arrays = {name: getattr(batch, name) for name in names}
        self._send_all("launch", lambda rank: scalars, self._config.step_timeout, arrays)

    def wait(self) -> dict[int, dict[str, Any]]:
        """Wait for every worker's reply: rank -> scalars. Raises EngineDeadError."""
        with self._changed:
            while self._fault is None and len(self._replies) < len(self._processes):
                self._changed.wait()
            self._deadline = float("inf")
            self.check()
            return {rank: frame.scalars for rank, frame in self._replies.items()}

    def wait_for_start(self, facts: dict[str, Any]) -> None:
        """wait(), and compare what every rank found with rank 0's facts."""
        for rank, others in self.wait().items():
            for name, value in facts.items():
                if others.get(name) != value:
                    raise ValueError(
                        f"{name}: rank 0 has {value!r}, rank {rank} has {others.get(name)!r}, needs"
                        " the same on every rank, check that all read the same files"
                    )
        shutil.rmtree(self._folder, ignore_errors=True)  # all have met

    def check(self) -> None:
        """Raise the fault, if there is one; if not, what a device has given until now is sound."""
        with self._changed:
            if self._fault is not None:
                raise self._copy_of_fault()

    def explain(self, error: BaseException) -> EngineDeadError | None:
        """After rank 0 failed in a step: why, as far as other ranks are concerned.

        Ranks that are out of step cannot go on, so this ends them. None if there are none.
        """
        if not self._processes:
            return None
        # Whoever keeps the error would keep what its frames hold, such as the group's sockets.
        traceback.clear_frames(error.__traceback__)
        # What rank 0 sees of a dead peer may come before the watch has seen it.
        with self._changed:
            self._changed.wait_for(lambda: self._fault is not None, timeout=0.5)
            if self._fault is None:
                self._fail(EngineDeadError(f"rank 0 (process {os.getpid()}) failed: {error!r}"))
            fault = self._copy_of_fault()
        distributed.abort()
        return fault

    @contextlib.contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Let Ctrl-C wait for the end of what ranks do together, so that they stay in step.

        A second one does not wait. With one rank there is no need.
        """
        is_main = threading.current_thread() is threading.main_thread()
        handler: Any = signal.getsignal(signal.SIGINT) if self._processes and is_main else None
        if not callable(handler):
            yield
            return
        held: list[Any] = []

        def hold(*args: Any) -> None:
            held.append(args)
            if len(held) > 1:
                handler(*args)

        signal.signal(signal.SIGINT, hold)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)
            if held:
                handler(*held[0])

    def ask_to_close(self) -> None:
        """Tell the workers to leave; harmless when they are gone already."""
        self._is_closing = True
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                channel.send("close", {})

    def close(self) -> None:
        """End the workers, by force after a while, and remove what they met through."""
        self.ask_to_close()
        seconds = 0.0 if self._fault is not None else _CLOSE_SECONDS
        for process in self._processes.values():
            for stop, patience in ((process.terminate, seconds), (process.kill, 1.0)):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience)
                    break
                stop()
            process.wait()
        # It may be about to say of which of them it has heard.
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join()
        for channel in self._channels.values():
            channel.close()
        for fd in self._lifelines:
            os.close(fd)
        self._channels, self._processes, self._lifelines = {}, {}, []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _spawn(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        lifeline, held = os.pipe()
        self._channels[rank] = Channel(ours)
        self._lifelines.append(held)
        fds = [theirs.fileno(), lifeline]
        with theirs:
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-m", "nanovllm.engine.worker", self._folder]
                + [str(number) for number in (*fds, os.getpid())],
                pass_fds=fds,
                env=_worker_environment(self._config),
                stdin=subprocess.DEVNULL,
            )
        os.close(lifeline)

    def _send_all(
        self,
        call: str,
        scalars: Callable[[int], dict[str, Any]],
        seconds: float,
        arrays: dict[str, Any] | None = None,
    ) -> None:
        """Make every worker do this, and expect their replies within so many seconds."""
        with self._changed:
            self.check()
            self._replies = {}
            self._deadline = time.monotonic() + seconds
        for rank, channel in self._channels.items():
            with contextlib.suppress(OSError):  # the watch says what became of it
                channel.send(call, scalars(rank), arrays)

    def _watch(self) -> None:
        """Until the group is closed or has failed."""
        ranks = {channel.fileno(): rank for rank, channel in self._channels.items()}
        while not self._is_closing and self._fault is None:
            ready, _, _ = select.select(list(ranks), [], [], _TICK_SECONDS)
            fault = None
            for fd in ready:
                fault = fault or self._receive(ranks[fd])
            late = [rank for rank in ranks.values() if rank not in self._replies]
            if fault is None and late and time.monotonic() > self._deadline:
                fault = EngineTimeoutError(
                    f"{self._name(late[0])} did not reply in time, see step_timeout, start_timeout"
                )
            if fault is not None and not self._is_closing:
                with self._changed:
                    self._fail(fault)
                distributed.abort()  # what rank 0's device is waiting for will not come

    def _receive(self, rank: int) -> EngineDeadError | None:
        """Take a rank's reply; what is wrong with it, if anything."""
        try:
            frame = self._channels[rank].receive(_CLOSE_SECONDS)
        except (EOFError, OSError) as error:
            return self._end_of(rank, error)
        except FrameError as error:
            return EngineDeadError(f"{self._name(rank)} sent {error}")
        if frame.call == "error":
            dead = self._find_dead()
            if dead is not None:  # of which this rank has heard in a collective
                return self._end_of(dead, ChildProcessError())
            return EngineDeadError(f"{self._name(rank)} failed:\n{frame.scalars.get('traceback')}")
        with self._changed:
            self._replies[rank] = frame
            self._changed.notify_all()
        return None

    def _find_dead(self) -> int | None:
        """A rank whose process has ended, or does so in a moment."""
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            for rank, process in self._processes.items():
                if process.poll() is not None:
                    return rank
            time.sleep(0.01)
        return None

    def _name(self, rank: int) -> str:
        return f"rank {rank} (process {self._processes[rank].pid})"

    def _end_of(self, rank: int, error: Exception) -> EngineDeadError:
        try:
            code = self._processes[rank].wait(1.0)
            end = f"ended with exit code {code}"
            if code < 0:
                end = f"was ended by signal {signal.Signals(-code).name}"
        except subprocess.TimeoutExpired:
            end = f"closed its channel ({error})"
        return EngineDeadError(f"{self._name(rank)} {end}")

    def _copy_of_fault(self) -> EngineDeadError:
        """To raise: the one kept here must not gather tracebacks."""
        assert self._fault is not None
        return type(self._fault)(*self._fault.args)

    def _fail(self, fault: EngineDeadError) -> None:
        """Record the first fault and end every worker; the lock is held."""
        if self._fault is None:
            self._fault = fault
            logger.error("nanovllm: %s; all other ranks are ended", str(fault).splitlines()[0])
            for process in self._processes.values():
                process.kill()
        self._changed.notify_all()


def _worker_environment(config: Config) -> dict[str, str]:
    env = dict(os.environ)
    cores = os.cpu_count() or 1
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // config.tensor_parallel_size)))
    # The package may have been found through sys.path alone.
    package_root = str(Path(__file__).parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, env.get("PYTHONPATH")]))
    return env
