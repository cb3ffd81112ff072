"""What each step computes, to the block id; who waits, who is preempted, who ends and why."""

import itertools
from collections import deque
from dataclasses import fields
from typing import NamedTuple

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


class Totals(NamedTuple):
    num_prefill_tokens: int
    max_running: int
    num_steps: int
    num_prefills: int


def run(scheduler, depth=0, model=lambda batch: 5) -> Totals:
    """Run to the end, each step updated once depth others have been scheduled after it.

    model: batch -> tokens as for update. Batches are dropped, so the sums are all that is returned.
    """
    num_prefill_tokens, max_running, num_steps, num_prefills = 0, 0, 0, 0
    inflight = deque()
    while not scheduler.is_finished():
        batch = scheduler.schedule()
        if batch is not None:
            inflight.append((batch, model(batch)))
            num_steps += 1
            num_prefills += batch.is_prefill
            num_prefill_tokens += len(batch.input_ids)
            max_running = max(max_running, scheduler.num_running)
        num_kept = 0 if batch is None else depth
        while len(inflight) > num_kept or (inflight and scheduler.is_finished()):
            update(scheduler, *inflight.popleft())
    assert_idle(scheduler)
    return Totals(num_prefill_tokens, max_running, num_steps, num_prefills)


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


def arrays_of(batch) -> dict[str, np.ndarray]:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


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

    assert (first.last_token, second.last_token) == (10, 20)
    batch, _ = step(scheduler, [11, 21])
    assert not batch.is_prefill
    assert batch.rows.tolist() == [first.row, second.row]
    assert batch.seq_ids.tolist() == [first.seq_id, second.seq_id]
    assert work(batch) == [(5, 1), (3, 1)]
    assert batch.is_sampled.tolist() == [True, True]
    assert batch.new_blocks.tolist() == [-1, -1]
    assert blocks(second) == [2]

    assert (first.last_token, second.last_token) == (11, 21)
    batch, _ = step(scheduler)  # the fifth token of the second needs a block
    assert work(batch) == [(6, 1), (4, 1)]
    assert batch.new_blocks.tolist() == [-1, 3]
    assert blocks(second) == [2, 3]
    batch, _ = step(scheduler)
    assert batch.new_blocks.tolist() == [-1, -1]
    assert first.completion_token_ids.tolist() == [10, 11, 5, 5]
    assert second.completion_token_ids.tolist() == [20, 21, 5, 5]


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
    """It is read again when its tokens are, and other steps have been scheduled by then."""
    scheduler = make_scheduler()
    add(scheduler, [1, 2, 3])
    add(scheduler, [4, 5, 6, 7])
    for _ in range(3):  # a prefill, then decodes
        batch, _ = step(scheduler)
        state = [a for a in vars(scheduler.table).values() if isinstance(a, np.ndarray)]
        for name, array in arrays_of(batch).items():
            assert not any(np.shares_memory(array, a) for a in [*state, scheduler._running]), name


def test_temperatures_and_seeds_cross_with_a_prefill_for_the_decode_steps_after_it():
    scheduler = make_scheduler(budget=6)
    for tokens, temperature, seed in [([1, 2], 0.5, 7), (range(3, 10), 0.25, 2**63 - 1)]:
        params = SamplingParams(temperature=temperature)
        scheduler.add(Sequence(tokens, params, scheduler.max_len, seed))
    batch, _ = step(scheduler)
    assert batch.is_sampled.tolist() == [True, False]
    assert batch.temperatures.tolist() == [0.5, 0.25]
    assert batch.seeds.tolist() == [7, 2**63 - 1]
    batch, _ = step(scheduler)  # the rest of the second prompt
    assert (batch.temperatures.tolist(), batch.seeds.tolist()) == ([0.25], [2**63 - 1])
    batch, _ = step(scheduler)
    assert not batch.is_prefill and batch.temperatures.size == batch.seeds.size == 0


@pytest.mark.parametrize(("temperatures", "expected"), [([0, 0], True), ([0, 0.1], False)])
def test_all_greedy_means_every_temperature_is_zero(temperatures, expected):
    scheduler = make_scheduler()
    for temperature in temperatures:
        add(scheduler, [1, 2], temperature=temperature)
    assert step(scheduler)[0].all_greedy is expected  # the prefill
    assert step(scheduler)[0].all_greedy is expected


def test_all_greedy_is_about_sampled_sequences():
    scheduler = make_scheduler(budget=6)
    add(scheduler, [1, 2], temperature=0)
    add(scheduler, range(3, 10), temperature=1)
    assert step(scheduler)[0].all_greedy is True
    assert step(scheduler)[0].all_greedy is False


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
        assert 0 < batch.num_scheduled_tokens.sum() == batch.num_tokens <= budget
        assert len(batch.input_ids) == (batch.num_tokens if batch.is_prefill else 0)


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
    """A message with every token of every cached prompt overflowed the channel at 8.2 MB (R31).

    A decode step says which rows take part and which of them start a block, and little else.
    """
    scheduler = make_scheduler(512, 16_384, 4096, 256, 2048)
    prefix = list(range(1, 3841))
    add(scheduler, [*prefix, 1], max_tokens=1)
    step(scheduler)
    for i in range(512):
        add(scheduler, [*prefix, *range(i, i + 20)])
    batch = scheduler.schedule()
    assert (batch.num_seqs, len(batch.input_ids)) == (512, 10_240)
    assert sum(array.nbytes for array in arrays_of(batch).values()) < 100_000
    update(scheduler, batch)
    batch = scheduler.schedule()
    assert (batch.is_prefill, batch.num_seqs) == (False, 512)
    assert batch.groups.tolist() == [[0, 512, 0, 3840]]
    assert sum(array.nbytes for array in arrays_of(batch).values()) <= 25 * 512 + 16


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
    totals = run(scheduler)
    assert totals.max_running == 4
    assert totals.num_prefill_tokens == 20 * 60
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("sizes", [(1, 64, 16), (64, 3, 16), (64, 64, 5)])
def test_smallest_of_seqs_budget_and_blocks_bounds_the_running_sequences(sizes):
    max_num_seqs, budget, num_blocks = sizes
    scheduler = make_scheduler(max_num_seqs, budget, num_blocks=num_blocks)
    assert scheduler.max_num_running == min(sizes)
    add_unique(scheduler, 20, 1, max_tokens=3)
    assert run(scheduler).max_running <= min(sizes)


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
    assert run(scheduler).num_steps == max_tokens
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
    assert run(scheduler).num_prefill_tokens <= 5_565


@pytest.mark.parametrize("depth", [0, 1])
def test_thousands_of_requests_on_a_full_pool_recompute_almost_nothing(depth):
    """4,096 requests of bench.py's lengths on 4,330 blocks: the reference recomputes 43 %.

    They take 275 prefill steps, 276 with a step in flight. Each makes all running sequences wait,
    and there were 2,383 when a row that came free was filled at once.
    """
    scheduler = make_scheduler(512, 16_384, 4096, 256, num_blocks=4330)
    rng = np.random.default_rng(0)
    num_prompt_tokens = 0
    for num_tokens, max_tokens in rng.integers(100, 1025, (4096, 2)).tolist():
        prompt = rng.integers(1, 10_000, num_tokens)
        add(scheduler, prompt, max_tokens=max_tokens, ignore_eos=True)
        num_prompt_tokens += num_tokens
    totals = run(scheduler, depth)
    assert totals.num_prefill_tokens <= 1.01 * num_prompt_tokens
    assert totals.max_running == 512
    assert totals.num_prefills <= 280
    assert totals.num_steps <= 5_500  # 5,447 and 5,465


# -- when to prefill -------------------------------------------------------------------------------


def phases(scheduler, num_steps) -> str:
    """P for each prefill, d for each decode."""
    return "".join("dP"[step(scheduler)[0].is_prefill] for _ in range(num_steps))


def full_scheduler(lengths, num_waiting):
    """16 rows taken by requests that end after so many tokens each, the rest after 40."""
    scheduler = make_scheduler(max_num_seqs=16, num_blocks=256)
    for i in range(16 + num_waiting):
        add(scheduler, [i + 1], max_tokens=lengths[i] if i < len(lengths) else 40)
    assert step(scheduler)[0].num_seqs == 16
    return scheduler


def test_rows_gather_to_an_eighth_before_the_next_prefill():
    scheduler = full_scheduler([3, 6], num_waiting=8)
    assert phases(scheduler, 2) == "dd"  # the third token of the first: one row is free
    assert len(scheduler.table.free_rows) == 1
    assert phases(scheduler, 3) == "ddd"  # the sixth of the second: two are
    batch, _ = step(scheduler)
    assert (batch.is_prefill, batch.num_seqs) == (True, 2)
    assert phases(scheduler, 3) == "ddd"


def test_row_does_not_stay_free_for_more_than_16_decodes():
    scheduler = full_scheduler([3], num_waiting=8)
    assert phases(scheduler, 2) == "dd"
    assert len(scheduler.table.free_rows) == 1
    assert phases(scheduler, 16) == "d" * 14 + "Pd"  # 16 decodes after the first prefill


def test_rows_do_not_gather_when_all_that_wait_find_one():
    scheduler = full_scheduler([3], num_waiting=1)
    assert phases(scheduler, 3) == "ddP"


def test_rows_do_not_gather_when_nothing_else_runs():
    scheduler = make_scheduler(max_num_seqs=16, budget=16, num_blocks=256)
    seqs = add_unique(scheduler, 20, 16, max_tokens=1)
    assert phases(scheduler, 20) == "P" * 20
    assert all(seq.finish_reason == "length" for seq in seqs)


def test_rest_of_a_chunked_prompt_does_not_wait_for_rows():
    scheduler = make_scheduler(max_num_seqs=16, budget=16, num_blocks=256)
    add_unique(scheduler, 15, 1, max_tokens=40)
    add(scheduler, range(1, 41))
    for i in range(8):
        add(scheduler, [i])
    assert phases(scheduler, 4) == "PPPP" and scheduler.num_running == 16


# -- steps in flight -------------------------------------------------------------------------------


def position_model(seqs, eos_every=7):
    """Tokens that depend on the request and the position alone, some of them EOS."""
    index = {seq.seq_id: i for i, seq in enumerate(seqs)}

    def model(batch):
        ends = batch.num_cached_tokens + batch.num_scheduled_tokens
        sampled = zip(batch.seq_ids[batch.is_sampled], ends[batch.is_sampled], strict=True)
        mixed = [(31 * index[int(i)] + 17 * int(end)) % 101 for i, end in sampled]
        return [EOS if x % eos_every == 0 else x for x in mixed]

    return model


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [9, 12, 64])
def test_steps_in_flight_change_no_token(depth, num_blocks):
    """With 9 blocks requests are preempted, with 64 they are not."""
    outputs = []
    for d in (0, depth):
        scheduler = make_scheduler(8, budget=20, max_model_len=36, num_blocks=num_blocks)
        params = [{"max_tokens": 1 + 5 * i % 23, "ignore_eos": i % 3 == 0} for i in range(24)]
        seqs = [add(scheduler, range(i, i + 2 + i % 9), **p) for i, p in enumerate(params)]
        run(scheduler, d, position_model(seqs))
        assert (scheduler.num_preemptions > 0) == (num_blocks == 9)
        outputs.append([(seq.token_ids.tolist(), seq.finish_reason) for seq in seqs])
    assert outputs[0] == outputs[1]
    assert {reason for _, reason in outputs[0]} == {"stop", "length"}


def test_next_step_is_scheduled_before_the_last_one_is_read():
    scheduler = make_scheduler()
    seq = add(scheduler, [1, 2, 3])
    batches = [scheduler.schedule() for _ in range(4)]
    assert [work(batch) for batch in batches] == [[(0, 3)], [(3, 1)], [(4, 1)], [(5, 1)]]
    assert [batch.new_blocks.tolist() for batch in batches[1:]] == [[-1], [1], [-1]]
    assert (seq.num_tokens, seq.num_cached_tokens) == (3, 6)
    for batch, token in zip(batches, range(10, 14), strict=True):
        assert update(scheduler, batch, token) == []
    assert (seq.token_ids.tolist(), seq.num_cached_tokens) == ([1, 2, 3, 10, 11, 12, 13], 6)


def test_chunks_follow_each_other_without_an_update():
    scheduler = make_scheduler(budget=8)
    seq = add(scheduler, range(1, 21), max_tokens=2)
    batches = [scheduler.schedule() for _ in range(4)]
    assert [work(batch) for batch in batches] == [[(0, 8)], [(8, 8)], [(16, 4)], [(20, 1)]]
    assert [update(scheduler, batch) for batch in batches] == [[], [], [], [seq]]


def test_end_by_length_is_known_before_the_last_token_is():
    """No step goes beyond it: its slot may not exist, and its position not be in the tables."""
    scheduler = make_scheduler()
    short, long = add(scheduler, [1, 2], max_tokens=2), add(scheduler, [3], max_tokens=3)
    batches = [scheduler.schedule() for _ in range(3)]
    assert [batch.num_seqs for batch in batches] == [2, 2, 1]
    assert batches[2].rows.tolist() == [long.row]
    assert scheduler.schedule() is None and not scheduler.is_finished()
    assert [update(scheduler, batch) for batch in batches] == [[], [short], [long]]
    assert_idle(scheduler)


def test_eos_is_seen_one_step_late_and_the_surplus_token_is_dropped():
    scheduler = make_scheduler()
    stops, goes_on = add(scheduler, [1, 2, 3]), add(scheduler, [4, 5, 6])
    first, second = scheduler.schedule(), scheduler.schedule()
    assert update(scheduler, first, [EOS, 7]) == [stops]
    assert second.num_seqs == 2
    assert scheduler.block_manager.num_free_blocks == 15  # at once, the second step in flight
    assert update(scheduler, second, [8, 9]) == []
    assert stops.token_ids.tolist() == [1, 2, 3, EOS]
    assert goes_on.token_ids.tolist() == [4, 5, 6, 7, 9]
    assert step(scheduler)[0].rows.tolist() == [goes_on.row]


def test_surplus_token_does_not_reach_the_next_owner_of_the_row():
    scheduler = make_scheduler(max_num_seqs=1)
    old, new = add(scheduler, [1, 2, 3]), add(scheduler, [4, 5])
    first, second = scheduler.schedule(), scheduler.schedule()
    row = old.row
    assert update(scheduler, first, EOS) == [old]
    third = scheduler.schedule()
    assert third.is_prefill and new.row == row
    assert update(scheduler, second, 8) == []
    assert new.token_ids.tolist() == [4, 5]
    assert update(scheduler, third, 9) == []
    assert new.token_ids.tolist() == [4, 5, 9]


def test_surplus_step_publishes_nothing():
    """It fills the block of a request that is over, and another may hold that block by now."""
    scheduler = make_scheduler()
    seq = add(scheduler, [1, 2, 3])
    first, second = scheduler.schedule(), scheduler.schedule()
    assert update(scheduler, first, EOS) == [seq]
    assert update(scheduler, second) == []  # it wrote the fourth token, EOS
    add(scheduler, [1, 2, 3, EOS, 5])
    assert work(step(scheduler)[0]) == [(0, 5)]


def test_block_of_a_prompt_is_found_as_soon_as_it_is_scheduled():
    """Steps run in order: by the same step and by the next, before any is read."""
    scheduler = make_scheduler()
    for token in (5, 6):
        add(scheduler, [1, 2, 3, 4, token])
    assert work(scheduler.schedule()) == [(0, 5), (4, 1)]
    add(scheduler, [1, 2, 3, 4, 7])
    assert work(scheduler.schedule()) == [(4, 1)]


def test_block_of_an_output_is_found_once_the_step_that_filled_it_is_read():
    """Its hash needs the tokens."""
    scheduler = make_scheduler()
    add(scheduler, [1, 2, 3])
    first, second = scheduler.schedule(), scheduler.schedule()
    update(scheduler, first, 9)
    add(scheduler, [1, 2, 3, 9, 6])
    third = scheduler.schedule()
    assert work(third) == [(0, 5)]
    update(scheduler, second), update(scheduler, third)
    add(scheduler, [1, 2, 3, 9, 7])
    assert work(scheduler.schedule()) == [(4, 1)]


def test_copies_of_a_prompt_are_computed_once():
    """Eight of three blocks: one copy, and seven last pieces, whose ends are needed."""
    for num_tokens, rest in ((12, 4), (13, 1), (15, 3)):
        scheduler = make_scheduler(max_num_seqs=8, num_blocks=64)
        seqs = [add(scheduler, range(1, num_tokens + 1)) for _ in range(8)]
        batch = scheduler.schedule()
        assert work(batch) == [(0, num_tokens)] + [(num_tokens - rest, rest)] * 7
        shared = {tuple(blocks(seq)[: (num_tokens - rest) // 4]) for seq in seqs}
        assert len(shared) == 1
        update(scheduler, batch)
        run(scheduler)


def test_prompts_of_which_the_last_token_is_left_are_a_decode():
    scheduler = make_scheduler()
    for prompt in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6]):
        add(scheduler, prompt, max_tokens=1)
    assert not step(scheduler)[0].as_decode  # (0, 5) and (4, 1): not of one token each
    seqs = [add(scheduler, [1, 2, 3, 4, token]) for token in (5, 6, 7)]
    batch, _ = step(scheduler)
    assert work(batch) == [(4, 1)] * 3 and batch.as_decode and batch.is_prefill
    assert scheduler.running == seqs
    assert not step(scheduler)[0].is_prefill


def test_prompts_that_need_more_than_a_decode_are_none():
    scheduler = make_scheduler(budget=2)
    add(scheduler, [1]).num_prompt_logprobs = 2
    assert work(batch := step(scheduler)[0]) == [(0, 1)] and not batch.as_decode
    add(scheduler, [1, 2, 3])
    assert not step(scheduler)[0].as_decode
    assert work(batch := step(scheduler)[0]) == [(2, 1)] and batch.as_decode  # the rest
    scheduler.reset()
    scheduler.max_num_batched_tokens = 1
    add(scheduler, [1, 2])
    assert work(batch := step(scheduler)[0]) == [(0, 1)] and not batch.as_decode  # a chunk


def test_prompt_that_reads_what_the_step_writes_is_no_decode():
    """The second one's first block is full once the first one's last token is stored."""
    for second, cached, as_decode in (([1, 2, 3, 8, 5], 4, False), ([9], 0, True)):
        scheduler = make_scheduler(budget=3)
        add(scheduler, [1, 2, 3, 8]), add(scheduler, second)
        assert work(step(scheduler)[0]) == [(0, 3)]
        batch, _ = step(scheduler)
        assert sorted(work(batch)) == sorted([(3, 1), (cached, 1)])
        assert batch.as_decode == as_decode


def test_chunk_of_a_prompt_is_shared_as_far_as_it_is_computed():
    scheduler = make_scheduler(budget=10)
    for _ in range(2):
        add(scheduler, range(1, 15))
    assert work(scheduler.schedule()) == [(0, 10)]
    assert work(scheduler.schedule()) == [(10, 4), (12, 2)]


def test_bad_logits_seen_late_leave_nothing_in_the_cache():
    scheduler = make_scheduler()
    seq = add(scheduler, [1, 2, 3, 4, 5])
    first, second = scheduler.schedule(), scheduler.schedule()
    assert update(scheduler, first, -1) == [seq]
    assert update(scheduler, second) == []
    assert (seq.finish_reason, seq.completion_token_ids.tolist()) == ("error", [])
    assert_idle(scheduler)
    add(scheduler, [1, 2, 3, 4, 5])
    assert work(step(scheduler)[0]) == [(0, 5)]


def test_nobody_is_preempted_while_a_step_is_in_flight():
    """The tokens of the preempted must be known, and the step may end another."""
    scheduler = make_scheduler(num_blocks=3, max_model_len=12)
    first, second = add(scheduler, [1, 2, 3]), add(scheduler, [4, 5, 6])
    prefill, decode = scheduler.schedule(), scheduler.schedule()
    assert blocks(first) == [0] and blocks(second) == [1]
    assert scheduler.schedule() is None  # both need a block for the fifth token, and one is free
    assert (blocks(first), blocks(second), scheduler.num_preemptions) == ([0, 2], [1], 0)
    update(scheduler, prefill)
    assert scheduler.schedule() is None
    update(scheduler, decode)
    batch = scheduler.schedule()
    assert (batch.rows.tolist(), batch.new_blocks.tolist()) == ([first.row], [2])
    assert scheduler.num_preemptions == 1 and list(scheduler.waiting) == [second]
    assert second.token_ids.tolist() == [4, 5, 6, 5, 5]


def test_end_of_another_makes_a_preemption_unnecessary():
    scheduler = make_scheduler(num_blocks=3, max_model_len=12)
    first, second = add(scheduler, [1, 2, 3]), add(scheduler, [4, 5, 6])
    prefill, decode = scheduler.schedule(), scheduler.schedule()
    assert scheduler.schedule() is None
    update(scheduler, prefill)
    assert update(scheduler, decode, [EOS, 5]) == [first]  # with the block it was just given
    batch = scheduler.schedule()
    assert (batch.rows.tolist(), scheduler.num_preemptions) == ([second.row], 0)
    assert batch.new_blocks.tolist() == [2] and blocks(second) == [1, 2]


def test_abort_drops_the_tokens_in_flight():
    scheduler = make_scheduler()
    aborted, kept = add(scheduler, [1, 2, 3]), add(scheduler, [4, 5, 6])
    first, second = scheduler.schedule(), scheduler.schedule()
    update(scheduler, first, [7, 8])
    scheduler.abort([aborted])
    assert update(scheduler, second, [9, 10]) == []
    assert aborted.token_ids.tolist() == [1, 2, 3, 7]
    assert kept.token_ids.tolist() == [4, 5, 6, 8, 10]
    scheduler.abort([kept])
    assert_idle(scheduler)


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
        assert all(seq.finish_reason == "abort" for seq in dropped)


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


def test_reset_forgets_steps_in_flight():
    """Their tokens never come: without them it must still be able to preempt."""
    scheduler = make_scheduler(num_blocks=3, max_model_len=12)
    add_unique(scheduler, 2, 3)
    for _ in range(2):
        scheduler.schedule()
    scheduler.reset()
    add_unique(scheduler, 2, 3)
    run(scheduler)
    assert scheduler.num_preemptions > 0


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
