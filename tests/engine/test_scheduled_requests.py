"""What requests brought to the scheduler: ends by stop ids and by text, special rows, prompt
log-probabilities, and the order of decoding."""

import numpy as np
import pytest
from test_scheduler import (
    EOS,
    add,
    assert_idle,
    make_scheduler,
    step,
    update,
    work,
)

from nanovllm.engine.sequence import RowAsk, Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams

PROMPT = range(1, 10)  # two full blocks of four and a token


def add_special(scheduler, tokens, **params) -> Sequence:
    seq = Sequence(tokens, SamplingParams(**params), scheduler.max_len)
    seq.ask = RowAsk(seq.seq_id, seq.sampling_params, seq.num_prompt_tokens, 0, (), (), None)
    scheduler.add(seq)
    return seq


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_ids_end_a_request_and_say_which(ignore_eos):
    scheduler = make_scheduler()
    plain = add(scheduler, [1, 2, 3])
    stops = add(scheduler, [4, 5, 6], stop_token_ids=[8, 9], ignore_eos=ignore_eos)
    assert step(scheduler, [9, 7])[1] == []
    assert step(scheduler, [8, 9])[1] == [stops]
    assert (stops.finish_reason, stops.stop_reason) == ("stop", 9)
    assert stops.completion_token_ids.tolist() == [7, 9]
    assert (plain.finish_reason, plain.stop_reason) == (None, None)


def test_eos_beside_stop_ids_has_no_stop_reason():
    scheduler = make_scheduler()
    stops = add(scheduler, [1, 2], stop_token_ids=[8])
    goes_on = add(scheduler, [3, 4], stop_token_ids=[8], ignore_eos=True)
    assert step(scheduler, EOS)[1] == [stops]
    assert (stops.finish_reason, stops.stop_reason) == ("stop", None)
    assert step(scheduler, 8)[1] == [goes_on]
    assert goes_on.stop_reason == 8


def test_stop_id_wins_over_a_length_reached_with_it():
    scheduler = make_scheduler()
    seq = add(scheduler, [1, 2], stop_token_ids=[8], max_tokens=1)
    assert step(scheduler, 8)[1] == [seq]
    assert (seq.finish_reason, seq.stop_reason) == ("stop", 8)


def test_next_owner_of_a_row_has_no_stop_ids_of_the_last_one():
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, [1, 2], stop_token_ids=[8], max_tokens=1)
    seq = add(scheduler, [3, 4])
    step(scheduler)
    assert step(scheduler, 8)[1] == [] and seq.completion_token_ids.tolist() == [8]


@pytest.mark.parametrize("depth", [0, 1])
def test_end_gives_row_and_blocks_back_at_once(depth):
    """In the middle of the running ones, and with a step in flight that computes it once more."""
    scheduler = make_scheduler()
    seqs = [add(scheduler, [10 * i, 2, 3]) for i in range(1, 4)]
    batches = [scheduler.schedule() for _ in range(depth + 1)]
    update(scheduler, batches[0], [5, 6, 7])
    scheduler.end(seqs[1], "stop")
    assert seqs[1].status is SequenceStatus.FINISHED and seqs[1].finish_reason == "stop"
    assert seqs[1].completion_token_ids.tolist() == [6] and seqs[1].finished_at > 0
    assert scheduler.running == [seqs[0], seqs[2]]
    assert scheduler.block_manager.num_free_blocks == 14 and len(scheduler.table.free_rows) == 2
    for batch in batches[1:]:
        assert update(scheduler, batch, [8, 8, 8]) == []
    batch, _ = step(scheduler)
    assert batch.rows.tolist() == [seqs[0].row, seqs[2].row]
    assert seqs[1].completion_token_ids.tolist() == [6]
    scheduler.end(seqs[0], "stop"), scheduler.end(seqs[2], "stop")
    assert_idle(scheduler)


def test_blocks_of_an_ended_request_are_found_again():
    scheduler = make_scheduler()
    seq = add(scheduler, PROMPT)
    step(scheduler)
    scheduler.end(seq, "stop")
    add(scheduler, PROMPT)
    assert work(step(scheduler)[0]) == [(8, 1)]


# -- special rows ----------------------------------------------------------------------------------


def special_of(batch):
    return [
        (x.place, x.row, x.num_tokens, None if x.token_ids is None else x.token_ids.tolist())
        for x in batch.special
    ]


def test_special_rows_are_named_in_prefill_and_decode():
    scheduler = make_scheduler()
    plain, special = add(scheduler, [1, 2]), add_special(scheduler, [3, 4, 5], top_k=2)
    batch, _ = step(scheduler)
    assert special_of(batch) == [(1, special.row, 3, [3, 4, 5])] and batch.is_redrawn
    assert batch.special[0].ask is special.ask
    batch, _ = step(scheduler)
    place = batch.rows.tolist().index(special.row)
    assert special_of(batch) == [(place, special.row, 4, None)] and batch.is_redrawn
    scheduler.end(special, "stop")
    batch, _ = step(scheduler)
    assert batch.special == () and not batch.is_redrawn and batch.rows.tolist() == [plain.row]


def test_special_row_counts_the_token_in_flight():
    scheduler = make_scheduler()
    add_special(scheduler, [1, 2, 3])
    batches = [scheduler.schedule() for _ in range(4)]
    assert [x[2] for batch in batches for x in special_of(batch)] == [3, 4, 5, 6]


def test_chunk_is_special_once_it_is_sampled():
    """And its place counts sampled rows only."""
    scheduler = make_scheduler(budget=6)
    first = add_special(scheduler, [1, 2, 3])
    chunked = add_special(scheduler, range(10, 18))
    batch, _ = step(scheduler)
    assert work(batch) == [(0, 3), (0, 3)]
    assert special_of(batch) == [(0, first.row, 3, [1, 2, 3])]
    batch, _ = step(scheduler)
    assert special_of(batch) == [(0, chunked.row, 8, list(range(10, 18)))]


def test_special_prompt_that_is_cached_still_brings_all_its_tokens():
    scheduler = make_scheduler()
    add(scheduler, PROMPT)
    step(scheduler)
    seq = add_special(scheduler, PROMPT)
    batch, _ = step(scheduler)
    assert work(batch) == [(8, 1)] and special_of(batch) == [(0, seq.row, 9, list(PROMPT))]


def test_preempted_special_row_brings_its_output_too():
    scheduler = make_scheduler(num_blocks=3, max_model_len=12)
    first, second = add_special(scheduler, [1, 2, 3]), add_special(scheduler, [4, 5, 6])
    step(scheduler, [7, 8]), step(scheduler, [9, 10])
    scheduler.schedule()
    assert scheduler.num_preemptions == 1 and list(scheduler.waiting) == [second]
    scheduler.abort([first])
    batch = scheduler.schedule()
    assert special_of(batch) == [(0, second.row, 5, [4, 5, 6, 8, 10])]


def test_special_token_ids_stay_what_they_were():
    """A batch may be looked at after the row has moved on."""
    scheduler = make_scheduler()
    seq = add_special(scheduler, [1, 2, 3])
    batch = scheduler.schedule()
    scheduler.abort([seq])
    add(scheduler, [7, 8, 9])
    scheduler.schedule()
    assert batch.special[0].token_ids.tolist() == [1, 2, 3]


# -- log-probabilities of prompts ------------------------------------------------------------------


def add_with_prompt_logprobs(scheduler, tokens, num, **params):
    seq = Sequence(tokens, SamplingParams(**params), scheduler.max_len)
    seq.num_prompt_logprobs = num
    scheduler.add(seq)
    return seq


def test_batch_without_prompt_logprobs_carries_nothing_for_them():
    scheduler = make_scheduler()
    add(scheduler, PROMPT)
    batch = scheduler.schedule()
    assert len(batch.prompt_logprobs) == len(batch.next_ids) == 0


def test_next_ids_are_the_tokens_that_follow():
    """At the end of the prompt none does; what the last owner of the row left is not looked at."""
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, range(70, 90), max_tokens=1)
    step(scheduler)
    add_with_prompt_logprobs(scheduler, [1, 2, 3], 2)
    add(scheduler, [4, 5])
    batch = scheduler.schedule()
    assert batch.prompt_logprobs.tolist() == [2, -1]
    assert batch.next_ids.tolist() == [2, 3, 0, 5, 0]
    assert batch.next_ids.dtype == batch.prompt_logprobs.dtype == np.int32


def test_next_ids_reach_into_the_next_chunk():
    scheduler = make_scheduler(budget=4)
    add_with_prompt_logprobs(scheduler, PROMPT, 0)
    batches = [scheduler.schedule() for _ in range(3)]
    assert [batch.prompt_logprobs.tolist() for batch in batches] == [[0]] * 3
    assert [x for batch in batches for x in batch.next_ids.tolist()] == [*range(2, 10), 0]


def test_prompt_with_logprobs_is_computed_whole_and_its_other_samples_are_not():
    scheduler = make_scheduler()
    add(scheduler, PROMPT)
    step(scheduler)
    first = add_with_prompt_logprobs(scheduler, PROMPT, 1)
    second = add(scheduler, PROMPT)
    assert work(step(scheduler)[0]) == [(0, 9), (8, 1)]
    assert (first.num_hit_tokens, second.num_hit_tokens) == (0, 8)


# -- order of decoding -----------------------------------------------------------------------------


def test_longest_contexts_decode_first_and_equal_ones_by_admission():
    scheduler = make_scheduler(max_num_seqs=5)
    seqs = [add(scheduler, range(10 * i, 10 * i + n)) for i, n in enumerate([2, 6, 4, 6, 9])]
    step(scheduler)
    expected = [seqs[i].row for i in (4, 1, 3, 2, 0)]
    for _ in range(3):
        assert step(scheduler)[0].rows.tolist() == expected
    assert scheduler.running == seqs


def test_order_is_worked_out_again_only_for_other_sequences(monkeypatch):
    orders = []
    argsort = np.argsort
    monkeypatch.setattr(np, "argsort", lambda *a, **k: orders.append(a) or argsort(*a, **k))
    scheduler = make_scheduler()
    short, long = add(scheduler, [1, 2]), add(scheduler, range(10, 15))
    for _ in range(5):
        step(scheduler)
    assert len(orders) == 1
    longer = add(scheduler, range(30, 50))
    step(scheduler)
    for _ in range(3):
        assert step(scheduler)[0].rows.tolist() == [longer.row, long.row, short.row]
    assert len(orders) == 2
    scheduler.end(long, "stop")
    for _ in range(3):
        assert step(scheduler)[0].rows.tolist() == [longer.row, short.row]
    assert len(orders) == 2, "those who are left keep theirs"


def test_tokens_find_their_sequence_whatever_the_order():
    scheduler = make_scheduler()
    seqs = [add(scheduler, range(10 * i, 10 * i + n)) for i, n in enumerate([1, 7, 3, 5])]
    step(scheduler, [100, 101, 102, 103])
    batch = scheduler.schedule()
    update(scheduler, batch, (200 + batch.rows).tolist())
    assert all(seq.last_token == 200 + seq.row for seq in seqs)
