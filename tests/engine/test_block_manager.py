"""Exact block ids, eviction order and prefix hits of the BlockManager."""

import numpy as np
import pytest

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence, SequenceTable
from nanovllm.sampling_params import SamplingParams

B = 4  # block size of all pools here


class Pool:
    """A BlockManager and its table, driven as the scheduler would."""

    def __init__(self, num_blocks: int, manager_class: type[BlockManager] = BlockManager) -> None:
        self.table = SequenceTable(num_rows=8, max_model_len=64, block_size=B)
        self.manager = manager_class(num_blocks, B, self.table)

    def admit(self, tokens) -> Sequence:
        """Rows and blocks for a prompt; its K/V is not written yet."""
        seq = Sequence(tokens, SamplingParams(), max_len=64)
        seq.enter(self.table)
        assert self.manager.allocate(seq)
        return seq

    def compute(self, seq: Sequence) -> None:
        """Write the K/V of all its tokens and publish the blocks they fill."""
        self.manager.publish(seq, seq.num_cached_tokens // B, seq.num_tokens // B)
        self.table.num_cached_tokens[seq.row] = seq.num_tokens

    def run(self, tokens) -> Sequence:
        seq = self.admit(tokens)
        self.compute(seq)
        return seq

    def append(self, seq: Sequence, token: int) -> None:
        self.table.token_ids[seq.row, seq.num_tokens] = token
        self.table.num_tokens[seq.row] += 1

    def finish(self, seq: Sequence, forget: bool = False) -> None:
        self.manager.free(seq, forget)
        seq.leave()

    def hits(self, tokens) -> list[int]:
        """The blocks that a prompt would take from the cache."""
        return self.manager._find_cached_blocks(Sequence(tokens, SamplingParams(), max_len=64))

    @property
    def free_queue(self) -> list[int]:
        return list(self.manager._free)


def blocks(seq: Sequence) -> list[int]:
    return seq.block_table.tolist()


class CollidingBlockManager(BlockManager):
    """Every block has the same hash."""

    def compute_hash(self, tokens, parent_hash):
        return 1


class CountingBlockManager(BlockManager):
    num_hashed = num_compared = 0

    def compute_hash(self, tokens, parent_hash):
        self.num_hashed += 1
        return super().compute_hash(tokens, parent_hash)

    def _holds(self, *args):
        self.num_compared += 1
        return super()._holds(*args)


def test_new_pool_hands_out_blocks_in_order():
    pool = Pool(6)
    assert blocks(pool.admit(range(9))) == [0, 1, 2]
    assert blocks(pool.admit(range(10, 15))) == [3, 4]
    assert pool.free_queue == [5]
    assert pool.manager.num_free_blocks == 1


def test_freed_blocks_are_recycled_least_recently_freed_first_and_tails_first():
    pool = Pool(6)
    first, second = pool.run(range(9)), pool.run(range(20, 28))
    pool.finish(first)
    pool.finish(second)
    assert pool.free_queue == [5, 2, 1, 0, 4, 3]
    assert blocks(pool.admit(range(40, 56))) == [5, 2, 1, 0]


def test_tail_is_recycled_before_the_prefix_others_may_share():
    pool = Pool(4)
    pool.finish(pool.run(range(12)))
    pool.finish(pool.run(range(40, 48)))
    assert pool.free_queue == [1, 0, 2, 3]  # block 2, a tail, was taken; 1 and 0 are still cached
    assert blocks(pool.admit([0, 1, 2, 3, 4, 5, 6, 7, 99])) == [0, 1, 2]


def test_append_block_takes_the_next_free_block_or_says_that_there_is_none():
    pool = Pool(3)
    seq = pool.admit(range(4))
    other = pool.admit(range(8, 12))
    assert pool.manager.append_block(seq.row)
    assert blocks(seq) == [0, 2]
    assert not pool.manager.append_block(other.row)
    assert blocks(other) == [1]


@pytest.mark.parametrize(
    ("num_tokens", "num_hits"),
    [(1, 0), (B - 1, 0), (B, 0), (B + 1, 1), (2 * B - 1, 1), (2 * B, 1), (2 * B + 1, 2)],
)
def test_repeated_prompt_takes_all_but_its_last_token_s_block_from_the_cache(num_tokens, num_hits):
    """A prompt of whole blocks, all of them cached, left nothing to compute and no logits (R01).

    Only exact multiples of the block size showed it, so both sides of each are here.
    """
    pool = Pool(8)
    first = pool.run(range(num_tokens))
    second = pool.admit(range(num_tokens))
    assert second.num_cached_tokens == num_hits * B < num_tokens
    assert blocks(second)[:num_hits] == blocks(first)[:num_hits]
    assert not set(blocks(second)[num_hits:]) & set(blocks(first))


def test_hit_on_a_free_block_takes_it_out_of_the_free_queue():
    pool = Pool(4)
    pool.finish(pool.run(range(9)))
    assert pool.free_queue == [3, 2, 1, 0]
    seq = pool.admit(range(6))
    assert blocks(seq) == [0, 3]
    assert seq.num_cached_tokens == B
    assert pool.free_queue == [2, 1]
    assert blocks(pool.admit(range(50, 58))) == [2, 1]


def test_shared_block_stays_held_until_its_last_holder_frees_it():
    pool = Pool(4)
    first = pool.run(range(5))
    second = pool.run(range(5))
    assert (blocks(first), blocks(second)) == ([0, 1], [0, 2])
    pool.finish(first)
    assert pool.free_queue == [3, 1]
    pool.finish(second)
    assert pool.free_queue == [3, 1, 2, 0]


def test_recycled_block_is_no_longer_found_under_its_old_tokens():
    """A stale entry let a later prompt read another prompt's keys (R04).

    The pool holds one prompt only, so the second one must recycle the first one's blocks.
    """
    pool = Pool(3)
    pool.finish(pool.run(range(9)))
    pool.finish(pool.run(range(20, 32)))
    assert pool.hits(range(10)) == []
    assert pool.hits(range(20, 33)) == [2, 1, 0]


def test_recycled_block_leaves_the_entry_of_a_block_that_replaced_it():
    """Block 1 took over the hash of block 0; recycling 0 must not make 1 unfindable."""
    pool = Pool(3, CollidingBlockManager)
    old = pool.run([1, 1, 1, 1])
    new = pool.run([2, 2, 2, 2])
    assert (blocks(old), blocks(new)) == ([0], [1])
    pool.finish(old)
    pool.admit([7, 7])  # block 2
    pool.admit([8, 8])  # block 0 is recycled
    assert pool.hits([2, 2, 2, 2, 5]) == [1]


def test_equal_hash_is_no_hit_for_other_tokens():
    pool = Pool(4, CollidingBlockManager)
    pool.run([1, 2, 3, 4])
    assert pool.hits([5, 6, 7, 8, 9]) == []


def test_equal_hash_and_tokens_are_no_hit_under_another_prefix():
    """Comparing a block's own tokens says nothing about what came before them.

    With one hash value, the second prompt is sure to find the first one's second block: the same
    tokens, after another prefix.
    """
    pool = Pool(8, CollidingBlockManager)
    first = pool.run([1, 1, 1, 1, 9, 9, 9, 9])
    assert (blocks(first), pool.manager._hash_to_block) == ([0, 1], {1: 1})
    assert pool.hits([9, 9, 9, 9, 5]) == []


def test_cached_prefix_ends_at_the_first_missing_block():
    pool = Pool(5)
    pool.finish(pool.run(range(12)))
    pool.admit(range(40, 52))  # blocks 3, 4 and the tail, 2
    assert pool.hits(range(13)) == [0, 1]


def test_allocation_that_does_not_fit_changes_nothing():
    pool = Pool(4)
    pool.finish(pool.run(range(5)))
    held = pool.admit(range(30, 34))
    assert blocks(held) == [2]
    queue = pool.free_queue
    assert queue == [3, 1, 0]
    seq = Sequence(range(16), SamplingParams(), 64)  # block 0 is a hit, and free: 4 are needed
    seq.enter(pool.table)
    assert not pool.manager.allocate(seq)
    assert (pool.free_queue, blocks(seq), seq.num_cached_tokens) == (queue, [], 0)
    pool.finish(held)
    assert not pool.manager.allocate(seq, num_reserved=1)
    assert pool.manager.allocate(seq)
    assert blocks(seq) == [0, 3, 1, 2]


def test_block_in_use_that_is_hit_costs_no_free_block():
    pool = Pool(4)
    pool.run(range(12))
    seq = pool.admit(range(9))
    assert blocks(seq) == [0, 1, 3]


def test_block_is_hashed_once_however_often_its_sequence_asks_for_room():
    """A head of the queue that did not fit was hashed again at every step.

    Here: 50 refusals, admission, decoding over a block's end, release and admission again hash
    each of the three blocks once.
    """
    pool = Pool(5, CountingBlockManager)
    held = pool.admit([9, 9])
    seq = Sequence(range(10), SamplingParams(), 64)
    seq.enter(pool.table)
    for _ in range(50):
        assert not pool.manager.allocate(seq, num_reserved=2)
    assert pool.manager.num_hashed == 2
    assert pool.manager.allocate(seq)
    pool.manager.publish(seq, 0, 2)
    pool.append(seq, 10)
    pool.append(seq, 11)
    pool.manager.publish(seq, 2, 3)
    assert pool.manager.num_hashed == 3
    pool.append(seq, 12)
    pool.finish(seq)
    seq.enter(pool.table)
    assert pool.manager.allocate(seq)
    assert seq.num_cached_tokens == 3 * B
    assert pool.manager.num_hashed == 3
    pool.finish(held)


def test_what_a_prompt_shares_with_the_last_one_is_neither_hashed_nor_compared_again():
    """64 samples of a prompt of 4,096 tokens cost 1,024 hashes and comparisons, 4 ms."""
    pool = Pool(8, CountingBlockManager)
    pool.run(range(12))
    done = pool.manager.num_hashed, pool.manager.num_compared
    assert pool.hits(range(13)) == [0, 1, 2]
    assert (pool.manager.num_hashed, pool.manager.num_compared) == (done[0] + 1, done[1] + 3)
    for _ in range(10):
        assert pool.hits(range(13)) == [0, 1, 2]
    assert (pool.manager.num_hashed, pool.manager.num_compared) == (done[0] + 1, done[1] + 3)
    assert pool.hits([*range(6), *range(40, 47)]) == [0]  # parts in the second block
    assert (pool.manager.num_hashed, pool.manager.num_compared) == (done[0] + 3, done[1] + 3)
    assert pool.hits([9, *range(1, 13)]) == []
    assert pool.hits(range(4)) == []


def test_a_block_recycled_since_the_last_prompt_is_no_hit():
    """All hashes are equal, and the block that the last prompt found holds other tokens now."""
    pool = Pool(1, CollidingBlockManager)
    pool.finish(pool.run([1, 2, 3, 4]))
    assert pool.hits([1, 2, 3, 4, 5]) == [0]
    pool.finish(pool.run([6, 7, 8, 9]))
    pool.manager._last_tokens[:] = [1, 2, 3, 4]  # as if that one had not been looked up
    assert pool.hits([1, 2, 3, 4, 5]) == []
    assert pool.hits([6, 7, 8, 9, 5]) == [0]


def test_hash_names_the_whole_prefix():
    pool = Pool(8)
    first = pool.run([1] * B + [2] * B)
    second = pool.run([3] * B + [2] * B)
    assert len({*first.block_hashes, *second.block_hashes}) == 4


def test_blocks_filled_by_decoding_are_found_too():
    pool = Pool(4)
    seq = pool.run([1, 2, 3])
    pool.append(seq, 4)
    pool.compute(seq)
    assert pool.hits([1, 2, 3, 4, 5]) == [0]


def test_unwritten_block_is_not_found():
    """Published at allocation, a block would be read by a neighbour before it was written."""
    pool = Pool(4)
    pool.admit(range(5))
    assert pool.hits(range(5)) == []


def test_second_copy_of_a_block_stays_private_and_its_children_join_the_published_chain():
    """Two equal prompts of one step compute the same block twice; one copy is published."""
    pool = Pool(8)
    first, second = pool.admit(range(4)), pool.admit(range(8))
    assert (blocks(first), blocks(second)) == ([0], [1, 2])
    pool.compute(first)
    pool.compute(second)
    third = pool.admit(range(9))
    assert blocks(third) == [0, 2, 3]
    pool.finish(second)
    assert pool.free_queue == [4, 5, 6, 7, 1]


def test_content_of_a_failed_step_is_forgotten_unless_someone_else_holds_it():
    pool = Pool(6)
    healthy = pool.run(range(5))
    failed = pool.run(range(9))
    assert (blocks(healthy), blocks(failed)) == ([0, 1], [0, 2, 3])
    pool.finish(failed, forget=True)
    assert pool.hits(range(9)) == [0]


@pytest.mark.parametrize("block_size", [1, 3, 256])
def test_any_block_size_works(block_size):
    table = SequenceTable(4, 3 * block_size, block_size)
    manager = BlockManager(8, block_size, table)
    for expected in (0, 1):
        seq = Sequence(np.arange(block_size + 1), SamplingParams(), 3 * block_size)
        seq.enter(table)
        assert manager.allocate(seq)
        assert seq.num_cached_tokens == expected * block_size
        manager.publish(seq, expected, 1)
