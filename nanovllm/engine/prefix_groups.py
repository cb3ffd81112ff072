"""Which running sequences share leading blocks, so that attention can read these once for all.

Two sequences share a block when their tables name the same one: the prefix cache gave it to both.
Whoever shares stands together in the batch. A group is a run of rows and a run of their leading
blocks; groups nest, and what is left of a row's context is its own. Four rows, blocks of 256:

    row   block table              group (rows 0-4, blocks 0-2), below it (rows 0-2, blocks 2-4)
     0    7 2 | 5 8 | 1 4
     1    7 2 | 5 8 | 3            work list for items of up to 2 rows and 2 blocks:
     2    7 2 | 6                    item   rows 0-2, keys    0-512     slot 0
     3    7 2 | 9 0                  item   rows 2-4, keys    0-512     slot 0
                                     item   rows 0-2, keys  512-1024    slot 1
                                     own starts  1024 1024 512 512      partial starts  0 2 4 5 6

An item's result for row r is partial number (partial start of r + slot), and attention of the row
ends by merging its partials with its own part. Full blocks only are shared, written by steps before
this one, and no row starts or stops sharing while it decodes: all this stays until a row comes or
goes.
"""

import numpy as np
import numpy.typing as npt

from nanovllm.engine.sequence import IntArray, SequenceTable

MAX_LEVELS = 4  # of groups in groups
NO_GROUPS: IntArray = np.empty((0, 4), np.int32)


class DecodeOrder:
    """The order in which running sequences decode, and their groups; kept until one comes or goes.

    Longest first: attention over a long context must not start last. All contexts grow alike, so
    that the order stays and a step sends the device no new rows.
    """

    MIN_ROWS = 4  # of a group: reading for three, an item's tile of query rows is mostly empty
    MIN_SAVED = 1024  # keys that a group does not read again; below, it costs more than it saves

    def __init__(self, table: SequenceTable, block_size: int, is_grouped: bool) -> None:
        self._table, self._block_size, self._is_grouped = table, block_size, is_grouped
        self._running = self._rows = np.empty(0, np.int32)
        self._seq_ids = np.empty(0, np.int64)
        self._groups = NO_GROUPS

    def of(self, running: IntArray) -> tuple[IntArray, IntArray]:
        """The rows in order and their groups, int32 [num_groups, 4] as find_groups gives them."""
        if running is not self._running:
            is_here = self._table.seq_ids[self._rows] == self._seq_ids
            if np.count_nonzero(is_here) == len(running):  # some have left
                self._rows = self._rows[is_here]
                self._groups = keep_rows(self._groups, is_here)
            else:
                self._sort(running)
            self._running, self._seq_ids = running, self._table.seq_ids[self._rows]
        return self._rows, self._groups

    def _sort(self, running: IntArray) -> None:
        num_cached = self._table.num_cached_tokens
        self._rows = running[np.argsort(-num_cached[running], kind="stable")]
        self._groups = NO_GROUPS
        if self._is_grouped:
            num_full = num_cached // self._block_size
            min_saved = self.MIN_SAVED // self._block_size
            self._rows, self._groups = find_groups(
                self._rows, self._table.block_tables, num_full, self.MIN_ROWS, min_saved
            )


def find_groups(
    rows: IntArray, tables: IntArray, num_full: IntArray, min_rows: int, min_saved: int
) -> tuple[IntArray, IntArray]:
    """Bring rows of these block tables together by what they share, else as they stand.

    tables: int32 [num_rows, width]. num_full: int32 [num_rows] leading blocks that are full.
    min_rows: of a group. min_saved: blocks that a group must save reading again.
    Returns the rows in order and groups, int32 [num_groups, 4]: first row and end among these,
    first block and end. A group comes before those in it, and these begin at the block it ends at.
    """
    order: list[int] = []
    groups: list[tuple[int, int, int, int]] = []

    def part(members: list[int], depth: int, level: int) -> None:
        """Put rows that share their first `depth` blocks in order, and find groups among them."""
        column = tables[members, min(depth, tables.shape[1] - 1)]
        column = np.where(num_full[members] > depth, column, -1).tolist()
        sharers: dict[int, list[int]] = {}
        for row, block in zip(members, column, strict=True):
            sharers.setdefault(block, []).append(row)
        ends = {block: find_end(alike, depth) for block, alike in sharers.items() if block >= 0}
        for row, block in zip(members, column, strict=True):
            end, alike = ends.get(block, 0), sharers[block]
            if not end:
                order.append(row)
            elif row == alike[0]:  # the others move to where the first one stands
                groups.append((len(order), len(order) + len(alike), depth, end))
                if level < MAX_LEVELS:
                    part(alike, end, level + 1)
                else:
                    order.extend(alike)

    def find_end(alike: list[int], depth: int) -> int:
        """The block up to which rows share all from this one on; 0 if they are no group."""
        if len(alike) < min_rows:
            return 0
        shared = tables[alike, depth : num_full[alike].min()]
        differs = (shared != shared[0]).any(0)
        size = int(differs.argmax()) if np.count_nonzero(differs) else len(differs)
        return depth + size if (len(alike) - 1) * size >= min_saved else 0

    part(rows.tolist(), 0, 1)
    return np.array(order, np.int32), np.array(groups, np.int32).reshape(-1, 4)


def keep_rows(groups: IntArray, is_kept: npt.NDArray[np.bool_]) -> IntArray:
    """The groups once only these rows are left."""
    places = np.concatenate([[0], np.cumsum(is_kept)])
    groups = np.concatenate([places[groups[:, :2]], groups[:, 2:]], 1).astype(np.int32)
    return groups[groups[:, 0] < groups[:, 1]]


def max_partials(num_rows: int) -> int:
    """Partial results, and items, that a batch of so many rows may have."""
    return max(MAX_LEVELS * num_rows, 1024)


def work_list(
    groups: IntArray, num_rows: int, block_size: int, rows_per_item: int, keys_per_item: int
) -> dict[str, IntArray]:
    """The groups as items of about this size, in arrays whose shapes depend on num_rows alone.

    Returns the arrays of a SharedPrefixes, see utils/context.py.
    """
    first_rows, first_blocks = groups[:, 0], groups[:, 2]
    group_rows, group_blocks = groups[:, 1] - first_rows, groups[:, 3] - first_blocks
    capacity, blocks_per_item = max_partials(num_rows), max(keys_per_item // block_size, 1)
    while (group_rows * -(-group_blocks // blocks_per_item)).sum() > capacity:
        blocks_per_item *= 2
    pieces, tiles = -(-group_blocks // blocks_per_item), -(-group_rows // rows_per_item)
    own_starts, num_partials = np.zeros((2, num_rows), np.int32)
    slots = np.zeros(len(groups), np.int32)
    for i, (first, end, _, end_block) in enumerate(groups.tolist()):
        slots[i] = num_partials[first]
        num_partials[first:end] += pieces[i]
        own_starts[first:end] = end_block * block_size
    counts = pieces * tiles
    group = np.repeat(np.arange(len(groups)), counts)
    piece, tile = np.divmod(
        np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts), tiles[group]
    )

    def bounds(first: IntArray, size: IntArray, part: IntArray, num_parts: IntArray) -> IntArray:
        """Where even parts of each group begin and end: int [num_items, 2]."""
        ends = part[:, None] + np.array([0, 1])
        return first[group][:, None] + size[group][:, None] * ends // num_parts[group][:, None]

    rows = bounds(first_rows, group_rows, tile, tiles)
    keys = bounds(first_blocks, group_blocks, piece, pieces) * block_size
    items = np.zeros((capacity, 8), np.int32)
    items[: len(group), :4] = np.concatenate([rows, keys], 1)
    items[: len(group), 4] = slots[group] + piece
    return {
        "items": items,
        "num_items": np.array([len(group)], np.int32),
        "own_starts": own_starts,
        "partial_starts": np.concatenate([[0], np.cumsum(num_partials)]).astype(np.int32),
    }
