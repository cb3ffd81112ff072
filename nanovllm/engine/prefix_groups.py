"""Which running sequences share leading keys, so that attention can read these once for all.

Two sequences share a block when their tables name the same one: the prefix cache gave it to both.
Whoever shares stands together in the batch. A group is a run of rows and a run of their leading
keys; groups nest, and what is left of a row's context is its own. Four rows, blocks of 256:

    row   block table              group (rows 0-4, keys 0-512), below it (rows 0-2, keys 512-1024)
     0    7 2 | 5 8 | 1 4
     1    7 2 | 5 8 | 3            work list for items of up to 2 rows and 512 keys:
     2    7 2 | 6                    item   rows 0-2, keys    0-512     slot 0
     3    7 2 | 9 0                  item   rows 2-4, keys    0-512     slot 0
                                     item   rows 0-2, keys  512-1024    slot 1
                                     own starts  1024 1024 512 512      partial starts  0 2 4 5 6

An item's result for row r is partial number (partial start of r + slot), and attention of the row
ends by merging its partials with its own part. Only what steps before this one wrote is shared, and
no row starts or stops sharing while it decodes: all this stays until a row comes or goes.

Where the tables part, a group may still go on: while its rows' tokens are the same, so are their
keys, each in a block of its own, and the first row's do for all. Samples of one prompt share all of
it in this way.
"""

import numpy as np
import numpy.typing as npt

from nanovllm.engine.sequence import IntArray, SequenceTable

MAX_LEVELS = 4  # of groups in groups
KEY_STEP = 64  # groups end at multiples of a kernel's tile, unless blocks are no multiple of it
NO_GROUPS: IntArray = np.empty((0, 4), np.int32)


class DecodeOrder:
    """The order in which running sequences decode, and their groups; kept until one comes or goes.

    Groups are int32 [num_groups, 4]: first row and end in this order, first key and end.

    Longest first: attention over a long context must not start last. All contexts grow alike, so
    that the order stays and a step sends the device no new rows.
    """

    MIN_ROWS = 4  # of a group: reading for three, an item's tile of query rows is mostly empty
    MIN_SAVED = 1024  # keys that a group does not read again; below, it costs more than it saves

    def __init__(self, table: SequenceTable, block_size: int, is_grouped: bool) -> None:
        self._table, self._block_size, self._is_grouped = table, block_size, is_grouped
        self.key_step = key_step(block_size)
        self._running = self._rows = np.empty(0, np.int32)
        self._seq_ids = np.empty(0, np.int64)
        self._groups = NO_GROUPS

    def of(self, running: IntArray) -> tuple[IntArray, IntArray]:
        """The rows in order and their groups."""
        if running is not self._running:
            is_here = self._table.seq_ids[self._rows] == self._seq_ids
            if np.count_nonzero(is_here) == len(running):  # some have left
                self._rows = self._rows[is_here]
                self._groups = keep_rows(self._groups, is_here)
            else:
                self._rows, self._groups = self.sort(running)
            self._running, self._seq_ids = running, self._table.seq_ids[self._rows]
        return self._rows, self._groups

    def of_prefill(self, rows: IntArray, counts: list[int]) -> tuple[IntArray, IntArray | None]:
        """The rows in order and their groups if this prefill is a decode; else as they are."""
        return self.sort(rows) if self.is_decode(rows, counts) else (rows, None)

    def is_decode(self, rows: IntArray, counts: list[int]) -> bool:
        """Whether a prefill of so many tokens is of the last one of each prompt, asked nothing
        about, and no row reads a block that another fills in this step: a decode may read first."""
        table, size = self._table, self._block_size
        if max(counts) > 1:
            return False
        ends, num_blocks = table.num_tokens[rows], table.num_blocks[rows]
        if (table.num_cached_tokens[rows] + 1 < ends).any():
            return False
        tables = table.block_tables[rows, : num_blocks.max()]
        is_held = np.arange(tables.shape[1]) < num_blocks[:, None]
        filled = tables[ends % size == 0, ends[ends % size == 0] // size - 1]
        num_readers = np.count_nonzero(np.isin(tables, filled) & is_held)
        return num_readers == len(filled) and table.prompt_logprobs[rows].max() < 0

    def sort(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """These rows in order and their groups, which are not kept."""
        num_cached = self._table.num_cached_tokens
        rows = rows[np.argsort(-num_cached[rows], kind="stable")]
        if not self._is_grouped:
            return rows, NO_GROUPS
        num_full = num_cached // self._block_size
        min_saved = self.MIN_SAVED // self._block_size
        rows, groups = find_groups(
            rows, self._table.block_tables, num_full, self.MIN_ROWS, min_saved
        )
        return rows, self._in_keys(rows, groups)

    def _in_keys(self, sorted_rows: IntArray, groups: IntArray) -> IntArray:
        """These groups of blocks; one without another in it goes on as far as its rows are alike,
        for at most a block."""
        table, size = self._table, self._block_size
        num_known = np.minimum(table.num_cached_tokens, table.num_tokens)
        groups = groups * np.array([1, 1, size, size], np.int32)
        next_rows = [*groups[1:, 0].tolist(), len(sorted_rows)]
        for group, next_row in zip(groups, next_rows, strict=False):
            first, end, _, key = group.tolist()
            if next_row >= end:
                rows = sorted_rows[first:end]
                tokens = table.token_ids[rows, key : min(key + size, num_known[rows].min())]
                group[3] += _num_alike(tokens) // self.key_step * self.key_step
        return groups


def key_step(block_size: int) -> int:
    """What the first and the last key of a group are multiples of."""
    return block_size if block_size % KEY_STEP else KEY_STEP


def _num_alike(rows: IntArray) -> int:
    """Leading columns in which all rows are equal."""
    differs = (rows != rows[0]).any(0)
    return int(differs.argmax()) if np.count_nonzero(differs) else len(differs)


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
        size = _num_alike(tables[alike, depth : num_full[alike].min()])
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
    groups: IntArray,
    num_rows: int,
    step: int,
    rows_per_item: int,
    keys_per_item: int,
    num_wanted: int,
) -> dict[str, IntArray]:
    """The groups as items, in arrays whose shapes depend on num_rows alone.

    step: of keys, at whose multiples items begin and end.
    rows_per_item: at most. keys_per_item: as many, or twice, four times, ... as many, so that there
        are no more than num_wanted items. A row's results of several cost more than a larger one.
    Returns the arrays of a SharedPrefixes, see utils/context.py.
    """
    first_rows, first_steps = groups[:, 0], groups[:, 2] // step
    group_rows, group_steps = groups[:, 1] - first_rows, (groups[:, 3] - groups[:, 2]) // step
    capacity, steps_per_item = max_partials(num_rows), max(keys_per_item // step, 1)
    tiles = -(-group_rows // rows_per_item)
    while True:
        pieces = -(-group_steps // steps_per_item)
        has_room = (group_rows * pieces).sum() <= capacity
        if has_room and ((tiles * pieces).sum() <= num_wanted or pieces.max() == 1):
            break
        steps_per_item *= 2
    own_starts, num_partials = np.zeros((2, num_rows), np.int32)
    slots = np.zeros(len(groups), np.int32)
    for i, (first, end, _, end_key) in enumerate(groups.tolist()):
        slots[i] = num_partials[first]
        num_partials[first:end] += pieces[i]
        own_starts[first:end] = end_key
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
    keys = bounds(first_steps, group_steps, piece, pieces) * step
    items = np.zeros((capacity, 8), np.int32)
    items[: len(group), :4] = np.concatenate([rows, keys], 1)
    items[: len(group), 4] = slots[group] + piece
    return {
        "items": items,
        "num_items": np.array([len(group)], np.int32),
        "own_starts": own_starts,
        "partial_starts": np.concatenate([[0], np.cumsum(num_partials)]).astype(np.int32),
    }
