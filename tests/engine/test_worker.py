"""The other ranks: the channel to them, their start and their end."""

import threading
import time

import numpy as np
import psutil
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine import kv_cache
from nanovllm.engine.channel import decode, encode
from nanovllm.engine.worker_group import WorkerGroup

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    return tiny_checkpoint(heads=4, kv_heads=2, head_dim=16, hidden=64)


@pytest.mark.parametrize("shape", [(0,), (1,), (7, 3), (2, 0), (1 << 22,)])
@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.bool_])
def test_arrays_survive_a_frame(shape, dtype):
    """2^22 int32 are 16 MiB: a step message of a long prefill outgrew a 1 MiB buffer once (R31)."""
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    call, scalars, arrays = decode(encode("run", {"is_prefill": True}, {"a": array, "b": array.T}))
    assert call == "run" and scalars == {"is_prefill": True}
    assert arrays["a"].dtype == dtype and arrays["a"].shape == shape
    assert np.array_equal(arrays["a"], array) and np.array_equal(arrays["b"], array.T)


def test_scalars_survive_a_frame():
    scalars = {"path": "näme", "none": None, "n": 2**60, "x": 0.1, "nested": {"a": [1, 2]}}
    assert decode(encode("start", scalars, {})) == ("start", scalars, {})


def worker_processes():
    """Ranks that this process has started and that still run."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "nanovllm.engine.worker" in child.cmdline()]


def test_failed_start_changes_nothing(checkpoint, monkeypatch):
    """R34: it left the default device and dtype changed and the process group up."""
    before = torch.get_default_dtype(), torch.empty(0).device, torch.is_grad_enabled()

    def fail(*args, **kwargs):
        raise RuntimeError("injected")

    monkeypatch.setattr(kv_cache, "allocate", fail)
    with pytest.raises(RuntimeError, match="injected"):
        LLM(str(checkpoint), device="cpu", tensor_parallel_size=2)
    monkeypatch.undo()
    assert (torch.get_default_dtype(), torch.empty(0).device, torch.is_grad_enabled()) == before
    assert worker_processes() == []
    with LLM(str(checkpoint), num_kvcache_blocks=8, device="cpu") as llm:
        assert llm.generate([[1]], GREEDY, use_tqdm=False)


def test_two_ranks_leave_no_process(checkpoint):
    with LLM(str(checkpoint), num_kvcache_blocks=8, device="cpu", tensor_parallel_size=2) as llm:
        assert len(worker_processes()) == 1
        for n in (1, 5, 2, 8, 3):  # R55: the first call worked, the next waited for ever
            assert len(llm.generate([[1, 2]] * n, GREEDY, use_tqdm=False)) == n
    assert worker_processes() == []


def test_closing_waits_for_the_watch_to_look_away(checkpoint, monkeypatch):
    """It hears of a worker's end when the group closes, and asks which process that was."""
    is_receiving, receive = threading.Event(), WorkerGroup._receive
    errors = []

    def receive_late(self, rank):
        is_receiving.set()
        time.sleep(0.5)
        return receive(self, rank)

    monkeypatch.setattr(threading, "excepthook", errors.append)
    llm = LLM(str(checkpoint), tensor_parallel_size=2, device="cpu", max_model_len=64)
    (worker,) = worker_processes()
    monkeypatch.setattr(WorkerGroup, "_receive", receive_late)
    worker.kill()
    assert is_receiving.wait(10)
    llm.close()
    assert not any(thread.name == "nanovllm watch" for thread in threading.enumerate())
    assert not errors
