"""Communication between two CPU ranks over gloo, and none at all with one rank."""

import socket
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from nanovllm.layers import collectives
from nanovllm.utils import distributed
from nanovllm.utils.peer_memory import PeerMemory


def test_one_rank_needs_no_group_and_no_port(monkeypatch):
    monkeypatch.setattr(socket, "socket", lambda *_: pytest.fail("a port was opened"))
    distributed.init(0, 1, "unused", torch.device("cpu"), 64)
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
        distributed.init(rank, size, "unused", torch.device("cpu"), 64)
    assert not dist.is_initialized()


def talk(rank: int, init_method: str) -> None:
    distributed.init(rank, 2, init_method, torch.device("cpu"), 64)
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
        distributed.init(rank, 2, init_method, torch.device("cpu"), 64)
    distributed.destroy()
    assert (distributed.tp_rank(), distributed.tp_size()) == (0, 1)


def test_two_ranks_reduce_gather_broadcast_and_agree(tmp_path):
    mp.spawn(talk, (f"file://{tmp_path}/rendezvous",), nprocs=2)


@pytest.fixture
def group_of_one(tmp_path):
    """A group of torch.distributed that is not ours."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/it", world_size=1, rank=0)
    yield
    dist.destroy_process_group()


def test_another_group_of_this_process_is_named(group_of_one):
    with pytest.raises(RuntimeError, match="has a group of torch.distributed, .* new process"):
        distributed.init(0, 2, "unused", torch.device("cpu"), 64)


def peer_memory(size):
    parts = torch.empty(0, dtype=torch.uint8), torch.empty(size, dtype=torch.int64)
    return PeerMemory(0, size, *parts, torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("size", "peers", "row_bytes", "needs_nccl"),
    [
        (2, peer_memory(2), 2048, False),
        (2, peer_memory(2), 40, True),  # rows that no kernel reads at once
        (4, peer_memory(4), 2048, True),  # sums too large to read all that the others have
        (2, None, 2048, True),
    ],
)
def test_nccl_only_where_shared_memory_does_not_serve(
    size, peers, row_bytes, needs_nccl, monkeypatch
):
    device = SimpleNamespace(type="cuda")
    groups = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: groups.append(backend))
    monkeypatch.setattr(dist, "new_group", lambda backend: groups.append(backend) or backend)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: None)
    monkeypatch.setattr(torch, "zeros", lambda n, device: None)
    monkeypatch.setattr(distributed, "share_memory", lambda *_: peers)
    monkeypatch.setattr(distributed, "_group", distributed._ALONE)
    distributed.init(0, size, "unused", device, row_bytes)
    assert groups == ["gloo", "nccl"][: 1 + needs_nccl]
    assert distributed._group.nccl == ("nccl" if needs_nccl else None)


def test_a_link_that_is_broken_leaves_no_group_behind(tmp_path, monkeypatch):
    def init_alone(backend, init_method, world_size, rank, init=dist.init_process_group):
        init(backend, init_method=init_method, world_size=1, rank=0)

    monkeypatch.setattr(dist, "init_process_group", init_alone)
    monkeypatch.setattr(distributed, "share_memory", lambda *_: None)
    monkeypatch.setattr(dist, "new_group", Mock(side_effect=RuntimeError("no link")))
    for i in range(2):
        with pytest.raises(RuntimeError, match="no link"):
            distributed.init(0, 2, f"file://{tmp_path}/{i}", SimpleNamespace(type="cuda"), 64)
        assert not dist.is_initialized() and distributed.tp_size() == 1


def test_memory_is_shared_through_the_folder_where_ranks_meet(tmp_path, monkeypatch):
    share = Mock(return_value=peer_memory(2))
    is_hopeless = Mock(return_value=False)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(distributed, "share_memory", share)
    monkeypatch.setattr(distributed, "_group", distributed._ALONE)
    device = SimpleNamespace(type="cuda")
    distributed.init(1, 2, f"file://{tmp_path}/rendezvous", device, 64, is_hopeless)
    assert distributed.peer_memory() is share.return_value
    share.assert_called_once_with(1, 2, device, tmp_path, distributed.min_over_ranks, is_hopeless)


def test_no_rows_need_no_rank(monkeypatch):
    """As where a chunk of prompts ends with none of their last tokens."""
    monkeypatch.setattr(distributed, "_group", distributed._Group(0, 2, peers=peer_memory(2)))
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: pytest.fail("ranks were asked"))
    for width in (64, 3):
        empty = torch.empty(0, width)
        assert collectives.sum_rows(lambda rows, out: None, empty).shape == (0, width)
        normed, stream = collectives.sum_add_norm(
            lambda rows, out: None, empty, torch.ones(width), 1e-6
        )
        assert normed.shape == stream.shape == (0, width)
        assert collectives.gather_columns(empty).shape == (0, 2 * width)
