"""BlockManager: paged KV blocks and the prefix cache, as integer ids; it never touches a device.

A block that is full and whose K/V is written before anybody could read it (see the scheduler) is
*published*: a later prompt that starts with the same tokens finds it. Look-up goes by a chained
xxh64 hash, but a hash never decides. Each published block remembers its tokens and the content id
of its parent, content ids are never used twice, so equal tokens under an equal parent id means an
equal prefix all the way down.

    tokens      | t0 .. t3 | t4 .. t7 | t8 t9           block size 4
    hash        |  h0=H(tokens, 0)    | (not full, no hash)
                |          |  h1=H(tokens, h0)
    content id  |   17     |   18     |
    parent id   |    0     |   17     |                 0 is "no parent"

A prompt that leaves a published block half way may copy the K/V of the tokens that it shares with
it into a block of its own. Copies are made ahead of all else in the step that the prompt is
scheduled for, so their sources must have been written by a step before.

A freed block keeps its content and waits in the free queue. The queue is taken from the left, the
least recently freed first, and a sequence frees its blocks in reverse, so tails go before the
prefixes that others may share.
"""

from collections import OrderedDict
from itertools import islice

import numpy as np
import numpy.typing as npt
import xxhash

from nanovllm.engine.sequence import Sequence, SequenceTable

_ROOT = 0  # content id of the empty prefix


class BlockManager:
    MIN_COPIED_TOKENS = 64  # below, computing them takes no longer than a copy's launch
    MAX_SOURCES = 8  # blocks looked at for one to copy from

    def __init__(self, num_blocks: int, block_size: int, table: SequenceTable) -> None:
        """num_blocks blocks of block_size tokens, handed out to the rows of table."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._table = table
        self._ref_counts = [0] * num_blocks
        self._hashes: list[int | None] = [None] * num_blocks  # None: holds no published content
        self._content_ids = [_ROOT] * num_blocks
        self._parent_ids = [_ROOT] * num_blocks
        self._tokens: npt.NDArray[np.int32] = np.empty((num_blocks, block_size), np.int32)
        self._hash_to_block: dict[int, int] = {}
        self._children: dict[int, dict[int, None]] = {}  # parent id -> published blocks, in order
        self._new: set[int] = set()  # published in this step, which has yet to write them
        self.copies: list[tuple[int, int, int]] = []  # of this step: source, target, tokens
        # Of the prompt looked up last, whole blocks: tokens, hashes, content ids of those found.
        self._last_tokens: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._last_hashes: list[int] = []
        self._last_ids: list[int] = []
        # Insertion order is queue order; removal from the middle is O(1), which a deque's is not.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._next_content_id = _ROOT + 1

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def compute_hash(self, tokens: npt.NDArray[np.int32], parent_hash: int) -> int:
        """The chained hash of one full block, int32 [block_size], under its parent's hash."""
        return xxhash.xxh64_intdigest(tokens.data, seed=parent_hash)

    def begin_step(self) -> None:
        """What is allocated and published from here on is the next step's."""
        self.copies = []
        self._new.clear()

    def allocate(self, seq: Sequence, num_reserved: int = 0) -> bool:
        """Give an admitted sequence blocks for all its tokens, taking cached ones where it can, and
        note the copy of what it shares with another one.

        Sets its num_cached_tokens. Returns False, having changed nothing, when the pool cannot
        serve it and keep num_reserved blocks free.
        """
        hits = self._find_cached_blocks(seq)
        num_new = -(-seq.num_tokens // self.block_size) - len(hits)
        num_free_hits = [self._ref_counts[block] for block in hits].count(0)
        if num_new + num_free_hits + num_reserved > len(self._free):
            return False
        for block in hits:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1
        source, num_copied = self._find_source(seq, hits)
        blocks = hits + [self._take_free_block() for _ in range(num_new)]
        if num_copied:
            self.copies.append((source, blocks[len(hits)], num_copied))
        self._table.block_tables[seq.row, : len(blocks)] = blocks
        self._table.num_blocks[seq.row] = len(blocks)
        self._table.num_cached_tokens[seq.row] = len(hits) * self.block_size + num_copied
        return True

    def append_block(self, row: int) -> bool:
        """Add one block to the end of a row's table; False when none is free."""
        if not self._free:
            return False
        n, block = self._table.num_blocks[row], self._take_free_block()
        self._table.block_tables[row, n] = block
        self._table.num_blocks[row] = n + 1
        return True

    def publish(self, seq: Sequence, first_block: int, last_block: int) -> None:
        """Make blocks [first_block, last_block) of a sequence's table findable.

        Call it once nothing can be scheduled that reads them before they are written, in order.
        """
        hashes = self._block_hashes(seq, last_block)
        tokens, block_table = seq.token_ids, seq.block_table
        for i in range(first_block, last_block):
            block, size = int(block_table[i]), self.block_size
            if self._hashes[block] is not None:
                continue  # a hit: published already
            parent_id = _ROOT if i == 0 else self._content_ids[int(block_table[i - 1])]
            content = tokens[i * size : (i + 1) * size]
            twin = self._hash_to_block.get(hashes[i])
            if twin is not None and self._holds(twin, parent_id, content):
                # Computed twice in one step. This copy stays private, but its children belong to
                # the published chain, so it answers to the same content id.
                self._content_ids[block] = self._content_ids[twin]
                continue
            self._hashes[block] = hashes[i]
            self._parent_ids[block] = parent_id
            self._content_ids[block] = self._next_content_id
            self._next_content_id += 1
            self._tokens[block] = content
            self._hash_to_block[hashes[i]] = block
            self._children.setdefault(parent_id, {})[block] = None
            self._new.add(block)

    def free(self, seq: Sequence, forget: bool = False) -> None:
        """Release a sequence's blocks; forget: also unpublish those nobody else holds."""
        for block in reversed(seq.block_table.tolist()):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if forget:
                    self._unpublish(block)
        self._table.num_blocks[seq.row] = 0

    def _take_free_block(self) -> int:
        block, _ = self._free.popitem(last=False)
        if self._content_ids[block] != _ROOT:
            self._unpublish(block)
        self._ref_counts[block] = 1
        return block

    def _unpublish(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            siblings = self._children[self._parent_ids[block]]
            del siblings[block]
            if not siblings:
                del self._children[self._parent_ids[block]]
            if self._hash_to_block.get(block_hash) == block:
                del self._hash_to_block[block_hash]
        self._hashes[block] = None
        self._content_ids[block] = _ROOT

    def prompt_hashes(self, seq: Sequence) -> list[int]:
        """The chained hashes of the blocks that it may find in the cache."""
        num_blocks = (seq.num_tokens - 1) // self.block_size
        return self._block_hashes(seq, num_blocks)[:num_blocks]

    def is_cached(self, block_hash: int) -> bool:
        """Whether a block with this hash is published, as far as a hash tells."""
        return block_hash in self._hash_to_block

    def _find_cached_blocks(self, seq: Sequence) -> list[int]:
        # The last token is never taken from the cache: its logits are still needed.
        if seq.num_prompt_logprobs >= 0:
            return []  # they need the prompt computed
        tokens, size = seq.token_ids, self.block_size
        num_tokens = (len(tokens) - 1) // size * size
        if not num_tokens:
            return []
        # Most prompts that follow each other begin alike.
        num_alike = _num_equal(tokens[:num_tokens], self._last_tokens) // size
        if not seq.block_hashes:
            seq.block_hashes.extend(self._last_hashes[:num_alike])
        hashes, known_ids = self.prompt_hashes(seq), self._last_ids[:num_alike]
        hits: list[int] = []
        parent_id = _ROOT
        for i, block_hash in enumerate(hashes):
            block = self._hash_to_block.get(block_hash)
            if block is None:
                break
            # The same id is the same content: tokens that are known to be alike need no comparison.
            is_known = i < len(known_ids) and self._content_ids[block] == known_ids[i]
            if not is_known and not self._holds(
                block, parent_id, tokens[i * size : (i + 1) * size]
            ):
                break
            hits.append(block)
            parent_id = self._content_ids[block]
        self._last_tokens, self._last_hashes = tokens[:num_tokens].copy(), hashes
        self._last_ids = [self._content_ids[block] for block in hits]
        return hits

    def _find_source(self, seq: Sequence, hits: list[int]) -> tuple[int, int]:
        """The block that shares the most tokens with the first one that is not cached, and how
        many; or (-1, 0). The last token of a block is never copied, since who fills it publishes
        it, nor is the prompt's, whose logits are needed."""
        start = len(hits) * self.block_size
        end = min(start + self.block_size, seq.num_tokens) - 1
        best = -1, 0
        if end - start < self.MIN_COPIED_TOKENS or seq.num_prompt_logprobs >= 0:
            return best
        tokens = seq.token_ids[start:end]
        siblings = self._children.get(self._content_ids[hits[-1]] if hits else _ROOT, {})
        for block in islice(reversed(siblings), self.MAX_SOURCES):
            num_shared = _num_equal(self._tokens[block], tokens)
            if num_shared > best[1] and block not in self._new:
                best = block, num_shared
            if best[1] == len(tokens):
                break  # none has more
        return best if best[1] >= self.MIN_COPIED_TOKENS else (-1, 0)

    def _holds(self, block: int, parent_id: int, tokens: npt.NDArray[np.int32]) -> bool:
        """Whether a published block holds these tokens after this parent."""
        # As bytes, in a fifth of the time that numpy takes to compare so few.
        is_child = self._parent_ids[block] == parent_id
        return is_child and self._tokens[block].tobytes() == tokens.tobytes()

    def _block_hashes(self, seq: Sequence, num_blocks: int) -> list[int]:
        hashes, size = seq.block_hashes, self.block_size
        if len(hashes) >= num_blocks:
            return hashes
        tokens = seq.token_ids
        for i in range(len(hashes), num_blocks):
            parent_hash = hashes[-1] if hashes else 0
            hashes.append(self.compute_hash(tokens[i * size : (i + 1) * size], parent_hash))
        return hashes


def _num_equal(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """Leading tokens that are the same in both."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if np.count_nonzero(differs) else size
