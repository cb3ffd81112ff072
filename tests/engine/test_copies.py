"""Blocks that begin as another one does: its K/V are copied, as far as they are the same."""

import pytest
from test_scheduler import add, blocks, run, update, work

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler

HEAD = list(range(1, 9))  # two blocks of four


@pytest.fixture
def scheduler(monkeypatch):
    monkeypatch.setattr(BlockManager, "MIN_COPIED_TOKENS", 2)
    return Scheduler(8, 64, 64, 4, 32, [0])


def step(scheduler):
    batch = scheduler.schedule()
    update(scheduler, batch)
    return batch


def test_leading_tokens_of_a_block_are_copied(scheduler):
    first = add(scheduler, [*HEAD, 10, 11, 12, 13, 5])
    step(scheduler)
    second = add(scheduler, [*HEAD, 10, 11, 99, 13, 5])
    batch = step(scheduler)
    assert work(batch) == [(10, 3)] and second.num_hit_tokens == 10
    assert batch.copies.tolist() == [[blocks(first)[2], blocks(second)[2], 2]]
    assert blocks(second)[:2] == blocks(first)[:2] and blocks(second)[2] != blocks(first)[2]
    assert len(scheduler.schedule().copies) == 0


def test_the_longest_of_several_is_copied(scheduler):
    for tail in ([10, 98, 97, 96], [10, 11, 12, 95], [10, 11, 94, 93]):
        add(scheduler, [*HEAD, *tail, 5], max_tokens=1)
    step(scheduler)
    add(scheduler, [*HEAD, 10, 11, 12, 13, 5])
    batch = step(scheduler)
    assert work(batch) == [(11, 2)] and batch.copies[0, 2] == 3


@pytest.mark.parametrize("tail", [[10, 99, 12, 13], [99, 11, 12, 13]])
def test_too_little_is_computed_instead(scheduler, tail):
    add(scheduler, [*HEAD, 10, 11, 12, 13, 5])
    step(scheduler)
    add(scheduler, [*HEAD, *tail, 5])
    batch = step(scheduler)
    assert work(batch) == [(8, 5)] and len(batch.copies) == 0


def test_prompt_again_needs_its_last_token_alone(scheduler):
    """Three whole blocks: the third is not taken as it is, since the last token's logits count."""
    for num_computed in (12, 1):
        add(scheduler, [*HEAD, 10, 11, 12, 13])
        assert step(scheduler).num_tokens == num_computed
    run(scheduler)


def test_nothing_is_copied_from_what_the_same_step_computes(scheduler):
    for tail in ([10, 11, 12, 13], [10, 11, 99, 98]):
        add(scheduler, [*HEAD, *tail, 5])
    batch = scheduler.schedule()
    assert work(batch) == [(0, 13), (8, 5)] and len(batch.copies) == 0


def test_source_may_be_given_away_by_the_step_that_copies(scheduler):
    """The copy is made before that step writes anything."""
    scheduler = Scheduler(8, 64, 16, 4, 4, [0])
    add(scheduler, [*HEAD, 10, 11, 12, 13, 5], max_tokens=1)
    step(scheduler)
    add(scheduler, [*HEAD, 10, 11, 99, 98, 97], max_tokens=1)
    batch = step(scheduler)
    ((source, target, num_tokens),) = batch.copies.tolist()
    assert num_tokens == 2 and source in batch.block_tables[0, 2:].tolist() + [target]


def test_prompt_logprobs_need_the_prompt_computed(scheduler):
    add(scheduler, [*HEAD, 10, 11, 12, 13, 5])
    step(scheduler)
    seq = add(scheduler, [*HEAD, 10, 11, 99, 13, 5])
    seq.num_prompt_logprobs = 1
    batch = step(scheduler)
    assert work(batch) == [(0, 13)] and len(batch.copies) == 0


def test_small_gains_are_left_alone():
    assert BlockManager.MIN_COPIED_TOKENS == 64  # blocks of 256: a copy's launch costs as much
