"""Compile the Triton kernels of a model in several processes at once, when their cache is empty.

A first start needs some fifty kernels, each about a second of one core's work. Forked children run
a two-layer stand-in of the model through all that a start runs: kernels are compiled and not
launched, each by the child that first claims it. What they compile lands in Triton's cache on disk,
where the parent finds it. It is an aid only: whatever goes wrong in a child costs nothing but the
time the parent then takes itself.
"""

import copy
import hashlib
import importlib.util
import json
import logging
import os
import select
import shutil
import signal
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import nanovllm
from nanovllm.attention.base import AttentionBackend
from nanovllm.attention.triton_attn import TritonBackend
from nanovllm.config import Config
from nanovllm.engine import cuda_graph
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.placement import select_dtype
from nanovllm.kernels import launch
from nanovllm.utils import distributed
from nanovllm.utils.peer_memory import PeerMemory

logger = logging.getLogger("nanovllm")

_MAX_CHILDREN = 14
_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Compilation:
    """Children at work."""

    pids: list[int]
    done_fd: int  # its other end is held by every child, so it ends when all have
    marker: Path  # exists once this was tried for this model and these versions
    claims: Path  # folder of empty files, one for each kernel that a child took on

    def wait(self) -> None:
        """Return when all children have ended, killing those that take too long."""
        ready, _, _ = select.select([self.done_fd], [], [], _DEADLINE_S)
        for pid in self.pids:
            if not ready:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(self.done_fd)
        shutil.rmtree(self.claims, ignore_errors=True)
        # After a failure too: it would only fail, and delay, again.
        self.marker.parent.mkdir(parents=True, exist_ok=True)
        self.marker.touch()


def start_compiling(config: Config, hf_config: Any, max_model_len: int) -> Compilation | None:
    """Fork the children, or None where there is nothing to gain or a fork would be unsafe.

    Call it before this process touches the GPU: a child cannot use a CUDA that its parent has
    initialised.
    """
    num_children = min((os.cpu_count() or 1) - 1, _MAX_CHILDREN)
    if (
        config.device == "cpu"
        or num_children < 4
        or launch.missing_triton is not None
        or importlib.util.find_spec("triton.knobs") is None
        or not hasattr(os, "fork")
        or torch.cuda.is_initialized()
        or torch.cuda.device_count() == 0
    ):
        return None
    marker = _marker(config, hf_config, max_model_len)
    if marker.exists():
        return None
    logger.info("compiling kernels for this model, once, in %d processes", num_children)
    claims = Path(tempfile.mkdtemp(prefix="nanovllm-compile-"))
    with suppress(ImportError, AttributeError):  # a hash of all of Triton: once, not in each child
        importlib.import_module("triton.runtime.cache").triton_key()
    done_fd, child_fd = os.pipe()
    pids = []
    for _ in range(num_children):
        pid = os.fork()
        if pid == 0:
            # Never return into the caller's stack, whatever happens.
            try:
                os.close(done_fd)
                _compile_share(config, hf_config, max_model_len, claims)
            finally:
                os._exit(0)
        pids.append(pid)
    os.close(child_fd)
    return Compilation(pids, done_fd, marker, claims)


class _Compiler(ModelRunner):
    """A runner whose tensors lie in memory that nobody reads or writes.

    Of torch's operations only those remain that cost little and look at no value.
    """

    def __init__(self, config: Config, hf_config: Any, max_model_len: int) -> None:
        self.config, self.max_model_len = config, max_model_len
        self.device = torch.device("cpu")
        self.dtype = select_dtype(config, hf_config, torch.device("cuda"))
        self._start(hf_config, Path())

    def walk(self) -> None:
        """Run all that a start on a GPU runs."""
        self._warm_up()
        self._compile_prefills()
        self._capture_graphs()

    def _load_model(self, hf_config: Any, checkpoint: Path) -> torch.nn.Module:
        return self._make_model(hf_config)

    def _select_backend(self, head_dim: int) -> tuple[AttentionBackend, str]:
        return TritonBackend(), ""  # the others have nothing to compile


def _compute_nothing(num_ranks: int) -> None:
    """Let kernels take the CPU's tensors for the GPU's, and what is no kernel return at once.

    num_ranks: of which this process is to seem the first.
    """
    from triton.runtime import driver

    facts = launch.gpu(torch.device("cuda", 0))
    replacements: list[tuple[Any, str, Any]] = [
        # Asking for the real stream would make each child wait for a context on the GPU.
        (driver.active, "get_current_stream", lambda device: 0),
        (launch, "gpu", lambda device: facts),
        (launch, "use_triton", lambda tensor: True),
        (cuda_graph, "capture", lambda step, rehearsal, pool: (None, step())),
        (F, "linear", lambda x, weight, bias=None: x.new_empty((*x.shape[:-1], len(weight)))),
        (torch, "mm", lambda x, weight, out: out),
        (F, "embedding", lambda ids, weight: weight.new_empty((*ids.shape, weight.size(1)))),
    ]
    if num_ranks > 1:
        replacements += [
            (distributed, "_group", _group_of_nobody(num_ranks)),
            (distributed, "all_reduce", lambda tensor: tensor),
            (distributed, "min_over_ranks", lambda value: value),
        ]
    for owner, name, function in replacements:
        setattr(owner, name, function)


def _group_of_nobody(num_ranks: int) -> Any:
    memory = torch.empty(PeerMemory.num_bytes(), dtype=torch.uint8)
    addresses = torch.empty(num_ranks, dtype=torch.int64)
    abort = torch.empty(1, dtype=torch.int32)
    peers = PeerMemory(0, num_ranks, memory, addresses, abort)
    return distributed._Group(0, num_ranks, torch.device("cpu"), peers)


def _compile_share(config: Config, hf_config: Any, max_model_len: int, claims: Path) -> None:
    """What a child does: walk through a start's kernels and compile those it is first to claim."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    torch.set_num_threads(1)  # OpenMP's threads did not survive the fork
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    done: set[int] = set()

    def is_claimed(*, key: object, fn: Any, **_: object) -> bool:
        """Triton's hook before a compilation; True makes it skip this one."""
        name = hashlib.sha256(f"{fn.module}.{fn.name} {key}".encode()).hexdigest()
        try:
            os.close(os.open(claims / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return True
        return False

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, warmup=True, **kwargs)
        if kernel is not None and id(kernel) not in done:
            done.add(id(kernel))
            driver.active.launcher_cls(kernel.src, kernel.metadata)  # cached on disk too

    run = JITFunction.run
    JITFunction.run = compile_only
    knobs.runtime.jit_cache_hook = is_claimed
    _compute_nothing(config.tensor_parallel_size)
    stand_in = copy.copy(hf_config)
    stand_in.num_hidden_layers = 2  # the last one goes on with fewer rows than the others
    config = replace(config, load_format="dummy", num_kvcache_blocks=config.max_num_seqs)
    _Compiler(config, stand_in, max_model_len).walk()


def _marker(config: Config, hf_config: Any, max_model_len: int) -> Path:
    import triton

    settings = {**asdict(config), "model": "", "seed": 0, "max_model_len": max_model_len}
    facts = [nanovllm.__version__, triton.__version__, torch.__version__, settings, vars(hf_config)]
    digest = hashlib.sha256(json.dumps(facts, default=str, sort_keys=True).encode()).hexdigest()
    folder = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return Path(folder) / f"nanovllm-{digest[:32]}"
