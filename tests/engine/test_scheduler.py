"""What each step computes, to the block id; who waits, who is preempted, who ends and why."""

import itertools
from collections import deque
from dataclasses import fields

import numpy as np
import pytest

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams

EOS = 0


def make_scheduler(
    max_num_seqs=4, budget=64, max_model_len=64, block_size=4, num_blocks=16, eos=(EOS,)
) -> Scheduler:
    return Scheduler(max_num_seqs, budget, max_model_len, block_size, num_blocks, eos)


def add(scheduler, tokens, **params) -> Sequence:
    seq = Sequence(tokens, SamplingParams(**params), scheduler.max_len)
    scheduler.add(seq)
    return seq


def add_unique(scheduler, num_prompts, num_tokens, **params) -> list[Sequence]:
    """Prompts that share no block."""
    return [
        add(scheduler, range(10_000 * i + 1, 10_000 * i + 1 + num_tokens), **params)
        for i in range(1, num_prompts + 1)
    ]


def update(scheduler, batch, tokens=5) -> list[Sequence]:
    """Hand in sampled tokens, one for all or a list of one for each sampled sequence."""
    num_sampled = int(batch.is_sampled.sum())
    return scheduler.update(batch, np.broadcast_to(np.array(tokens, np.int64), num_sampled))


def step(scheduler, tokens=5):
    batch = scheduler.schedule()
    return batch, update(scheduler, batch, tokens)


def run(scheduler):
    """Run to the end: batches are dropped, so the sums are all that is returned."""
    num_prefill_tokens, max_running, num_steps = 0, 0, 0
    while not scheduler.is_finished():
        batch, _ = step(scheduler)
        num_steps += 1
        num_prefill_tokens += len(batch.input_ids) if batch.is_prefill else 0
        max_running = max(max_running, scheduler.num_running)
    assert_idle(scheduler)
    return num_prefill_tokens, max_running, num_steps


def assert_idle(scheduler):
    assert scheduler.is_finished() and scheduler.running == []
    assert scheduler.block_manager.num_free_blocks == scheduler.num_blocks
    assert sorted(scheduler.table.free_rows) == list(range(scheduler.max_num_running))


def work(batch) -> list[tuple[int, int]]:
    """(cached, scheduled) tokens of each sequence of a batch."""
    cached, scheduled = batch.num_cached_tokens.tolist(), batch.num_scheduled_tokens.tolist()
    return list(zip(cached, scheduled, strict=True))


def blocks(seq) -> list[int]:
    return seq.block_table.tolist()


# -- prefill and decode ----------------------------------------------------------------------------


def test_prompts_are_prefilled_together_and_then_decode_one_token_each():
    scheduler = make_scheduler()
    first, second = add(scheduler, [1, 2, 3, 4, 5]), add(scheduler, [6, 7, 8])
    batch, finished = step(scheduler, [10, 20])
    assert batch.is_prefill and not finished
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert work(batch) == [(0, 5), (0, 3)]
    assert batch.is_sampled.tolist() == [True, True]
    assert (blocks(first), blocks(second)) == ([0, 1], [2])
    assert batch.block_tables[0].tolist() == [0, 1] and batch.block_tables[1, 0] == 2
    assert scheduler.running == [first, second]
    assert first.status is SequenceStatus.RUNNING

    batch, _ = step(scheduler, [11, 21])
    assert not batch.is_prefill
    assert batch.input_ids.tolist() == [10, 20]
    assert work(batch) == [(5, 1), (3, 1)]
    assert blocks(second) == [2]

    batch, _ = step(scheduler)  # the fifth token of the second needs a block
    assert batch.input_ids.tolist() == [11, 21]
    assert blocks(second) == [2, 3]
    assert first.completion_token_ids.tolist() == [10, 11, 5]


def test_nothing_to_do_is_none():
    scheduler = make_scheduler()
    assert scheduler.is_finished()
    assert scheduler.schedule() is None


def test_arriving_prompts_are_prefilled_before_others_decode():
    scheduler = make_scheduler()
    add(scheduler, [1, 2])
    step(scheduler)
    add(scheduler, [3, 4])
    assert step(scheduler)[0].input_ids.tolist() == [3, 4]
    assert not step(scheduler)[0].is_prefill


def test_batch_does_not_change_with_the_state_it_was_built_from():
    scheduler = make_scheduler()
    add(scheduler, [1, 2, 3])
    step(scheduler, 9)
    batch = scheduler.schedule()
    before = [batch.input_ids.copy(), batch.num_cached_tokens.copy(), batch.block_tables.copy()]
    update(scheduler, batch)
    scheduler.reset()
    after = [batch.input_ids, batch.num_cached_tokens, batch.block_tables]
    assert all(map(np.array_equal, before, after))


def test_temperatures_are_those_of_the_sampled_sequences():
    scheduler = make_scheduler(budget=6)
    add(scheduler, [1, 2], temperature=0.5)
    add(scheduler, range(3, 10), temperature=0.25)
    batch, _ = step(scheduler)
    assert batch.is_sampled.tolist() == [True, False]
    assert batch.temperatures.tolist() == [0.5]
    assert step(scheduler)[0].temperatures.tolist() == [0.25]


def test_long_prompt_is_cut_into_chunks_that_fill_the_budget():
    scheduler = make_scheduler(budget=8)
    long, short = add(scheduler, range(1, 21)), add(scheduler, range(30, 36))
    batch, _ = step(scheduler)
    assert (work(batch), batch.is_sampled.tolist()) == ([(0, 8)], [False])
    assert batch.input_ids.tolist() == list(range(1, 9))
    assert list(scheduler.waiting) == [long, short] and blocks(long) == [0, 1, 2, 3, 4]
    batch, _ = step(scheduler)
    assert (work(batch), batch.is_sampled.tolist()) == ([(8, 8)], [False])
    batch, _ = step(scheduler)
    assert (work(batch), batch.is_sampled.tolist()) == ([(16, 4), (0, 4)], [True, False])
    assert batch.input_ids.tolist() == [17, 18, 19, 20, 30, 31, 32, 33]
    assert scheduler.running == [long] and list(scheduler.waiting) == [short]
    batch, _ = step(scheduler)
    assert (work(batch), batch.is_sampled.tolist()) == ([(4, 2)], [True])
    assert not step(scheduler)[0].is_prefill


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 127, 128, 129, 200])
def test_chunk_ends_where_its_own_tokens_end(num_tokens):
    """Keys counted from the whole prompt let a chunk attend to slots not written yet (R03)."""
    scheduler = make_scheduler(budget=64, max_model_len=512, block_size=16, num_blocks=32)
    seq = add(scheduler, range(1, num_tokens + 1), max_tokens=1)
    for start in range(0, num_tokens, 64):
        batch, finished = step(scheduler)
        end = min(start + 64, num_tokens)
        assert work(batch) == [(start, end - start)]
        assert batch.input_ids.tolist() == list(range(start + 1, end + 1))
        assert finished == ([seq] if end == num_tokens else [])


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_no_step_exceeds_the_token_budget(budget):
    scheduler = make_scheduler(max_num_seqs=8, budget=budget, num_blocks=64)
    add_unique(scheduler, 12, 9, max_tokens=6)
    while not scheduler.is_finished():
        batch, _ = step(scheduler)
        assert 0 < batch.num_scheduled_tokens.sum() == len(batch.input_ids) <= budget


def test_small_prompt_does_not_overtake_a_large_one_that_waits_for_blocks():
    scheduler = make_scheduler(num_blocks=8)
    held = add(scheduler, range(1, 18))
    step(scheduler)
    large, small = add(scheduler, range(100, 113)), add(scheduler, [7])
    assert not step(scheduler)[0].is_prefill
    assert list(scheduler.waiting) == [large, small]
    scheduler.abort([held])
    assert work(step(scheduler)[0]) == [(0, 13), (0, 1)]


def test_one_block_for_each_running_sequence_is_kept_free():
    """Admitting into the last block buys nothing: the next block someone needs preempts."""
    scheduler = make_scheduler(num_blocks=3)
    add(scheduler, [1, 2, 3, 4])
    step(scheduler)
    add(scheduler, [5])
    assert step(scheduler)[0].is_prefill  # 2 free, 1 taken, 1 kept
    add(scheduler, [6])
    assert not step(scheduler)[0].is_prefill
    assert scheduler.num_preemptions == 0


# -- prefix cache ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "num_computed"), [(3, 3), (4, 4), (5, 1), (7, 3), (8, 4), (9, 1), (12, 4)]
)
def test_repeated_prompt_computes_what_the_cache_lacks_and_at_least_one_token(
    num_tokens, num_computed
):
    """A prompt found whole in the cache left no token to compute and no logits (R01)."""
    scheduler = make_scheduler()
    prompt = range(1, num_tokens + 1)
    for expected in (num_tokens, num_computed):
        add(scheduler, prompt, max_tokens=1)
        batch, finished = step(scheduler)
        assert work(batch) == [(num_tokens - expected, expected)]
        assert batch.input_ids.tolist() == list(prompt)[num_tokens - expected :]
        assert len(finished) == 1


def test_next_turn_of_a_conversation_finds_prompt_and_answer():
    scheduler = make_scheduler()
    seq = add(scheduler, [1, 2, 3], max_tokens=6)
    for token in range(10, 16):
        step(scheduler, token)
    history = seq.token_ids.tolist()
    assert history == [1, 2, 3, *range(10, 16)]
    add(scheduler, [*history, 90])
    assert work(step(scheduler)[0]) == [(8, 2)]


def test_only_what_a_step_computes_crosses_to_the_other_ranks():
    """A message with every token of every cached prompt overflowed the channel at 8.2 MB (R31)."""
    scheduler = make_scheduler(512, 16_384, 4096, 256, 2048)
    prefix = list(range(1, 3841))
    add(scheduler, [*prefix, 1], max_tokens=1)
    step(scheduler)
    for i in range(512):
        add(scheduler, [*prefix, *range(i, i + 20)])
    batch = scheduler.schedule()
    assert (batch.num_seqs, len(batch.input_ids)) == (512, 10_240)
    arrays = [getattr(batch, field.name) for field in fields(batch) if field.name != "is_prefill"]
    assert sum(array.nbytes for array in arrays) < 100_000


def test_cached_prefix_does_not_count_against_the_budget():
    scheduler = make_scheduler(budget=12)
    add(scheduler, range(1, 10), max_tokens=1)
    step(scheduler)
    add(scheduler, range(1, 12))
    add(scheduler, range(1, 13))
    assert work(step(scheduler)[0]) == [(8, 3), (8, 4)]


# -- limits ----------------------------------------------------------------------------------------


def test_running_never_exceeds_max_num_seqs_and_no_prompt_is_computed_twice():
    """Admission looked at the current batch only: 20 ran at once after five steps (R30).

    The 20 prompts come up one after the other, so a limit on the batch alone lets all of them in.
    """
    scheduler = make_scheduler(max_num_seqs=4, max_model_len=512, block_size=16, num_blocks=400)
    add_unique(scheduler, 20, 60, max_tokens=40)
    num_prefill_tokens, max_running, _ = run(scheduler)
    assert max_running == 4
    assert num_prefill_tokens == 20 * 60
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("sizes", [(1, 64, 16), (64, 3, 16), (64, 64, 5)])
def test_smallest_of_seqs_budget_and_blocks_bounds_the_running_sequences(sizes):
    max_num_seqs, budget, num_blocks = sizes
    scheduler = make_scheduler(max_num_seqs, budget, num_blocks=num_blocks)
    assert scheduler.max_num_running == min(sizes)
    add_unique(scheduler, 20, 1, max_tokens=3)
    assert run(scheduler)[1] <= min(sizes)


@pytest.mark.parametrize("max_model_len", [33, 100, 1000])
@pytest.mark.parametrize("block_size", [16, 256])
def test_length_limit_is_not_rounded_to_blocks(max_model_len, block_size):
    """A limit aligned upward exceeds the RoPE table, one aligned downward wastes room (R45)."""
    scheduler = make_scheduler(max_model_len=max_model_len, block_size=block_size, num_blocks=64)
    assert scheduler.max_len == max_model_len
    seq = add(scheduler, range(1, 21), max_tokens=None)
    run(scheduler)
    assert (len(seq), seq.finish_reason) == (max_model_len, "length")


def test_generation_stops_at_max_model_len():
    """Length was never checked: positions ran past the tables made for them (R15)."""
    scheduler = make_scheduler(max_model_len=512, budget=512, block_size=16, num_blocks=64)
    long = add(scheduler, range(1, 501), max_tokens=100, ignore_eos=True)
    longest = add(scheduler, range(1, 512), max_tokens=100, ignore_eos=True)
    run(scheduler)
    assert (len(long.completion_token_ids), long.finish_reason) == (12, "length")
    assert (len(longest.completion_token_ids), longest.finish_reason) == (1, "length")


def test_pool_smaller_than_max_model_len_bounds_the_length_too():
    """A request that outgrew the pool failed an assertion, or spun for ever (R07)."""
    scheduler = make_scheduler(max_model_len=64, num_blocks=2)
    assert scheduler.max_len == 8
    seq = add(scheduler, range(1, 8), max_tokens=4)
    other = add(scheduler, [1, 2], max_tokens=4)
    run(scheduler)
    assert (len(seq), seq.finish_reason) == (8, "length")
    assert (len(other.completion_token_ids), other.finish_reason) == (4, "length")


# -- the end of a request --------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens_is_the_number_of_new_tokens(max_tokens):
    scheduler = make_scheduler()
    seq = add(scheduler, [1, 2, 3], max_tokens=max_tokens)
    assert run(scheduler)[2] == max_tokens
    assert seq.completion_token_ids.tolist() == [5] * max_tokens
    assert (seq.finish_reason, seq.status) == ("length", SequenceStatus.FINISHED)


def test_request_for_one_token_ends_in_its_prefill():
    scheduler = make_scheduler()
    seq = add(scheduler, [1, 2, 3], max_tokens=1)
    assert step(scheduler)[1] == [seq]
    assert scheduler.num_running == 0
    assert_idle(scheduler)


@pytest.mark.parametrize("eos", [0, 7])
def test_any_eos_token_ends_the_request_and_is_kept(eos):
    scheduler = make_scheduler(eos=(7, 0))
    seq = add(scheduler, [1, 0, 7])
    step(scheduler, 5)
    assert step(scheduler, eos)[1] == [seq]
    assert seq.completion_token_ids.tolist() == [5, eos]
    assert seq.finish_reason == "stop"


def test_ignored_eos_is_a_token_like_any_other():
    scheduler = make_scheduler()
    stops, goes_on = add(scheduler, [1, 2]), add(scheduler, [3], ignore_eos=True, max_tokens=2)
    assert step(scheduler, EOS)[1] == [stops]
    assert step(scheduler, EOS)[1] == [goes_on]
    assert goes_on.finish_reason == "length"


def test_eos_as_the_last_allowed_token_is_a_stop():
    scheduler = make_scheduler()
    seq = add(scheduler, [1, 2], max_tokens=1)
    step(scheduler, EOS)
    assert seq.finish_reason == "stop"


def test_bad_logits_end_one_request_and_leave_its_neighbours_alone():
    """argmax over NaN is 0, so broken numerics used to look like endless text (R36)."""
    scheduler = make_scheduler()
    seqs = add_unique(scheduler, 3, 6)
    step(scheduler, [5, 6, 7])
    assert step(scheduler, [8, -1, 9])[1] == [seqs[1]]
    assert seqs[1].finish_reason == "error"
    assert seqs[1].completion_token_ids.tolist() == [6]  # and not the -1
    assert scheduler.running == [seqs[0], seqs[2]]
    step(scheduler)
    assert seqs[2].completion_token_ids.tolist() == [7, 9, 5]
    add(scheduler, seqs[1].token_ids)
    assert work(step(scheduler)[0]) == [(0, 7)]  # nothing that step computed is in the cache


def test_bad_logits_in_prefill_end_the_request_without_output():
    scheduler = make_scheduler()
    seq = add(scheduler, [1, 2, 3])
    assert step(scheduler, -1)[1] == [seq]
    assert (seq.finish_reason, seq.completion_token_ids.tolist()) == ("error", [])
    assert_idle(scheduler)


def test_finished_requests_give_back_their_blocks_at_once():
    scheduler = make_scheduler()
    short, long = add(scheduler, range(1, 6), max_tokens=2), add(scheduler, [9], max_tokens=3)
    step(scheduler)
    assert scheduler.block_manager.num_free_blocks == 13
    assert step(scheduler)[1] == [short]
    assert scheduler.block_manager.num_free_blocks == 15
    assert scheduler.running == [long]


# -- preemption ------------------------------------------------------------------------------------


def test_most_recently_admitted_is_preempted_and_recomputes_only_what_was_lost():
    scheduler = make_scheduler(num_blocks=5)
    first = add(scheduler, range(1, 8), max_tokens=10)
    second = add(scheduler, range(20, 24), max_tokens=10)
    step(scheduler)
    assert (blocks(first), blocks(second)) == ([0, 1], [2])
    step(scheduler)  # the fifth token of the second
    assert blocks(second) == [2, 3]
    step(scheduler)  # the ninth token of the first
    assert blocks(first) == [0, 1, 4]
    for _ in range(2):
        step(scheduler)
    # The ninth token of the second finds no block free: it gives way itself, being the last.
    batch, _ = step(scheduler)
    assert batch.num_seqs == 1 and scheduler.running == [first]
    assert list(scheduler.waiting) == [second]
    assert (second.status, blocks(second), second.row) == (SequenceStatus.WAITING, [], None)
    assert scheduler.num_preemptions == 1
    assert list(scheduler.block_manager._free) == [3, 2]
    for _ in range(3):
        step(scheduler)
    # The first took block 3, the second's tail, and is done; block 2 is still a hit.
    assert (len(first), first.finish_reason) == (16, None)
    assert step(scheduler)[1] == [first]
    batch, _ = step(scheduler)
    assert batch.is_prefill and work(batch) == [(4, 5)]
    assert batch.input_ids.tolist() == [5] * 5
    assert blocks(second)[0] == 2
    run(scheduler)
    assert second.completion_token_ids.tolist() == [5] * 10


def test_preempted_request_stays_out_of_the_batch_it_was_preempted_from():
    """A sequence that gave up its own blocks was still in the step's batch."""
    scheduler = make_scheduler(max_num_seqs=8, num_blocks=7, max_model_len=24)
    add_unique(scheduler, 3, 4, max_tokens=20)
    while not scheduler.is_finished():
        batch = scheduler.schedule()
        if not batch.is_prefill:
            assert batch.rows.tolist() == [seq.row for seq in scheduler.running]
        update(scheduler, batch)
    assert scheduler.num_preemptions > 0


def test_preempted_requests_come_back_in_their_order_and_before_later_ones():
    scheduler = make_scheduler(num_blocks=9, max_num_seqs=3, max_model_len=36)
    seqs = add_unique(scheduler, 4, 4, max_tokens=32)
    while scheduler.num_preemptions < 2:
        step(scheduler)
    assert scheduler.running == seqs[:1]
    assert list(scheduler.waiting) == seqs[1:]


def test_many_requests_in_a_small_pool_all_finish():
    """Work was counted before the cached blocks were, and the batch ran out of range (R02)."""
    block_size = 16
    scheduler = make_scheduler(64, 1024, 512, block_size, num_blocks=12)
    seqs = add_unique(scheduler, 64, block_size - 6, max_tokens=2 * block_size)
    run(scheduler)
    assert scheduler.num_preemptions > 0
    assert {len(seq.completion_token_ids) for seq in seqs} == {2 * block_size}


def test_preemption_recomputes_less_than_without_kept_blocks():
    """12 prompts of 250 tokens, 600 outputs each, 12 blocks of 256.

    The reference admits all 12, then preempts as soon as they grow: 7,446 prefill tokens.
    """
    scheduler = make_scheduler(512, 16_384, 4096, 256, num_blocks=12)
    add_unique(scheduler, 12, 250, max_tokens=600)
    num_prefill_tokens = run(scheduler)[0]
    assert num_prefill_tokens <= 5_565


def test_thousands_of_requests_on_a_full_pool_recompute_almost_nothing():
    """4,096 requests of bench.py's lengths on 4,330 blocks: the reference recomputes 43 %."""
    scheduler = make_scheduler(512, 16_384, 4096, 256, num_blocks=4330)
    rng = np.random.default_rng(0)
    num_prompt_tokens = 0
    for num_tokens, max_tokens in rng.integers(100, 1025, (4096, 2)).tolist():
        prompt = rng.integers(1, 10_000, num_tokens)
        add(scheduler, prompt, max_tokens=max_tokens, ignore_eos=True)
        num_prompt_tokens += num_tokens
    num_prefill_tokens, max_running, _ = run(scheduler)
    assert num_prefill_tokens <= 1.01 * num_prompt_tokens
    assert max_running == 512


# -- abort and reset -------------------------------------------------------------------------------


def busy_scheduler():
    """Two running requests that share a block, one between two chunks, one waiting."""
    scheduler = make_scheduler(budget=12)
    seqs = [add(scheduler, [1, 2, 3, 4, 5]), add(scheduler, [1, 2, 3, 4, 6])]
    step(scheduler)
    seqs += [add(scheduler, range(50, 70)), add(scheduler, [9])]
    step(scheduler)
    assert scheduler.running == seqs[:2] and list(scheduler.waiting) == seqs[2:]
    assert seqs[2].num_cached_tokens == 12
    return scheduler, seqs


@pytest.mark.parametrize("size", range(1, 5))
def test_abort_takes_out_any_request_and_gives_its_blocks_back(size):
    for indices in itertools.combinations(range(4), size):
        scheduler, seqs = busy_scheduler()
        dropped = [seqs[i] for i in indices]
        scheduler.abort(dropped)
        kept = [seq for seq in seqs if seq not in dropped]
        assert [*scheduler.running, *scheduler.waiting] == kept
        assert all(seq.status is SequenceStatus.FINISHED and not blocks(seq) for seq in dropped)
        run(scheduler)
        assert all(len(seq) == 64 and seq.finish_reason == "length" for seq in kept)
        assert all(seq.finish_reason is None for seq in dropped)


def test_aborted_request_keeps_its_tokens_and_a_second_abort_does_nothing():
    scheduler, seqs = busy_scheduler()
    scheduler.abort(seqs[:1])
    scheduler.abort(seqs[:1])
    assert seqs[0].completion_token_ids.tolist() == [5]
    assert scheduler.block_manager._ref_counts.count(0) == 16 - 2 - 5


def test_reset_forgets_requests_blocks_and_cache():
    """After an exception the old requests stayed queued and their blocks taken (R20)."""
    scheduler, _ = busy_scheduler()
    scheduler.schedule()  # an exception came before the update
    scheduler.reset()
    assert_idle(scheduler)
    seq = add(scheduler, [1, 2, 3, 4, 5])
    assert work(step(scheduler)[0]) == [(0, 5)]
    assert blocks(seq) == [0, 1]


# -- cost ------------------------------------------------------------------------------------------


def test_refused_prompt_is_looked_up_again_only_when_there_is_more_room(monkeypatch):
    """A long cached prefix at the head of a queue that does not fit cost 0.5 ms at each step."""
    lookups = []
    find = BlockManager._find_cached_blocks
    monkeypatch.setattr(
        BlockManager, "_find_cached_blocks", lambda *args: lookups.append(args) or find(*args)
    )
    scheduler = make_scheduler(num_blocks=8, max_model_len=32)
    short, long = add(scheduler, [1, 2], max_tokens=4), add(scheduler, range(10, 21))
    step(scheduler)
    waiting = add(scheduler, range(30, 42))
    assert len(lookups) == 2
    for _ in range(2):
        assert not step(scheduler)[0].is_prefill
    assert len(lookups) == 3
    assert step(scheduler)[1] == [short]
    assert work(step(scheduler)[0]) == [(0, 12)]
    assert len(lookups) == 4
    assert scheduler.running == [long, waiting]


class OpaqueDeque(deque):
    """A queue that can be asked for its ends only."""

    def __iter__(self):
        raise AssertionError("a step went through the whole queue")


def test_step_looks_at_no_waiting_request_but_the_first(monkeypatch):
    """So the cost of a step does not grow with the queue, and a blocked head is hashed once."""
    num_hashed = itertools.count()
    compute_hash = BlockManager.compute_hash

    def counting(*args):
        next(num_hashed)
        return compute_hash(*args)

    monkeypatch.setattr(BlockManager, "compute_hash", counting)
    scheduler = make_scheduler(num_blocks=8, max_model_len=32)
    scheduler.waiting = OpaqueDeque()
    add(scheduler, range(1, 18), max_tokens=12, ignore_eos=True)
    step(scheduler)
    for _ in range(100_000):
        scheduler.waiting.append(None)
    scheduler.waiting[0] = Sequence(range(100, 120), SamplingParams(), scheduler.max_len)
    for _ in range(10):
        assert not step(scheduler)[0].is_prefill
    # Four full blocks of the running prompt, two more as it grows, four of the head's.
    assert next(num_hashed) == 10
    assert len(scheduler.waiting) == 100_000
