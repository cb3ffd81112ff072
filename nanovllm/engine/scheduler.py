"""Scheduler: decides what each step computes, and moves sequences on when its tokens arrive.

It owns the waiting queue, the running set and the BlockManager. It knows token ids and block ids,
never tensors. Prefill goes first; when nothing can be admitted, every running sequence decodes
one token. When a running sequence needs a block and none is free, the most recently admitted one
is preempted and later recomputed, mostly from the prefix cache.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import (
    IntArray,
    ScheduledBatch,
    Sequence,
    SequenceStatus,
    SequenceTable,
)
from nanovllm.outputs import FinishReason


class Scheduler:
    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        eos_token_ids: Iterable[int],
    ) -> None:
        """max_model_len: longest sequence of the model; see max_len for what the pool can hold."""
        # A decode step computes one token for each running sequence, so the token budget bounds
        # them too; and each holds at least one block.
        self.max_num_running = min(max_num_seqs, max_num_batched_tokens, num_blocks)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.eos_token_ids = sorted(set(eos_token_ids))
        # A sequence of this many tokens fits the pool when it runs alone, so progress is certain.
        self.max_len = min(max_model_len, num_blocks * block_size)
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self.reset()

    def reset(self) -> None:
        """Drop every request and the whole prefix cache: the state after construction."""
        self.waiting.clear()
        self.table = SequenceTable(self.max_num_running, self.max_len, self.block_size)
        self.block_manager = BlockManager(self.num_blocks, self.block_size, self.table)
        self._running: IntArray = np.empty(0, np.int32)  # rows, in order of admission
        self._refused: tuple[Sequence | None, int] = (None, 0)  # see _admit

    @property
    def running(self) -> list[Sequence]:
        """The sequences that decode, in order of admission."""
        return [self._sequence(row) for row in self._running.tolist()]

    @property
    def num_running(self) -> int:
        return len(self._running)

    def is_finished(self) -> bool:
        return not self.waiting and not len(self._running)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def abort(self, seqs: Iterable[Sequence]) -> None:
        """Drop these requests wherever they are, between two steps; blocks and rows come back."""
        dropped = {seq.seq_id for seq in seqs if seq.status is not SequenceStatus.FINISHED}
        waiting, running = list(self.waiting), self.running
        self.waiting = deque(seq for seq in waiting if seq.seq_id not in dropped)
        self._running = np.array(
            [seq.row for seq in running if seq.seq_id not in dropped], np.int32
        )
        for seq in waiting + running:
            if seq.seq_id in dropped:
                if seq.row is not None:
                    self._release(seq)
                seq.status = SequenceStatus.FINISHED

    def schedule(self) -> ScheduledBatch | None:
        """The next step's work, or None when there is none."""
        return self._schedule_prefill() or self._schedule_decode()

    def update(self, batch: ScheduledBatch, token_ids: npt.NDArray[np.integer]) -> list[Sequence]:
        """Store a step's sampled tokens and return the sequences that finished.

        token_ids: int [number of True in batch.is_sampled], -1 where the logits were not finite.
        """
        self._advance(batch)
        rows = batch.rows[batch.is_sampled]
        table = self.table
        lens = table.num_tokens[rows]
        is_bad = token_ids < 0
        table.token_ids[rows, lens] = token_ids
        table.num_tokens[rows] = lens + ~is_bad  # a bad token is not part of the completion
        is_eos = np.zeros(len(rows), np.bool_)
        for eos in self.eos_token_ids:
            is_eos |= token_ids == eos
        is_eos &= ~table.ignore_eos[rows]
        is_done = is_eos | is_bad | (lens + 1 >= table.stop_len[rows])
        finished = []
        for i in is_done.nonzero()[0].tolist():
            reason: FinishReason = "error" if is_bad[i] else "stop" if is_eos[i] else "length"
            finished.append(self._finish(self._sequence(rows[i]), reason))
        if batch.is_prefill:
            rows = rows[~is_done]
            for row in rows:
                self._sequence(row).status = SequenceStatus.RUNNING
            self._running = np.concatenate([self._running, rows])
        elif finished:
            self._running = self._running[~is_done]
        return finished

    # -- prefill ---------------------------------------------------------------------------------

    def _schedule_prefill(self) -> ScheduledBatch | None:
        """Admit from the head of the queue while budget, rows and blocks allow."""
        budget = self.max_num_batched_tokens
        rows: list[int] = []
        counts: list[int] = []
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
            if count < num_left:
                break  # a chunk: the sequence stays at the head, with its blocks, for the rest
            self.waiting.popleft()
        if not rows:
            return None
        return self._build_batch(True, np.array(rows, np.int32), np.array(counts, np.int32))

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
            return True
        seq.leave()
        self._refused = (seq, room)
        assert num_holders > 0, "a sequence that fits the pool found no room in an empty one"
        return False

    # -- decode ----------------------------------------------------------------------------------

    def _schedule_decode(self) -> ScheduledBatch | None:
        """One token for each running sequence, after making room for it."""
        table, rows = self.table, self._running
        if not len(rows):
            return None
        num_held = len(rows)
        needs_block = table.num_blocks[rows] * self.block_size < table.num_tokens[rows]
        for i in needs_block.nonzero()[0].tolist():
            while i < num_held and not self.block_manager.append_block(rows[i]):
                num_held -= 1
                self._preempt(self._sequence(rows[num_held]))
        assert num_held > 0, "the last running sequence was preempted"
        self._running = rows[:num_held]
        return self._build_batch(False, self._running, np.ones(num_held, np.int32))

    def _preempt(self, seq: Sequence) -> None:
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    # -- shared ----------------------------------------------------------------------------------

    def _build_batch(self, is_prefill: bool, rows: IntArray, counts: IntArray) -> ScheduledBatch:
        table = self.table
        starts = table.num_cached_tokens[rows]
        if is_prefill:
            input_ids = np.concatenate(
                [
                    table.token_ids[r, s : s + n]
                    for r, s, n in zip(rows, starts, counts, strict=True)
                ]
            )
        else:
            input_ids = table.token_ids[rows, starts]
        is_sampled = starts + counts == table.num_tokens[rows]
        return ScheduledBatch(
            is_prefill=is_prefill,
            rows=rows,
            input_ids=input_ids,
            num_cached_tokens=starts,
            num_scheduled_tokens=counts,
            block_tables=table.block_tables[rows, : table.num_blocks[rows].max()],
            is_sampled=is_sampled,
            temperatures=table.temperatures[rows[is_sampled]],
        )

    def _advance(self, batch: ScheduledBatch) -> None:
        """Count the step's tokens as cached and publish the blocks they filled."""
        old = batch.num_cached_tokens
        new = old + batch.num_scheduled_tokens
        self.table.num_cached_tokens[batch.rows] = new
        first, last = old // self.block_size, new // self.block_size
        for i in (first != last).nonzero()[0].tolist():
            self.block_manager.publish(self._sequence(batch.rows[i]), int(first[i]), int(last[i]))

    def _finish(self, seq: Sequence, reason: FinishReason) -> Sequence:
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        self._release(seq, forget=reason == "error")
        return seq

    def _release(self, seq: Sequence, forget: bool = False) -> None:
        self.block_manager.free(seq, forget)
        seq.leave()

    def _sequence(self, row: int) -> Sequence:
        seq = self.table.sequences[row]
        assert seq is not None, f"row {row} has no sequence"
        return seq
