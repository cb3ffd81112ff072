"""Communication between two CPU ranks over gloo, and none at all with one rank."""

import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from nanovllm.utils import distributed


def test_one_rank_needs_no_group_and_no_port(monkeypatch):
    monkeypatch.setattr(socket, "socket", lambda *_: pytest.fail("a port was opened"))
    distributed.init(0, 1, "unused", "unused", torch.device("cpu"))
    assert not dist.is_initialized()
    assert (distributed.tp_rank(), distributed.tp_size()) == (0, 1)
    x = torch.arange(3.0)
    assert distributed.all_reduce(x) is x
    assert distributed.gather_to_rank0(x) is x
    assert distributed.min_over_ranks(7) == 7
    distributed.destroy()
    distributed.destroy()


@pytest.mark.parametrize("rank, size", [(2, 2), (-1, 2), (1, 1)])
def test_rank_outside_the_group_is_refused(rank, size):
    with pytest.raises(ValueError, match="rank: got"):
        distributed.init(rank, size, "unused", "gloo", torch.device("cpu"))
    assert not dist.is_initialized()


def talk(rank: int, init_method: str) -> None:
    distributed.init(rank, 2, init_method, "gloo", torch.device("cpu"))
    assert (distributed.tp_rank(), distributed.tp_size()) == (rank, 2)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.full((2, 3), rank + 1.0, dtype=dtype)
        assert distributed.all_reduce(x) is x and (x == 3).all()

        part = torch.full((2, 2), float(rank), dtype=dtype)
        # A view that is not contiguous, as a slice of a larger result is.
        joined = distributed.gather_to_rank0(torch.cat((part, part), 1)[:, :2])
        if rank == 0:
            assert joined.tolist() == [[0, 0, 1, 1]] * 2
        else:
            assert joined is None
        rows = distributed.gather_to_rank0(part, dim=0)
        assert (rows is None) == (rank == 1) and (rank == 1 or rows.shape == (4, 2))
    assert distributed.min_over_ranks([40, 2**40][rank]) == 40
    with pytest.raises(RuntimeError, match="second group"):
        distributed.init(rank, 2, init_method, "gloo", torch.device("cpu"))
    distributed.destroy()
    assert (distributed.tp_rank(), distributed.tp_size()) == (0, 1)


def test_two_ranks_reduce_gather_broadcast_and_agree(tmp_path):
    mp.spawn(talk, (f"file://{tmp_path}/rendezvous",), nprocs=2)
