"""From rows of the SequenceTable to the ScheduledBatch of a step. What is in it is up to others."""

from collections.abc import Iterator

import numpy as np

from nanovllm.engine.sequence import IntArray, ScheduledBatch, SequenceTable, SpecialRow

# Tokens of a step, one for each choice of kernels and configurations below the largest prefill's;
# tests/engine/test_precompile.py finds any that is missing.
_PREFILL_SIZES = (1, 2, 8, 16, 32, 48, 128, 256, 512)


def build_prefill(
    table: SequenceTable,
    rows: IntArray,
    count_list: list[int],
    copies: list[tuple[int, int, int]],
    groups: IntArray | None = None,
) -> ScheduledBatch:
    """Compute so many tokens more of each row's sequence, after these copies within the cache.

    groups: of a prefill that may be computed as a decode, else None.
    """
    counts = np.array(count_list, np.int32)
    starts = table.num_cached_tokens[rows]
    ends = starts + counts
    is_sampled = ends == table.num_tokens[rows]
    pieces = list(map(slice, starts.tolist(), ends.tolist()))
    prompt_logprobs, next_ids = table.prompt_logprobs[rows], np.empty(0, np.int32)
    if prompt_logprobs.max() < 0:
        prompt_logprobs = next_ids
    else:
        next_ids = np.zeros(int(counts.sum()), np.int32)  # 0 after a row's last token
        for row, piece, at in zip(rows, pieces, np.cumsum(counts) - counts, strict=True):
            end = min(piece.stop + 1, table.num_tokens[row])
            following = table.token_ids[row, piece.start + 1 : end]
            next_ids[at : at + len(following)] = following
    special = _special_rows(table, rows[is_sampled], ends[is_sampled], is_prefill=True)
    return ScheduledBatch(
        is_prefill=True,
        rows=rows,
        seq_ids=table.seq_ids[rows],
        num_cached_tokens=starts,
        num_scheduled_tokens=counts,
        is_sampled=is_sampled,
        all_greedy=not table.temperatures[rows[is_sampled]].any(),
        as_decode=groups is not None,
        input_ids=np.concatenate(
            [table.token_ids[r, piece] for r, piece in zip(rows.tolist(), pieces, strict=True)]
        ),
        block_tables=table.block_tables[rows, : table.num_blocks[rows].max()],
        temperatures=table.temperatures[rows],
        seeds=table.seeds[rows],
        prompt_logprobs=prompt_logprobs,
        next_ids=next_ids,
        copies=np.array(copies, np.int32).reshape(-1, 3),
        groups=np.empty((0, 4), np.int32) if groups is None else groups,
        special=special,
        is_redrawn=bool(special),
    )


def _special_rows(
    table: SequenceTable, rows: IntArray, num_tokens: IntArray, is_prefill: bool
) -> tuple[SpecialRow, ...]:
    """rows: those that are sampled, in order; num_tokens: prompt and output of each so far."""
    special = []
    for index in table.is_special[rows].nonzero()[0].tolist():
        row, n = int(rows[index]), int(num_tokens[index])
        token_ids = table.token_ids[row, :n].copy() if is_prefill else None
        seq = table.sequences[row]
        assert seq is not None and seq.ask is not None, f"row {row} asks for nothing"
        special.append(SpecialRow(index, row, n, token_ids, seq.ask))
    return tuple(special)


def build_decode(
    table: SequenceTable, rows: IntArray, starts: IntArray, new_blocks: IntArray, groups: IntArray
) -> ScheduledBatch:
    """One token of each row's sequence, at position starts; the rest as ScheduledBatch's."""
    special = _special_rows(table, rows, starts + 1, is_prefill=False)
    return ScheduledBatch(
        is_prefill=False,
        rows=rows,
        seq_ids=table.seq_ids[rows],
        num_cached_tokens=starts,
        num_scheduled_tokens=np.ones(len(rows), np.int32),
        is_sampled=np.ones(len(rows), np.bool_),
        all_greedy=not np.count_nonzero(table.temperatures[rows]),
        new_blocks=new_blocks,
        groups=groups,
        special=special,
        is_redrawn=bool(special),
    )


def warm_up_batch(seq_lens: list[int], block_size: int, num_cached: int = 0) -> ScheduledBatch:
    """A prefill of zeros with these lengths after num_cached tokens, sampled at random."""
    lens = np.array(seq_lens, np.int32)
    n = len(lens)
    return ScheduledBatch(
        is_prefill=True,
        rows=np.arange(n, dtype=np.int32),
        seq_ids=np.arange(n),
        num_cached_tokens=np.full(n, num_cached, np.int32),
        num_scheduled_tokens=lens,
        is_sampled=np.ones(n, np.bool_),
        all_greedy=False,
        input_ids=np.zeros(lens.sum(), np.int32),
        block_tables=np.zeros((n, -(-(int(lens.max()) + num_cached) // block_size)), np.int32),
        temperatures=np.ones(n, np.float32),
        seeds=np.zeros(n, np.int64),
    )


def kinds_of_prefill(
    num_rows: int, longest: int, most: int, block_size: int
) -> Iterator[ScheduledBatch]:
    """Prefills that launch, with the largest one, every kernel that any may: with and without
    cached context, of few sequences and many, of few tokens and many.

    num_rows: sequences of a step at most. longest: tokens of each. most: of the step.
    """
    lens = [split_tokens(n, longest) for n in _PREFILL_SIZES if n <= most]
    kinds = [(each, 1) for each in lens if len(each) <= num_rows]
    for num_seqs in {min(2, num_rows), min(257, num_rows)}:
        kinds += [([min(16, longest)] * num_seqs, num_cached) for num_cached in (0, 1)]
    for each, num_cached in kinds:
        yield warm_up_batch(each, block_size, num_cached)


def split_tokens(num_tokens: int, longest: int) -> list[int]:
    """Lengths of sequences that have so many tokens together."""
    num_full, rest = divmod(num_tokens, longest)
    return [longest] * num_full + [rest] * (rest > 0)
