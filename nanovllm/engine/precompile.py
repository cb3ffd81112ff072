"""Compile the Triton kernels of a model in several processes at once, when their cache is empty.

A first start needs some forty kernels, each about a second of one core's work. Forked children run
a one-layer stand-in of the model through the steps that need different kernels; what they compile
lands in Triton's cache on disk, where the parent finds it. It is an aid only: whatever goes wrong
in a child costs nothing but the time the parent then takes itself.
"""

import copy
import hashlib
import json
import logging
import os
import select
import signal
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import nanovllm
from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner, warm_up_batch
from nanovllm.kernels.launch import missing_triton

logger = logging.getLogger("nanovllm")

_MAX_CHILDREN = 14
_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Compilation:
    """Children at work."""

    pids: list[int]
    done_fd: int  # its other end is held by every child, so it ends when all have
    marker: Path  # exists once this was tried for this model and these versions

    def wait(self) -> None:
        """Return when all children have ended, killing those that take too long."""
        ready, _, _ = select.select([self.done_fd], [], [], _DEADLINE_S)
        for pid in self.pids:
            if not ready:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(self.done_fd)
        # After a failure too: it would only fail, and delay, again.
        self.marker.parent.mkdir(parents=True, exist_ok=True)
        self.marker.touch()


def start_compiling(
    config: Config, hf_config: Any, checkpoint: Path, max_model_len: int
) -> Compilation | None:
    """Fork the children, or None where there is nothing to gain or a fork would be unsafe.

    Call it before this process touches the GPU: a child cannot use a CUDA that its parent has
    initialised.
    """
    num_children = min((os.cpu_count() or 1) - 1, _MAX_CHILDREN)
    if (
        config.device == "cpu"
        or config.tensor_parallel_size > 1
        or num_children < 4
        or missing_triton is not None
        or not hasattr(os, "fork")
        or torch.cuda.is_initialized()
        or torch.cuda.device_count() == 0
    ):
        return None
    marker = _marker(config, hf_config, max_model_len)
    if marker.exists():
        return None
    logger.info("compiling kernels for this model, once, in %d processes", num_children)
    done_fd, child_fd = os.pipe()
    pids = []
    for index in range(num_children):
        pid = os.fork()
        if pid == 0:
            # Never return into the caller's stack, whatever happens.
            try:
                os.close(done_fd)
                _compile_share(config, hf_config, checkpoint, max_model_len, index, num_children)
            finally:
                os._exit(0)
        pids.append(pid)
    os.close(child_fd)
    return Compilation(pids, done_fd, marker)


class _Compiler(ModelRunner):
    """A runner of one layer that compiles only what it is asked to."""

    def _compile_prefills(self) -> None:
        pass

    @torch.inference_mode()
    def compile(self, index: int, num_children: int) -> None:
        """Run every num_children-th of the steps that differ in their kernels."""
        # Configurations change at powers of two of the batch (kernels/small_linear.py and
        # paged_attention.py).
        sizes = {min(1 << i, self.num_rows) for i in range(self.num_rows.bit_length() + 1)}
        tasks: list[tuple[int, int | None]] = [(size, None) for size in sorted(sizes)]
        tasks += [(min(n, self.num_rows), cached) for n in (2, 65) for cached in (0, 1)]
        for size, num_cached in tasks[index::num_children]:
            if num_cached is None:
                padding = torch.full((2, -(-size // 16) * 16), -1, dtype=torch.int32)
                rows, new_blocks = padding.to(self.device)[:, :size].unbind()
                self._captured_step(rows, new_blocks)
            else:
                lens = [min(16, self.max_model_len - 1)] * size
                batch = warm_up_batch(lens, self.config.kvcache_block_size, num_cached)
                self._forward(self._build(batch))
        torch.cuda.synchronize()


def _compile_share(
    config: Config,
    hf_config: Any,
    checkpoint: Path,
    max_model_len: int,
    index: int,
    num_children: int,
) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    torch.set_num_threads(1)  # OpenMP's threads did not survive the fork
    stand_in = copy.copy(hf_config)
    stand_in.num_hidden_layers = 1
    config = replace(config, load_format="dummy", num_kvcache_blocks=2, enforce_eager=True)
    compiler = _Compiler(config, stand_in, checkpoint, max_model_len, 0, "")
    compiler.compile(index, num_children)


def _marker(config: Config, hf_config: Any, max_model_len: int) -> Path:
    import triton

    settings = {**asdict(config), "model": "", "seed": 0, "max_model_len": max_model_len}
    facts = [nanovllm.__version__, triton.__version__, torch.__version__, settings]
    facts += [hf_config.to_dict()]
    digest = hashlib.sha256(json.dumps(facts, default=str, sort_keys=True).encode()).hexdigest()
    folder = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return Path(folder) / f"nanovllm-{digest[:32]}"
