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

import numpy as np
import pytest
import torch

from nanovllm import kernels
from nanovllm.config import Config, load_hf_config
from nanovllm.engine import cuda_graph, input_batch, precompile
from nanovllm.engine.batching import warm_up_batch
from nanovllm.engine.precompile import Compilation, _Compiler, start_compiling
from nanovllm.kernels import launch, sample
from nanovllm.kernels.copy_tokens import copy_tokens
from nanovllm.utils import distributed

CHECKPOINT = Path(__file__).parents[1] / "assets" / "tiny-qwen3"


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


def launches_of(num_ranks, monkeypatch) -> dict[tuple, int]:
    """How often each kernel is launched from here on, by its name and by what each kind of it is
    compiled for. With a count in place of Triton's launch: no GPU is needed."""
    driver = pytest.importorskip("triton.runtime").driver
    launches: collections.Counter[tuple] = collections.Counter()

    def count(self, *args, grid, warmup=False, **kwargs):
        launches[(self.fn.__name__.strip("_"), *compiled_for(self, args, kwargs))] += 1

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
    return launches


def compiled_for(kernel, args, kwargs) -> list[tuple]:
    """What another kernel is compiled for than for anything else, by argument."""
    parameters = inspect.signature(kernel.fn).parameters
    given = kwargs | dict(zip(parameters, args, strict=False))
    general = getattr(kernel, "kwargs", {}).get("do_not_specialize") or [
        p.name for p in getattr(kernel, "params", ()) if p.do_not_specialize
    ]

    def kind(name):
        value = given[name]
        if name not in parameters or "constexpr" in str(parameters[name].annotation):
            return value
        if isinstance(value, torch.Tensor):
            return value.dtype, name in general or value.data_ptr() % 16 == 0
        if isinstance(value, int) and name not in general:
            return value == 1, value % 16 == 0
        return type(value)

    return [(name, kind(name)) for name in sorted(given)]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_stand_in_walks_through_every_kernel_of_a_start(num_ranks, monkeypatch):
    launches = launches_of(num_ranks, monkeypatch)
    config = Config(model=str(CHECKPOINT), load_format="dummy", num_kvcache_blocks=512)
    config = replace(config, tensor_parallel_size=num_ranks)
    for hf_config in (load_hf_config(CHECKPOINT), with_experts(load_hf_config(CHECKPOINT))):
        _Compiler(config, hf_config, 1024).walk()
    names = collections.Counter()
    for (name, *_), number in launches.items():
        names[name] += number
    between_ranks = {"sum_kernel", "pick_best_kernel"}
    assert set(names) == set(all_kernels()) - (between_ranks if num_ranks == 1 else set())
    assert min(names.values()) >= 2


@pytest.mark.parametrize(
    ("shapes", "max_num_seqs", "enforce_eager"),
    [
        ("0.6B", 1, False), ("0.6B", 20, True), ("0.6B", 512, True),
        ("8B", 4, False), ("8B", 300, True), ("experts", 4, False), ("experts", 40, True),
    ],
)  # fmt: skip
def test_no_kernel_is_left_for_a_step_to_compile(shapes, max_num_seqs, enforce_eager, monkeypatch):
    """Whatever step comes, its kernels and their configurations are among those of the start."""
    launches = launches_of(1, monkeypatch)
    settings = dict(max_num_seqs=max_num_seqs, enforce_eager=enforce_eager)
    config = Config(str(CHECKPOINT), load_format="dummy", num_kvcache_blocks=512, **settings)
    runner = _Compiler(config, real_shapes(shapes), 8192)
    runner.walk()
    at_start = set(launches)
    assert len(at_start) > 20
    steps = [
        warm_up_batch(even_lens(n, min(num_seqs, max_num_seqs, n)), 256, num_cached)
        for n in NUM_TOKENS
        for num_seqs in (1, 17, 300)
        for num_cached in (0, 1, 700)
    ]
    if enforce_eager:  # else each of them is captured
        steps += [decode_batch(n, shared) for n in range(1, max_num_seqs + 1) for shared in (0, 9)]
    for n in (1, 2, 3, 8, 9, 15, 16, 17):  # what may come before steps, and after them
        copy_tokens(runner.pool, torch.tensor([[i, (i + 1) % 3, 9] for i in range(n)]).int())
        zeros = torch.zeros(min(n, max_num_seqs))
        sample.sample(
            zeros.new_zeros(len(zeros), runner.model.lm_head.vocab_size), zeros, zeros.long(),
            zeros.int(),
        )  # fmt: skip
    left = dict.fromkeys(launches.keys() - at_start, "beside steps")
    with torch.inference_mode(), runner.model.shortened():
        for batch in steps:
            runner._forward(input_batch.build(batch, runner.state, runner._work_list))
            for kernel in launches.keys() - at_start - left.keys():
                left[kernel] = batch.num_tokens, batch.num_seqs
    assert not left


NUM_TOKENS = [
    *range(1, 20), 31, 32, 33, 47, 48, 63, 64, 65, 96, 127, 128, 129, 255, 256, 257, 511, 512, 513,
    1000, 1023, 1024, 1025, 2048, 4097,
]  # fmt: skip


def even_lens(num_tokens: int, num_seqs: int) -> list[int]:
    return [(num_tokens + i) // num_seqs for i in range(num_seqs)]


def decode_batch(num_seqs: int, num_shared_blocks: int):
    """A decode of rows with 2,400 tokens, of which they share so many blocks."""
    groups = [[0, num_seqs, 0, 256 * num_shared_blocks]] if num_shared_blocks else []
    return replace(
        warm_up_batch([1] * num_seqs, 256, 2399),
        is_prefill=False,
        new_blocks=np.full(num_seqs, -1, np.int32),
        groups=np.array(groups, np.int32).reshape(-1, 4),
    )


def real_shapes(name: str):
    """The layers of a published model in the small one."""
    fields = {**vars(load_hf_config(CHECKPOINT)), "head_dim": 128, "num_hidden_layers": 2}
    sizes = {
        "0.6B": (1024, 16, 8, 3072),
        "8B": (4096, 32, 8, 12288),
        "experts": (2048, 32, 4, 6144),
    }
    names = "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"
    fields.update(zip(names, sizes[name], strict=True))
    config = types.SimpleNamespace(**fields)
    if name == "experts":
        config = with_experts(config)
        vars(config).update(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
    return config


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
