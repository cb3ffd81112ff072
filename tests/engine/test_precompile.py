"""Compiling in parallel is an aid: it never fails a start, and waits for no child for ever."""

import collections
import importlib
import inspect
import os
import pkgutil
import re
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanovllm import kernels
from nanovllm.config import Config, load_hf_config
from nanovllm.engine import cuda_graph, precompile
from nanovllm.engine.precompile import Compilation, _Compiler, start_compiling
from nanovllm.kernels import launch, sample
from nanovllm.utils import distributed


def fork_child(body) -> tuple[int, int]:
    """A child that runs body and ends; its pid and a descriptor that ends with it."""
    done_fd, child_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(done_fd)
        body()
        os._exit(0)
    os.close(child_fd)
    return pid, done_fd


def test_wait_returns_when_the_children_have_ended(tmp_path):
    pid, done_fd = fork_child(lambda: None)
    Compilation([pid], done_fd, tmp_path / "new" / "marker", tmp_path / "claims").wait()
    assert (tmp_path / "new" / "marker").exists()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)  # reaped: no zombie is left


def test_a_child_that_hangs_is_killed_at_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(precompile, "_DEADLINE_S", 0.2)
    pid, done_fd = fork_child(lambda: time.sleep(600))
    began = time.monotonic()
    Compilation([pid], done_fd, tmp_path / "marker", tmp_path / "claims").wait()
    assert time.monotonic() - began < 30
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)


def test_nothing_is_forked_for_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    config = Config(model=str(tmp_path), device="cpu")
    assert start_compiling(config, None, 64) is None
    if not torch.cuda.is_available():
        config = Config(model=str(tmp_path))
        assert start_compiling(config, None, 64) is None


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_stand_in_walks_through_every_kernel_of_a_start(num_ranks, monkeypatch):
    """With a count in place of Triton's launch: no GPU is needed."""
    driver = pytest.importorskip("triton.runtime").driver
    launches: collections.Counter[str] = collections.Counter()

    def count(self, *args, grid, **kwargs):
        launches[self.fn.__name__.strip("_")] += 1

    # Kernels are interpreted in this process, or else compiled.
    monkeypatch.setattr(type(sample._draw_kernel), "run", count)
    monkeypatch.setattr(driver, "_active", types.SimpleNamespace())  # there is none here
    facts = launch.Gpu(pdl=True)
    monkeypatch.setattr(launch, "gpu", lambda device: facts)
    for module, name in ((launch, "use_triton"), (cuda_graph, "capture")):
        monkeypatch.setattr(module, name, getattr(module, name))  # restored afterwards
    monkeypatch.setattr(torch, "mm", torch.mm)
    for name in ("linear", "embedding"):
        monkeypatch.setattr(torch.nn.functional, name, getattr(torch.nn.functional, name))
    for name in ("_group", "all_reduce", "min_over_ranks"):
        monkeypatch.setattr(distributed, name, getattr(distributed, name))
    precompile._compute_nothing(num_ranks)
    checkpoint = Path(__file__).parents[1] / "assets" / "tiny-qwen3"
    config = Config(model=str(checkpoint), load_format="dummy", num_kvcache_blocks=512)
    config = replace(config, tensor_parallel_size=num_ranks)
    for hf_config in (load_hf_config(checkpoint), with_experts(load_hf_config(checkpoint))):
        _Compiler(config, hf_config, 1024).walk()
    between_ranks = {"sum_kernel", "pick_best_kernel"}
    assert set(launches) == set(all_kernels()) - (between_ranks if num_ranks == 1 else set())
    assert min(launches.values()) >= 2


def with_experts(hf_config):
    """The same model with a mixture of experts in each layer."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    others = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    fields = {**vars(hf_config), **experts, **others}
    fields.update(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe")
    return types.SimpleNamespace(**fields)


def all_kernels() -> list[str]:
    """Names of the functions that some module of nanovllm.kernels launches."""
    names = []
    for module in pkgutil.iter_modules(kernels.__path__, "nanovllm.kernels."):
        source = inspect.getsource(importlib.import_module(module.name))
        names += re.findall(r"_(\w+_kernel)\[", source)
    return names
