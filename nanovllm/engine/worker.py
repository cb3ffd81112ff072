"""A worker: the process of one rank from 1 up, mirroring the calls that rank 0 sends.

    python -m nanovllm.engine.worker FOLDER CHANNEL_FD LIFELINE_FD PARENT_PID

It ends when told to, when the channel closes, and, whatever it is doing, when rank 0 is gone: the
other end of the lifeline is held by rank 0 alone.
"""

import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

logger = logging.getLogger("nanovllm")

_EXIT_ORPHANED = 70


class _Lifeline:
    """Ends this process, from a thread of its own, when rank 0 does."""

    def __init__(self, folder: str, fd: int, parent_pid: int) -> None:
        self.folder: str | None = folder  # to take along, while the ranks have not met
        self._fd, self._parent_pid = fd, parent_pid
        self.thread = threading.Thread(target=self._watch, daemon=True, name="lifeline")
        self.thread.start()

    def _watch(self) -> None:
        # A process that rank 0 has forked may hold the other end too: hence a look at the parent.
        while os.getppid() == self._parent_pid:
            if select.select([self._fd], [], [], 0.2)[0]:
                break
        logger.error("nanovllm: process %d ends, rank 0 is gone", os.getpid())
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(_EXIT_ORPHANED)


def _start(scalars: dict[str, Any], lifeline: _Lifeline) -> Any:
    """scalars: arguments of ModelRunner by name, config and checkpoint as JSON values."""
    from nanovllm.config import Config, load_hf_config
    from nanovllm.engine.model_runner import ModelRunner

    config, checkpoint = Config(**scalars.pop("config")), Path(scalars.pop("checkpoint"))
    runner = ModelRunner(config, load_hf_config(checkpoint), checkpoint, **scalars)
    lifeline.folder = None
    return runner


def _obey(frame: Any, runner: Any, lifeline: _Lifeline) -> Any:
    """Do what the channel's frame says; the rank's ModelRunner, once there is one."""
    if frame.call == "prepare":  # that this is answered says that the slow imports are done
        import nanovllm.engine.model_runner  # noqa: F401

        return None
    if frame.call == "start":
        return _start(frame.scalars, lifeline)
    assert runner is not None and frame.call == "launch", f"call {frame.call!r}"
    from nanovllm.engine.sequence import ScheduledBatch

    fields: dict[str, Any] = {**frame.scalars, **frame.arrays}
    runner.launch(ScheduledBatch(**fields))
    return runner


def main(folder: str, channel_fd: int, lifeline_fd: int, parent_pid: int) -> None:
    """A worker's life: obey frames until told to close or rank 0 is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which tells the others
    # Before the imports, which take seconds.
    lifeline = _Lifeline(folder, lifeline_fd, parent_pid)
    from nanovllm.engine.channel import Channel

    channel = Channel(socket.socket(fileno=channel_fd))
    runner = None
    try:
        while (frame := channel.receive()).call != "close":
            try:
                runner = _obey(frame, runner, lifeline)
                reply = "done", {} if runner is None else runner.facts()
            except Exception:
                reply = "error", {"traceback": traceback.format_exc()}
            channel.send(*reply)
    except (EOFError, OSError):  # rank 0 is gone, or has given this process up
        lifeline.thread.join()
    if runner is not None:
        runner.close()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
