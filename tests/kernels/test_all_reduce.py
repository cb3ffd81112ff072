"""Sums over ranks and the best of their draws, each rank played by memory of this process."""

from contextlib import contextmanager

import pytest
import torch
from cases import POISON, assert_error_at_most_twice_torch, to_float

from nanovllm.kernels import all_reduce as op
from nanovllm.kernels import launch
from nanovllm.utils.peer_memory import MAX_MEETINGS, MAX_PAIRS, PAIRS_AT, PeerMemory

CASES = [(1, 1, 80), (1, 17, 192), (2, 15, 1024), (3, 5, 64)]  # peers, rows, columns
GPU_CASES = [
    *[(1, 1, 1024), (1, 7, 4096), (1, 265, 1024), (1, 512, 2560), (1, 1030, 1024), (1, 1100, 3072)],
    *[(1, 4096, 1024), (3, 257, 80), (7, 17, 1024)],
]


def make_ranks(size, device):
    """Each rank's view of the same memory. Every address is one that all of them can use."""
    memory = [torch.zeros(PeerMemory.num_bytes(), dtype=torch.uint8) for _ in range(size)]
    memory = [m.to(device) for m in memory]
    addresses = torch.tensor([m.data_ptr() for m in memory], device=device)
    abort = torch.zeros(1, dtype=torch.int32, pin_memory=device == "cuda")
    return [PeerMemory(rank, size, m, addresses, abort) for rank, m in enumerate(memory)]


def flags(peers):
    count = MAX_MEETINGS * peers.size
    return peers.memory[: 4 * count].view(torch.int32).view(MAX_MEETINGS, peers.size)


@contextmanager
def others_have_come(ranks, me, num_places=1):
    """As if the other ranks were already waiting for `me`, which comes once to this many places."""
    before = [flags(peers).clone() for peers in ranks]
    for peer in range(len(ranks)):
        if peer != me:
            flags(ranks[me])[:, peer] = before[me][:, me] + 1
    yield
    for peers, old in zip(ranks, before, strict=True):
        grown = flags(peers)[:, me] - old[:, me]
        assert grown[:num_places].eq(1).all() and not grown[num_places:].any()


def check_sum(num_peers, num_rows, k, dtype, device):
    ranks = make_ranks(num_peers + 1, device)
    parts = torch.randn(len(ranks), num_rows, k, device=device).to(dtype)
    residual, weight = torch.randn(num_rows, k, device=device).to(dtype), torch.rand(k) + 0.5
    weight = weight.to(device, dtype)
    like = torch.empty(num_rows, k, dtype=dtype, device=device)
    exact = op.sum_add_rms_norm_ref(*to_float([parts, residual, weight]), 1e-6)
    plain = op.sum_add_rms_norm_ref(parts, residual, weight, 1e-6)
    tiles = num_rows if num_rows < 1024 or k > 2048 else -(-num_rows // 4)
    num_places = min(tiles, 2 * launch.gpu(like.device).num_sms)
    results = []
    for turn in range(2):
        slots = [peers.next_slot(like) for peers in ranks]
        assert len({slot.offset for slot in slots}) == 1
        for slot, part in zip(slots, parts, strict=True):
            slot.rows.copy_(part)
        for me, peers in enumerate(ranks):
            normed, total, plain_sum = (torch.full_like(residual, POISON) for _ in range(3))
            with others_have_come(ranks, me, num_places):
                op.sum_add_rms_norm(peers, slots[me], residual, weight, 1e-6, normed, total)
            assert_error_at_most_twice_torch(normed, plain[0], exact[0], ("normed", turn))
            assert_error_at_most_twice_torch(total, plain[1], exact[1], ("total", turn))
            results.append((normed, total))
            with others_have_come(ranks, me, num_places):
                op.sum_over_ranks(peers, slots[me], plain_sum)
            assert torch.equal(plain_sum, op.sum_ref(parts))
    for normed, total in results:  # every rank goes on with the same bits
        assert torch.equal(normed, results[0][0]) and torch.equal(total, results[0][1])


def check_pick(size, n, device):
    ranks = make_ranks(size, device)
    values = torch.randn(size, n, device=device)
    values[:, : n // 4] = 1.5  # equal everywhere: the first rank's counts
    values[0, n // 2] = float("inf")
    values[:, -1] = -float("inf")
    tokens = torch.arange(size * n, device=device).view(size, n)
    tokens[:, -1] = -1
    expected = op.pick_best_ref(values, tokens)
    for rank, peers in enumerate(ranks):
        pairs = peers.memory[PAIRS_AT : PAIRS_AT + 8 * MAX_PAIRS].view(2, -1)
        pairs[0].view(torch.float32)[:n] = values[rank]
        pairs[1].view(torch.int32)[:n] = tokens[rank].int()
    for me, peers in enumerate(ranks):
        peers.memory[PAIRS_AT : PAIRS_AT + 8 * MAX_PAIRS].fill_(255)  # it brings its own
        with others_have_come(ranks, me, -(-n // 128)):
            picked = op.pick_best(peers, values[me], tokens[me])
        assert torch.equal(picked, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sum_matches_reference(case, dtype):
    check_sum(*case, dtype, "cpu")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("n", [1, 17, 130])
def test_pick_matches_reference(size, n):
    check_pick(size, n, "cpu")


def test_counts_wrap_around():
    ranks = make_ranks(2, "cpu")
    for peers in ranks:
        flags(peers).fill_(2**31 - 1)
    for _ in range(3):
        flags(ranks[0])[0, 1] += 1  # the peer comes
        row = torch.zeros(1, 64)
        op.sum_over_ranks(ranks[0], ranks[0].next_slot(row), row)
    assert flags(ranks[1])[0, 0] == flags(ranks[0])[0, 0] == -(2**31) + 2


def test_who_is_told_to_gives_up_waiting():
    ranks = make_ranks(2, "cpu")
    ranks[0].abort.fill_(1)
    row = torch.zeros(1, 64)
    op.sum_over_ranks(ranks[0], ranks[0].next_slot(row), row)  # nobody else comes


def test_slots_take_turns_and_have_an_end():
    two, three = make_ranks(2, "cpu")[0], make_ranks(3, "cpu")[0]
    like = torch.zeros(2, 32)
    slots = [two.next_slot(like) for _ in range(4)]
    assert slots[0].offset == slots[2].offset != slots[1].offset == slots[3].offset
    slots[0].rows.fill_(1)
    assert not slots[1].rows.any() and slots[2].rows.all()
    assert two.rows_of_a_slot(2048) == three.rows_of_a_slot(2048) == 4096
    assert three.max_rows(2048) == 2048 and two.max_rows(2048) > 2**31
    assert two.max_rows(2050) == three.max_rows(2050) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_sum_matches_reference_on_gpu(case):
    check_sum(*case, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("n", [1, 129, 512])
def test_pick_matches_reference_on_gpu(size, n):
    check_pick(size, n, "cuda")


@pytest.mark.gpu
def test_ranks_that_run_at_the_same_time_meet():
    """Two streams of one GPU as two ranks, as many sums in a row as a long run has; each sum's
    addends depend on the sum before, so that a slot overwritten too early shows."""
    ranks, shape = make_ranks(2, "cuda"), (33, 1024)
    streams = [torch.cuda.Stream() for _ in ranks]
    start = torch.randn(shape, device="cuda").bfloat16()
    residual, weight = torch.zeros_like(start), torch.ones(1024, device="cuda").bfloat16()
    normed = [start.clone() for _ in ranks]
    totals = [torch.empty_like(start) for _ in ranks]
    torch.cuda.synchronize()
    for turn in range(600):
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                slot = ranks[rank].next_slot(start)
                torch.mul(normed[rank], rank + 1 + turn % 3, out=slot.rows)
                op.sum_add_rms_norm(
                    ranks[rank], slot, residual, weight, 1e-6, normed[rank], totals[rank]
                )
    torch.cuda.synchronize()
    expected = start
    for turn in range(600):
        parts = torch.stack([expected * (rank + 1 + turn % 3) for rank in range(2)])
        expected, _ = op.sum_add_rms_norm_ref(parts, residual, weight, 1e-6)
    assert torch.equal(*normed)
    torch.testing.assert_close(normed[0].float(), expected.float(), atol=0.05, rtol=0.05)
