"""Policy "prefix": sharers follow each other, nobody starves, and no token changes."""

import random

import pytest
from test_scheduler import add, run, update

from nanovllm.engine import scheduler as scheduler_module
from nanovllm.engine.prefix_order import order_by_prefix
from nanovllm.engine.scheduler import Scheduler


def make(num_blocks=64, max_num_seqs=4, policy="prefix"):
    return Scheduler(max_num_seqs, 64, 64, 4, num_blocks, [0], policy)


def test_sharers_of_more_blocks_stand_closer():
    names = ["a1", "b1", "a2", "c1", "b2", "a1'"]
    chains = [[1, 2, 3], [7, 8], [1, 5], [9], [7, 8], [1, 2, 4]]
    ordered = order_by_prefix(names, chains, lambda block_hash: False)
    assert ordered == ["a1", "a1'", "a2", "b1", "b2", "c1"]


def test_readers_of_what_is_cached_go_first_and_short_prompts_keep_their_place():
    names, chains = ["short", "cold", "hot", "short too"], [[], [1], [2], []]
    ordered = order_by_prefix(names, chains, {2}.__contains__)
    assert ordered == ["hot", "short", "short too", "cold"]


def interleaved(scheduler, num_documents, num_questions):
    return [
        add(scheduler, [*range(100 * d, 100 * d + 16), 1000 + q], max_tokens=2)
        for q in range(num_questions)
        for d in range(num_documents)
    ]


def computed_tokens(scheduler):
    total = 0
    while not scheduler.is_finished():
        batch = scheduler.schedule()
        if batch.is_prefill:
            total += batch.num_tokens
        update(scheduler, batch)
    return total


def test_small_pool_keeps_what_it_needs():
    """Four documents of four blocks in a pool of ten: in turns each evicts the others."""
    totals = []
    for policy in ("fcfs", "prefix"):
        scheduler = make(num_blocks=10, max_num_seqs=1, policy=policy)
        interleaved(scheduler, 4, 4)
        totals.append(computed_tokens(scheduler))
    assert totals == [16 * 17, 4 * 17 + 12]


def test_admission_looks_no_further_than_the_window(monkeypatch):
    """So that nobody waits for more prompts than it holds, however well they fit together."""
    monkeypatch.setattr(scheduler_module, "_WINDOW", 4)
    scheduler = make(max_num_seqs=1)
    seqs = interleaved(scheduler, 2, 6)
    admitted = []
    while not scheduler.is_finished():
        batch = scheduler.schedule()
        if batch.is_prefill:
            admitted += batch.seq_ids.tolist()
        update(scheduler, batch)
    order = [seqs.index(next(s for s in seqs if s.seq_id == i)) for i in admitted]
    assert order == [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11]


def test_chunk_stays_at_the_head():
    scheduler = Scheduler(3, 32, 64, 4, 17, [0], "prefix")
    long = add(scheduler, range(50, 110))
    interleaved(scheduler, 2, 2)
    update(scheduler, scheduler.schedule())
    assert scheduler.waiting[0] is long and long.row is not None
    run(scheduler)


@pytest.mark.parametrize("seed", range(5))
def test_random_calls_end_every_request(seed):
    rng = random.Random(seed)
    scheduler = make(num_blocks=rng.randint(18, 40), max_num_seqs=rng.randint(1, 6))
    seqs = []
    for _ in range(60):
        document = rng.randrange(3)
        seqs.append(
            add(
                scheduler,
                [*range(document * 50, document * 50 + rng.randint(1, 20)), 9],
                max_tokens=3,
            )
        )
        if rng.random() < 0.5 and (batch := scheduler.schedule()) is not None:
            update(scheduler, batch)
        if rng.random() < 0.1:
            scheduler.abort(rng.sample(seqs, min(2, len(seqs))))
    run(scheduler)
    assert all(seq.finish_reason in ("length", "abort") for seq in seqs)
