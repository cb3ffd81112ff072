"""Groups of rows that share blocks, and the work lists made of them.

That they are right in any course of events is tested in test_state_machine.py; here is what they
look like, and what they cost.
"""

import random

import numpy as np
import pytest

from nanovllm.engine import prefix_groups
from nanovllm.engine.prefix_groups import (
    MAX_LEVELS,
    DecodeOrder,
    find_groups,
    keep_rows,
    max_partials,
    work_list,
)
from nanovllm.engine.sequence import SequenceTable

TABLES = np.array([[7, 2, 5, 8, 1, 4], [7, 2, 5, 8, 3, 0], [7, 2, 6, 0, 0, 0], [7, 2, 9, 0, 0, 0]])
NUM_FULL = np.array([5, 4, 2, 3])  # of the last row's blocks all


def groups_of(rows, min_rows=2, min_saved=0):
    found, groups = find_groups(np.array(rows), TABLES, NUM_FULL, min_rows, min_saved)
    return found.tolist(), groups.tolist()


def test_example_of_the_docstring():
    rows, groups = groups_of([0, 1, 2, 3])
    assert (rows, groups) == ([0, 1, 2, 3], [[0, 4, 0, 2], [0, 2, 2, 4]])
    groups = np.array(groups, np.int32) * [1, 1, 256, 256]
    lists = work_list(groups, 4, 256, rows_per_item=2, keys_per_item=512, num_wanted=3)
    assert lists["num_items"] == [3]
    expected = [[0, 2, 0, 512, 0], [2, 4, 0, 512, 0], [0, 2, 512, 1024, 1]]
    assert lists["items"][:3, :5].tolist() == expected
    assert lists["own_starts"].tolist() == [1024, 1024, 512, 512]
    assert lists["partial_starts"].tolist() == [0, 2, 4, 5, 6]


def test_sharers_come_together_where_the_first_one_stands():
    assert groups_of([0, 3, 1]) == ([0, 1, 3], [[0, 3, 0, 2], [0, 2, 2, 4]])
    assert groups_of([3, 1, 0], min_rows=3) == ([3, 1, 0], [[0, 3, 0, 2]])
    assert groups_of([2, 0, 3], min_rows=4) == ([2, 0, 3], [])


def test_what_saves_too_little_is_no_group():
    """Four rows save three times two blocks, two of them another two."""
    assert groups_of([0, 1, 2, 3], min_saved=6)[1] == [[0, 4, 0, 2]]
    assert groups_of([0, 1, 2, 3], min_saved=7)[1] == []


def test_blocks_that_are_not_full_are_not_shared():
    tables = np.array([[1, 2], [1, 2]])
    for num_full, groups in (([0, 2], []), ([1, 2], [[0, 2, 0, 1]]), ([2, 2], [[0, 2, 0, 2]])):
        assert find_groups(np.arange(2), tables, np.array(num_full), 2, 0)[1].tolist() == groups


def test_levels_end():
    depth = MAX_LEVELS + 2
    tables = np.array([[*range(i), *range(100 * i, 100 * i + depth - i)] for i in range(1, depth)])
    groups = find_groups(np.arange(depth - 1), tables, np.full(depth - 1, depth), 1, 0)[1]
    assert np.bincount([sum(a <= row < b for a, b, _, _ in groups) for row in range(5)]).size == (
        MAX_LEVELS + 1
    )


def test_groups_of_those_who_are_left():
    groups = np.array([[0, 4, 0, 2], [0, 2, 2, 4], [5, 8, 0, 3]])
    kept = keep_rows(groups, np.array([0, 0, 1, 1, 0, 1, 0, 1], np.bool_))
    assert kept.tolist() == [[0, 2, 0, 2], [2, 4, 0, 3]]
    assert keep_rows(groups, np.zeros(8, np.bool_)).tolist() == []


@pytest.mark.parametrize("seed", range(20))
def test_a_work_list_never_outgrows_its_room(seed):
    """Long prefixes of many rows become fewer, larger pieces."""
    rng = random.Random(seed)
    num_rows = rng.choice([4, 17, 64, 512])
    tables = np.arange(num_rows * 160).reshape(num_rows, 160)
    for depth in (0, 3, 60, 90):
        for first in range(0, num_rows, step := rng.choice([2, 8, 64, 512])):
            end = rng.randint(depth, 160)
            tables[first : first + step, depth:end] = tables[first, depth:end]
    tables[:, :3] = tables[0, :3]
    rows, groups = find_groups(np.arange(num_rows), tables, np.full(num_rows, 160), 2, 0)
    groups *= np.array([1, 1, 16, 16], np.int32)
    lists = work_list(groups, num_rows, 16, rng.choice([1, 4, 32]), 16, 1 << 20)
    assert sorted(rows.tolist()) == list(range(num_rows))
    assert len(lists["items"]) == max_partials(num_rows) >= lists["num_items"][0] > 0
    assert lists["partial_starts"][-1] <= max_partials(num_rows)


def test_items_are_as_large_as_keeps_their_number_down():
    groups = np.array([[0, 64, 0, 2048], [64, 80, 0, 1280]], np.int32)
    for num_wanted, expected in ((21, 21), (20, 11), (10, 6), (5, 3), (1, 3)):
        lists = work_list(groups, 80, 64, 32, 256, num_wanted)
        assert lists["num_items"][0] == expected
        ends = lists["items"][:expected, 2:4]
        assert (ends % 64 == 0).all() and ends.max() == 2048


def make_table(prompts, size=256, num_shared=1):
    """Rows of these tokens, K/V of all but the last one stored; they share so many blocks."""
    table = SequenceTable(len(prompts), 4096, size)
    table.block_tables[:] = np.arange(table.block_tables.size).reshape(table.block_tables.shape)
    table.block_tables[:, :num_shared] = table.block_tables[0, :num_shared]
    table.token_ids[:] = 0
    for row, tokens in enumerate(prompts):
        table.token_ids[row, : len(tokens)] = tokens
        table.num_tokens[row], table.num_cached_tokens[row] = len(tokens), len(tokens) - 1
    table.seq_ids[:] = np.arange(len(prompts))
    return table


def found_in(table, size=256):
    running = np.arange(len(table.num_tokens), dtype=np.int32)
    return DecodeOrder(table, size, True).of(running)[1].tolist()


def test_a_group_goes_on_while_its_rows_have_the_same_tokens(monkeypatch):
    monkeypatch.setattr(DecodeOrder, "MIN_SAVED", 0)
    head = list(range(1, 511))
    assert found_in(make_table([[*head, 600 + i] for i in range(5)])) == [[0, 5, 0, 448]]
    alike = [[*range(1, 577), 600 + i] for i in range(5)]
    assert found_in(make_table(alike)) == [[0, 5, 0, 512]], "a block at most"
    alike[3][300] = 0
    assert found_in(make_table(alike)) == [[0, 5, 0, 256]]
    alike[3][300], alike[3][330] = 301, 0
    assert found_in(make_table(alike)) == [[0, 5, 0, 320]]
    assert found_in(make_table([head[:320]] * 5)) == [[0, 5, 0, 256]], "319 are stored"
    table = make_table([head[:384]] * 5)
    table.num_tokens[2] = 319  # the others of its tokens were not read back
    assert found_in(table) == [[0, 5, 0, 256]]
    assert found_in(make_table([head] * 5, size=96), size=96) == [[0, 5, 0, 192]], "whole blocks"


def test_a_group_with_another_in_it_ends_where_that_begins(monkeypatch):
    monkeypatch.setattr(DecodeOrder, "MIN_SAVED", 0)
    table = make_table([[*range(1, 700), i] for i in range(8)])
    table.block_tables[4:, 1] = table.block_tables[4, 1]
    assert found_in(table) == [[0, 8, 0, 256], [4, 8, 256, 640]]


def test_nothing_is_done_while_nothing_changes(monkeypatch):
    table = SequenceTable(512, 4096, 256)
    table.block_tables[:] = np.arange(512 * 16).reshape(512, 16)
    table.block_tables[:, :8] = table.block_tables[0, :8]
    table.num_cached_tokens[:] = np.arange(2048, 2560)
    table.token_ids[:, 2048] = np.arange(512)
    table.num_tokens[:] = table.num_cached_tokens + 1
    table.seq_ids[:] = np.arange(512)
    order = DecodeOrder(table, 256, True)
    running = np.arange(500, dtype=np.int32)
    rows, groups = order.of(running)
    assert rows[:3].tolist() == [499, 498, 497] and groups.tolist() == [[0, 500, 0, 2048]]
    monkeypatch.setattr(prefix_groups, "find_groups", None)
    table.num_cached_tokens += 1
    again = order.of(running)
    assert again[0] is rows and again[1] is groups
    # Nor is it all done again when some leave, whoever has their rows now.
    table.seq_ids[[3, 499]] = -1, 700
    rows, groups = order.of(np.setdiff1d(running, [3, 499]))
    assert rows[:2].tolist() == [498, 497] and groups.tolist() == [[0, 498, 0, 2048]]
    monkeypatch.undo()
    rows, groups = order.of(np.concatenate([np.setdiff1d(running, [3, 499]), [499]]))
    assert groups.tolist() == [[0, 499, 0, 2048]] and rows[0] == 499
