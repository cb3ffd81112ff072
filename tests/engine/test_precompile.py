"""Compiling in parallel is an aid: it never fails a start, and waits for no child for ever."""

import os
import time

import pytest
import torch

from nanovllm.config import Config
from nanovllm.engine import precompile
from nanovllm.engine.precompile import Compilation, start_compiling


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
    Compilation([pid], done_fd, tmp_path / "new" / "marker").wait()
    assert (tmp_path / "new" / "marker").exists()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)  # reaped: no zombie is left


def test_a_child_that_hangs_is_killed_at_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(precompile, "_DEADLINE_S", 0.2)
    pid, done_fd = fork_child(lambda: time.sleep(600))
    began = time.monotonic()
    Compilation([pid], done_fd, tmp_path / "marker").wait()
    assert time.monotonic() - began < 30
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)


def test_nothing_is_forked_for_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    config = Config(model=str(tmp_path), device="cpu")
    assert start_compiling(config, None, tmp_path, 64) is None
    if not torch.cuda.is_available():
        config = Config(model=str(tmp_path))
        assert start_compiling(config, None, tmp_path, 64) is None
