"""Scheduler: decides what each step computes, and moves sequences on when its tokens arrive.

It owns the waiting queue, the running set and the BlockManager. It knows token ids and block ids,
never tensors. Prefill goes first; when nothing can be admitted, every running sequence decodes
one token. When a running sequence needs a block and none is free, the most recently admitted one
is preempted and later recomputed, mostly from the prefix cache.

schedule() may be called again before update() has heard what the last step sampled: lengths, slots
and ends by length are known without the tokens. An EOS is then seen one step late, and the token
that the sequence got meanwhile is dropped. Its blocks may be handed out at once, although that
step may still be writing to them, because all steps run in order on one stream. For the same reason
a prompt's full blocks are in the prefix cache as soon as they are scheduled: a later step reads
what an earlier one wrote, and in a prefill each layer stores all K/V before it attends, so that
prompts that begin alike are computed once in a step too. Of the output only tokens that were read
back are hashed.
"""

import itertools
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from nanovllm.engine.batching import build_decode, build_prefill
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.prefix_groups import DecodeOrder, keep_rows
from nanovllm.engine.prefix_order import order_by_prefix
from nanovllm.engine.sequence import (
    IntArray,
    ScheduledBatch,
    Sequence,
    SequenceStatus,
    SequenceTable,
)
from nanovllm.outputs import FinishReason

_MAX_DECODES_BETWEEN_PREFILLS = 16
_WINDOW = 512  # prompts that policy "prefix" brings into order at a time


class Scheduler:
    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        eos_token_ids: Iterable[int],
        policy: str = "fcfs",
        is_grouped: bool = True,
    ) -> None:
        """max_model_len: longest sequence of the model; see max_len for what the pool can hold.

        policy: "fcfs", first come first served; "prefix": of the next _WINDOW waiting prompts
            those that share a prefix follow each other, and nobody waits for more than these.
        is_grouped: whether a decode step tells which of its rows share blocks.
        """
        # A decode step computes one token for each running sequence, so the token budget bounds
        # them too; and each holds at least one block.
        self.max_num_running = min(max_num_seqs, max_num_batched_tokens, num_blocks)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.policy, self.is_grouped = policy, is_grouped
        self.block_size, self.num_blocks = block_size, num_blocks
        self.eos_token_ids = sorted(set(eos_token_ids))
        # A sequence of this many tokens fits the pool when it runs alone, so progress is certain.
        self.max_len = min(max_model_len, num_blocks * block_size)
        self.waiting: deque[Sequence] = deque()
        self.reset()

    def reset(self) -> None:
        """Drop every request and the whole prefix cache: the state after construction."""
        self.waiting.clear()
        self.table = SequenceTable(self.max_num_running, self.max_len, self.block_size)
        self.block_manager = BlockManager(self.num_blocks, self.block_size, self.table)
        self._running: IntArray = np.empty(0, np.int32)  # rows, in order of admission
        self._order = DecodeOrder(self.table, self.block_size, self.is_grouped)
        self._refused: tuple[Sequence | None, int] = (None, 0)  # see _admit
        self._num_inflight_steps = 0
        self._num_decodes_since_prefill = 0
        self._num_ordered = 0  # at the head of the queue, by policy "prefix"
        self.num_preemptions = 0

    @property
    def running(self) -> list[Sequence]:
        """The sequences that decode, in order of admission."""
        return [self._sequence(row) for row in self._running.tolist()]

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def is_finished(self) -> bool:
        return not self.waiting and not len(self._running)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        """End a running sequence, after the update that brought its last token."""
        self._finish(seq, reason)
        self._running = self._running[self.table.seq_ids[self._running] >= 0]

    def abort(self, seqs: Iterable[Sequence]) -> None:
        """Drop these sequences wherever they are, between two steps; blocks and rows come back."""
        for seq in seqs:
            if seq.status is SequenceStatus.FINISHED:
                continue
            if seq.status is SequenceStatus.WAITING:
                with suppress(ValueError):  # an interrupt came before it was added
                    self.waiting.remove(seq)
            else:
                self._running = self._running[self._running != seq.row]
            if seq.row is not None:
                self._release(seq)
            seq.status = SequenceStatus.FINISHED
            seq.finish_reason, seq.finished_at = "abort", time.perf_counter()
        self._num_ordered = min(self._num_ordered, len(self.waiting))

    def schedule(self) -> ScheduledBatch | None:
        """The next step's work; None when there is none, or none before update() was called."""
        self.block_manager.begin_step()
        batch = self._schedule_prefill() or self._schedule_decode()
        if batch is not None:
            self._num_inflight_steps += 1
            ends = batch.num_cached_tokens + batch.num_scheduled_tokens
            self.table.num_cached_tokens[batch.rows] = ends
        return batch

    def update(self, batch: ScheduledBatch, token_ids: npt.NDArray[np.integer]) -> list[Sequence]:
        """Store a step's sampled tokens and return the sequences that finished.

        Steps are updated in the order they were scheduled.
        token_ids: int [number of True in batch.is_sampled], -1 where the logits were not finite.
        """
        self._num_inflight_steps -= 1
        table = self.table
        # Gone since: finished by the step before, or aborted. Their rows may have new owners.
        is_here = table.seq_ids[batch.rows] == batch.seq_ids
        token_ids = token_ids[is_here[batch.is_sampled]]
        if not batch.is_prefill:
            starts, counts = batch.num_cached_tokens, batch.num_scheduled_tokens
            fills_block = (starts % self.block_size + counts >= self.block_size) & is_here
            for i in fills_block.nonzero()[0].tolist():
                self._publish(self._sequence(batch.rows[i]), int(starts[i]), int(counts[i]))
        rows = batch.rows[batch.is_sampled & is_here]
        lens = table.num_tokens[rows]
        table.token_ids[rows, lens] = token_ids
        is_bad = token_ids < 0
        table.num_tokens[rows] = lens + ~is_bad  # what is not a token is not kept
        is_eos = np.zeros(len(rows), np.bool_)
        for eos in self.eos_token_ids:
            is_eos |= token_ids == eos
        is_eos &= ~table.ignore_eos[rows]
        if np.count_nonzero(table.has_stop_ids[rows]):
            for i in table.has_stop_ids[rows].nonzero()[0].tolist():
                seq, token = self._sequence(rows[i]), int(token_ids[i])
                if token in (seq.sampling_params.stop_token_ids or ()) and not is_eos[i]:
                    is_eos[i], seq.stop_reason = True, token
        if batch.is_prefill:
            now = time.perf_counter()
            for row in rows.tolist():
                seq = self._sequence(row)
                seq.first_token_at = seq.first_token_at or now
        is_done = is_eos | is_bad | (lens + 1 >= table.stop_len[rows])
        if not np.count_nonzero(is_done):  # in numpy much cheaper than any()
            return []
        finished = []
        for i in is_done.nonzero()[0].tolist():
            reason: FinishReason = "error" if is_bad[i] else "stop" if is_eos[i] else "length"
            finished.append(self._finish(self._sequence(rows[i]), reason))
        self._running = self._running[table.seq_ids[self._running] >= 0]
        return finished

    def _has_chunk_waiting(self) -> bool:
        return bool(self.waiting) and self.waiting[0].row is not None

    # -- prefill ---------------------------------------------------------------------------------

    def _schedule_prefill(self) -> ScheduledBatch | None:
        """Admit from the head of the queue while budget, rows and blocks allow."""
        if not self._is_prefill_worthwhile():
            self._num_decodes_since_prefill += 1
            return None
        if self.policy == "prefix" and not self._num_ordered:
            self._order_window()
        budget = self.max_num_batched_tokens
        rows, counts = list[int](), list[int]()
        while self.waiting and budget > 0:
            seq = self.waiting[0]
            if seq.row is None and not self._admit(seq, num_holders=len(self._running) + len(rows)):
                break
            assert seq.row is not None
            num_left = seq.num_tokens - seq.num_cached_tokens
            count = min(num_left, budget)
            rows.append(seq.row)
            counts.append(count)
            budget -= count
            self._publish(seq, seq.num_cached_tokens, count)
            if count < num_left:
                break  # a chunk: the sequence stays at the head, with its blocks, for the rest
            self.waiting.popleft()
            self._num_ordered = max(self._num_ordered - 1, 0)
            seq.status = SequenceStatus.RUNNING
        if not rows:
            return None
        self._num_decodes_since_prefill = 0
        admitted = np.array(rows, np.int32)
        ordered, groups = self._order.of_prefill(admitted, counts)
        batch = build_prefill(self.table, ordered, counts, self.block_manager.copies, groups)
        # In order of admission, whatever the batch's; a chunk comes last and does not run yet.
        self._running = np.concatenate([self._running, admitted[: batch.is_sampled.sum()]])
        return batch

    def _order_window(self) -> None:
        """Bring the next prompts that wait into the order in which they are admitted."""
        window = list(itertools.islice(self.waiting, _WINDOW))
        # What was admitted before has its place: it holds blocks, or gave way to others.
        num_old = sum(seq.num_hit_tokens is not None for seq in window)
        chains = [self.block_manager.prompt_hashes(seq) for seq in window[num_old:]]
        is_cached = self.block_manager.is_cached
        window[num_old:] = order_by_prefix(window[num_old:], chains, is_cached)
        for _ in window:
            self.waiting.popleft()
        self.waiting.extendleft(reversed(window))
        self._num_ordered = len(window)

    def _is_prefill_worthwhile(self) -> bool:
        """False while decoding on is better than admitting the few that would find a row.

        A prefill of a few short prompts takes about as long as one of many, and every running
        sequence waits for it. So rows are left to gather, up to an eighth of them, or for
        _MAX_DECODES_BETWEEN_PREFILLS steps.
        """
        if not len(self._running) or self._has_chunk_waiting():
            return True
        num_free = len(self.table.free_rows)
        return (
            num_free * 8 >= self.max_num_running
            or num_free >= len(self.waiting)
            or self._num_decodes_since_prefill >= _MAX_DECODES_BETWEEN_PREFILLS
        )

    def _admit(self, seq: Sequence, num_holders: int) -> bool:
        """Give a waiting sequence a row and blocks; False when there is no room now.

        Each of the num_holders sequences already holding blocks will soon want one more, so as
        many stay free: admitting into the last block only buys a preemption. A sequence that was
        refused is tried again when there is more room than then: looking up a long cached prefix
        at every step would cost as much as the step.
        """
        room = self.block_manager.num_free_blocks - num_holders
        refused, refused_room = self._refused
        if not self.table.free_rows or (seq is refused and room <= refused_room):
            return False
        seq.enter(self.table)
        if self.block_manager.allocate(seq, num_reserved=num_holders):
            if seq.num_hit_tokens is None:  # not so when it comes back after a preemption
                seq.num_hit_tokens, seq.admitted_at = seq.num_cached_tokens, time.perf_counter()
            return True
        seq.leave()
        self._refused = (seq, room)
        assert num_holders > 0, "a sequence that fits the pool found no room in an empty one"
        return False

    # -- decode ----------------------------------------------------------------------------------

    def _schedule_decode(self) -> ScheduledBatch | None:
        """One token for each running sequence that goes on, after making room for it."""
        table, size = self.table, self.block_size
        # All tokens but the newest are cached, so that one stands here, read back or not.
        rows, groups = self._order.of(self._running)
        starts = table.num_cached_tokens[rows]
        # With an unread token a sequence may have reached its end already.
        goes_on = starts + 1 < table.stop_len[rows]
        if np.count_nonzero(goes_on) < len(rows):
            rows, starts, groups = rows[goes_on], starts[goes_on], keep_rows(groups, goes_on)
        new_blocks = np.full(len(rows), -1, np.int32)
        for i in (starts % size == 0).nonzero()[0].tolist():
            row, index = int(rows[i]), int(starts[i]) // size
            # Not so where an earlier call came this far, nor once the row has been preempted.
            while table.num_blocks[row] == index and not self.block_manager.append_block(row):
                # Which tokens a preempted sequence has must be known, and a step that is read
                # back may finish another and make this unnecessary.
                if self._num_inflight_steps:
                    return None
                self._preempt(self._sequence(self._running[-1]))
            new_blocks[i] = table.block_tables[row, index]
        is_kept = table.seq_ids[rows] >= 0
        if np.count_nonzero(is_kept) < len(rows):  # some were preempted
            rows, starts, new_blocks = rows[is_kept], starts[is_kept], new_blocks[is_kept]
            groups = keep_rows(groups, is_kept)
        return build_decode(table, rows, starts, new_blocks, groups) if len(rows) else None

    def _preempt(self, seq: Sequence) -> None:
        assert len(self._running) > 1, "the last running sequence was preempted"
        self._running = self._running[:-1]
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting.appendleft(seq)
        self._num_ordered += self._num_ordered > 0
        self.num_preemptions += 1

    # -- shared ----------------------------------------------------------------------------------

    def _publish(self, seq: Sequence, start: int, count: int) -> None:
        """Publish the blocks that these tokens, from position start on, fill."""
        first, last = start // self.block_size, (start + count) // self.block_size
        if first < last:
            self.block_manager.publish(seq, first, last)

    def _finish(self, seq: Sequence, reason: FinishReason) -> Sequence:
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.finished_at = time.perf_counter()
        self._release(seq, forget=reason == "error")
        return seq

    def _release(self, seq: Sequence, forget: bool = False) -> None:
        self.block_manager.free(seq, forget)
        seq.leave()

    def _sequence(self, row: int) -> Sequence:
        seq = self.table.sequences[row]
        assert seq is not None, f"row {row} has no sequence"
        return seq
