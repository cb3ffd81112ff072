"""A Sequence before, in and after its row of the SequenceTable."""

import numpy as np
import pytest

from nanovllm.engine.sequence import Sequence, SequenceStatus, SequenceTable
from nanovllm.sampling_params import SamplingParams


def make_sequence(tokens=(7, 3, 9), max_len=16, **params) -> Sequence:
    return Sequence(tokens, SamplingParams(**params), max_len)


def make_table(num_rows=2) -> SequenceTable:
    return SequenceTable(num_rows, max_model_len=16, block_size=4)


@pytest.mark.parametrize("make_ids", [list, tuple, np.array])
def test_prompt_is_copied(make_ids):
    ids = make_ids([7, 3, 9])
    seq = make_sequence(ids)
    if not isinstance(ids, tuple):
        ids[0] = 5
    assert seq.token_ids.tolist() == [7, 3, 9]
    assert seq.token_ids.dtype == np.int32


def test_ids_count_up():
    assert make_sequence().seq_id < make_sequence().seq_id < make_sequence().seq_id


def test_new_sequence_waits_without_row_blocks_or_output():
    seq = make_sequence()
    assert seq.status is SequenceStatus.WAITING
    assert (seq.row, seq.finish_reason, seq.num_cached_tokens) == (None, None, 0)
    assert (len(seq), seq.num_tokens, seq.num_prompt_tokens, seq.last_token) == (3, 3, 3, 9)
    assert seq.block_table.tolist() == seq.completion_token_ids.tolist() == []


@pytest.mark.parametrize(
    ("max_tokens", "stop_len"), [(1, 4), (12, 15), (13, 16), (14, 16), (10**12, 16), (None, 16)]
)
def test_request_stops_at_max_tokens_or_at_the_longest_length(max_tokens, stop_len):
    assert make_sequence(max_tokens=max_tokens).stop_len == stop_len


@pytest.mark.parametrize("num_tokens", [0, 16, 17])
def test_prompt_that_leaves_no_room_for_a_token_is_our_own_mistake(num_tokens):
    """The PromptReader refuses these with a ValueError; here they would be a bug of ours."""
    with pytest.raises(AssertionError):
        make_sequence(range(num_tokens))


def test_row_holds_the_state_while_the_sequence_is_admitted():
    table = make_table()
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.5)
    seq = Sequence([7, 3, 9], params, 16, seed=2**63 - 1)
    seq.enter(table)
    assert seq.row == 0
    assert table.sequences == [seq, None]
    assert table.seq_ids.tolist() == [seq.seq_id, -1]
    assert (table.stop_len[0], table.ignore_eos[0], table.temperatures[0]) == (8, True, 0.5)
    assert table.seeds[0] == 2**63 - 1
    assert np.shares_memory(seq.token_ids, table.token_ids)
    table.token_ids[0, 3] = 11
    table.num_tokens[0] = 4
    table.num_cached_tokens[0] = 3
    table.block_tables[0, 0] = 6
    table.num_blocks[0] = 1
    assert (seq.num_tokens, seq.num_cached_tokens, seq.last_token) == (4, 3, 11)
    assert seq.block_table.tolist() == [6]
    assert seq.completion_token_ids.tolist() == [11]


def test_left_row_starts_afresh_and_the_sequence_keeps_its_tokens():
    table = make_table(num_rows=1)
    seq = make_sequence()
    seq.enter(table)
    table.token_ids[0, 3] = 11
    table.num_tokens[0], table.num_cached_tokens[0] = 4, 3
    seq.leave()
    assert (seq.row, seq.num_cached_tokens, table.sequences) == (None, 0, [None])
    assert table.seq_ids.tolist() == [-1]
    other = make_sequence([1])
    other.enter(table)
    assert (other.row, other.token_ids.tolist(), other.num_cached_tokens) == (0, [1], 0)
    assert seq.token_ids.tolist() == [7, 3, 9, 11]  # not a view of the row that other now owns
    other.leave()
    seq.enter(table)  # admitted again, as after a preemption
    assert (seq.token_ids.tolist(), seq.num_cached_tokens) == ([7, 3, 9, 11], 0)
    assert seq.completion_token_ids.tolist() == [11]


def test_row_is_not_left_with_blocks_in_it():
    """The blocks would never come back: nothing remembers them but the row."""
    table = make_table()
    seq = make_sequence()
    seq.enter(table)
    table.num_blocks[0] = 1
    with pytest.raises(AssertionError, match="blocks"):
        seq.leave()


def test_table_has_room_for_the_longest_sequence_at_any_block_size():
    for block_size, num_blocks in [(1, 33), (4, 9), (32, 2), (33, 1), (256, 1)]:
        table = SequenceTable(2, max_model_len=33, block_size=block_size)
        assert table.token_ids.shape == (2, 33)
        assert table.block_tables.shape == (2, num_blocks)
