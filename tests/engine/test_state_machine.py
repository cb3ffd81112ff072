"""Scheduler and BlockManager under random calls, checked after each one (see state_machine.py).

More than the usual million: pytest tests/engine/test_state_machine.py --operations 5000000
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from state_machine import DEPTHS, GARBAGE, NUM_TOKENS, Scenario, Violation, run_scenarios

from nanovllm.engine import input_batch
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.decode_state import DecodeState
from nanovllm.engine.prefix_groups import DecodeOrder
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import SequenceStatus

NUM_SHARDS = 8


@pytest.fixture
def num_ops(request: pytest.FixtureRequest) -> int:
    """Operations of one shard."""
    return (request.config.getoption("--operations", default=None) or 1_000_000) // NUM_SHARDS


@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_no_call_breaks_an_invariant(shard: int, num_ops: int) -> None:
    counts = run_scenarios(shard, num_ops)
    assert counts["operations"] >= num_ops
    # A driver that never gets to the hard places proves nothing about them.
    if num_ops >= 100_000:
        assert counts["scenarios"] >= num_ops // 150
        for depth in DEPTHS:
            assert counts[f"operations at depth {depth}"] >= num_ops // 4, depth
        for event in ("chunks", "hit tokens", "length", "stop", "surplus", "waits"):
            assert counts[event] >= num_ops // 200, event
        assert counts["special rows"] >= num_ops // 50
        for event in ("aborts", "error", "preemptions", "resets", "rows left to gather"):
            assert counts[event] >= num_ops // 1000, event
        for event in ("ends", "ends in flight", "stop ids", "copied tokens"):
            assert counts[event] >= num_ops // 1000, event
        for event in ("prefills as decodes", "read in the step that wrote"):
            assert counts[event] >= num_ops // 1000, event
        for event in ("nested groups", "shared beyond blocks"):
            assert counts[event] >= num_ops // 1000, event
        assert counts["grouped rows"] >= num_ops // 50
        for event in ("aborts in flight", "resets in flight", "writes to another's block"):
            assert counts[event] >= num_ops // 4000, event


class ScenarioWithDecodeState(Scenario):
    """Gives each step to the engine's own state as well, and compares it with the oracle's."""

    def __init__(self, seed):
        super().__init__(seed)
        max_num_blocks = len(self.rows[0].table)
        device = torch.device("cpu")
        self.state = DecodeState.create(len(self.rows), max_num_blocks, self.block_size, device)

    def _launch(self, batch):
        if batch.is_prefill and not batch.as_decode:
            inputs = input_batch.build_prefill(batch, self.state)
        else:
            step = input_batch.enter(batch, self.state) if batch.as_decode else batch
            arrays = input_batch.decode_arrays(step, step.num_seqs)
            tensors = input_batch.to_device(arrays, self.state.num_tokens.device)
            inputs = input_batch.build_decode(**tensors, state=self.state, max_context_len=1)
        super()._launch(batch)
        step = self.inflight[-1]
        slots = [block * self.block_size + offset for block, offset, _, _ in step.writes]
        assert inputs.context.slot_mapping.tolist() == slots
        prefixes = [prefix for _, _, prefix, _ in step.writes]
        for token, prefix in zip(inputs.input_ids.tolist(), prefixes, strict=True):
            assert prefix == GARBAGE or token == self.keys[prefix] % NUM_TOKENS
        self.state.append(inputs.rows, torch.tensor(step.tokens, dtype=torch.int64))
        num_tokens, tables = self.state.num_tokens.tolist(), self.state.block_tables.tolist()
        assert num_tokens[:-1] == [row.num_tokens for row in self.rows]
        assert tables[:-1] == [row.table for row in self.rows]


def test_oracle_s_device_is_the_engine_s() -> None:
    """Or the oracle would check the scheduler against a device that does not exist."""
    totals = Counter()
    for seed in range(40):
        scenario = ScenarioWithDecodeState(seed)
        scenario.run(70)
        totals += scenario.counts
    for event in ("chunks", "surplus", "preemptions", "resets in flight", "aborts in flight"):
        assert totals[event] > 0, event


class CollidingBlockManager(BlockManager):
    """Every hash is one of 16, so nearly every look-up finds a block that is not its own."""

    def compute_hash(self, tokens, parent_hash):
        return super().compute_hash(tokens, parent_hash) % 16


def scheduler_with(block_manager_class: type[BlockManager]) -> type[Scheduler]:
    class SchedulerWithThis(Scheduler):
        def reset(self):
            super().reset()
            self.block_manager = block_manager_class(self.num_blocks, self.block_size, self.table)

    return SchedulerWithThis


@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_colliding_hashes_never_cause_a_wrong_read(shard: int, num_ops: int) -> None:
    """The reference compares a block's own tokens after a hash hit, but not its parent.

    Equal tokens under another prefix then count as a hit. With 64-bit hashes luck hides that for
    years; with 16 values it is a wrong read in about one run of thirteen.
    """
    counts = run_scenarios(100 + shard, num_ops // 5, scheduler_with(CollidingBlockManager))
    assert counts["hit tokens"] > 0


# -- The driver must be able to fail: each class below has one bug planted. ------------------------


class IgnoresTheParent(CollidingBlockManager):
    def _holds(self, block, parent_id, tokens):
        return np.array_equal(self._tokens[block], tokens)


class TrustsTheHash(CollidingBlockManager):
    def _holds(self, block, parent_id, tokens):
        return True


class PublishesAtAllocation(BlockManager):
    def allocate(self, seq, num_reserved=0):
        is_allocated = super().allocate(seq, num_reserved)
        if is_allocated:
            self.publish(seq, 0, seq.num_tokens // self.block_size)
        return is_allocated


class KeepsStaleEntries(BlockManager):
    def _unpublish(self, block):
        self._hashes[block] = None


class TakesTheLastBlockFromTheCache(BlockManager):
    def _find_cached_blocks(self, seq):
        hits = super()._find_cached_blocks(seq)
        n = len(hits)
        if (n + 1) * self.block_size == seq.num_tokens:
            parent_id = self._content_ids[hits[-1]] if hits else 0
            block_hash = self._block_hashes(seq, n + 1)[n]
            block, last = self._hash_to_block.get(block_hash), seq.token_ids[n * self.block_size :]
            if block is not None and self._holds(block, parent_id, last):
                return [*hits, block]
        return hits


class LeavesHitsInTheFreeQueue(BlockManager):
    def allocate(self, seq, num_reserved=0):
        free = set(self._free)
        is_allocated = super().allocate(seq, num_reserved)
        if is_allocated:
            num_hits = seq.num_cached_tokens // self.block_size
            self._free.update((b, None) for b in seq.block_table[:num_hits].tolist() if b in free)
        return is_allocated


class FreesSharedBlocks(BlockManager):
    def free(self, seq, forget=False):
        for block in seq.block_table.tolist():
            self._ref_counts[block] = 1
        super().free(seq, forget)


class LeaksTheFirstBlock(BlockManager):
    def free(self, seq, forget=False):
        self._ref_counts[int(seq.block_table[0])] += 1
        super().free(seq, forget)


class CachesFailedSteps(BlockManager):
    def free(self, seq, forget=False):
        super().free(seq)


class ReusesContentIds(BlockManager):
    def publish(self, seq, first_block, last_block):
        super().publish(seq, first_block, last_block)
        self._next_content_id = self._next_content_id % 50 + 1


class PreemptsWithoutFreeing(Scheduler):
    def _preempt(self, seq):
        self.table.num_blocks[seq.row] = 0
        super()._preempt(seq)


class PutsThePreemptedLast(Scheduler):
    def _preempt(self, seq):
        super()._preempt(seq)
        self.waiting.rotate(-1)


class AdmitsBeyondTheLimit(Scheduler):
    def __init__(self, *args):
        super().__init__(*args)
        self.max_num_running += 2
        self.reset()


class OverrunsTheBudget(Scheduler):
    def __init__(self, *args):
        super().__init__(*args)
        self.max_num_batched_tokens += 1


class RefusesChunks(Scheduler):
    def _schedule_prefill(self):
        if self.waiting and self.waiting[0].num_tokens > self.max_num_batched_tokens:
            return None
        return super()._schedule_prefill()


class SkipsAheadInChunks(Scheduler):
    def schedule(self):
        batch = super().schedule()
        if batch is not None:
            self.table.num_cached_tokens[batch.rows[~batch.is_sampled]] += 1
        return batch


class SamplesEveryChunk(Scheduler):
    def schedule(self):
        batch = super().schedule()
        return batch and replace(batch, is_sampled=np.ones(batch.num_seqs, np.bool_))


class PublishesBeforeTheBlockIsFull(Scheduler):
    """The newest token completes the block, but its K/V is computed by the next step."""

    def update(self, batch, token_ids):
        finished = super().update(batch, token_ids)
        size = self.block_size
        for seq in self.running:
            self.block_manager.publish(seq, seq.num_cached_tokens // size, seq.num_tokens // size)
        return finished


class StopsOneTokenLate(Scheduler):
    def update(self, batch, token_ids):
        self.table.stop_len += 1
        finished = super().update(batch, token_ids)
        self.table.stop_len -= 1
        return finished


class KnowsOneEosOnly(Scheduler):
    def __init__(self, *args):
        super().__init__(*args)
        self.eos_token_ids = self.eos_token_ids[:1]


class KeepsTheBadToken(Scheduler):
    def _finish(self, seq, reason):
        if reason == "error":
            self.table.num_tokens[seq.row] += 1
        return super()._finish(seq, reason)


class AbortsWithoutFreeing(Scheduler):
    def abort(self, seqs):
        self.waiting = type(self.waiting)(seq for seq in self.waiting if seq not in seqs)
        rows = [seq.row for seq in self.running if seq not in seqs]
        self._running = np.array(rows, np.int32)


class ResetsOnlyTheQueues(Scheduler):
    def reset(self):
        if hasattr(self, "table"):
            self.waiting.clear()
            self._running = np.empty(0, np.int32)
        else:
            super().reset()


class OrderOf(Scheduler):
    order_class: type[DecodeOrder]

    def reset(self):
        super().reset()
        self._order = self.order_class(self.table, self.block_size, True)


class GroupsByRow(OrderOf):
    """A row that ended and has a new owner since is taken for the old one."""

    class order_class(DecodeOrder):  # noqa: N801
        def of(self, running):
            self._seq_ids = self._table.seq_ids[self._rows]
            return super().of(running)


class GroupsThatStay(OrderOf):
    """Who leaves is not taken out of the groups."""

    class order_class(DecodeOrder):  # noqa: N801
        def of(self, running):
            groups = self._groups
            rows, found = super().of(running)
            if len(rows) < self.num_rows and len(groups):
                found = groups
            self.num_rows = len(rows)
            return rows, found

        num_rows = 0


class GroupsByStaleTables(OrderOf):
    """What stands in a table past its end was another owner's."""

    class order_class(DecodeOrder):  # noqa: N801
        def sort(self, rows):
            self._table.num_cached_tokens[rows] += 4 * self._block_size
            found = super().sort(rows)
            self._table.num_cached_tokens[rows] -= 4 * self._block_size
            return found


class GroupsByTokensAlone(OrderOf):
    """Where tokens are compared, how far they are stored is not asked."""

    class order_class(DecodeOrder):  # noqa: N801
        def _in_keys(self, rows, groups):
            stored = self._table.num_cached_tokens.copy()
            self._table.num_cached_tokens += 1
            groups = super()._in_keys(rows, groups)
            self._table.num_cached_tokens[:] = stored
            return groups


class GroupsThatGoOnThroughOthers(OrderOf):
    """A group goes on into the keys of the ones in it."""

    class order_class(DecodeOrder):  # noqa: N801
        def _in_keys(self, rows, groups):
            alone = [DecodeOrder._in_keys(self, rows, group[None]) for group in groups]
            return np.concatenate([groups[:0], *alone])


class DecodesWhatReadsTheStep(OrderOf):
    """A prefill as a decode, though rows read what others of it write."""

    class order_class(DecodeOrder):  # noqa: N801
        def is_decode(self, rows, counts):
            ends = self._table.num_cached_tokens[rows] + 1
            return max(counts) == 1 and (ends == self._table.num_tokens[rows]).all()


class DecodesTheMiddleOfAPrompt(OrderOf):
    """A prefill as a decode that stops short of the prompt's end."""

    class order_class(DecodeOrder):  # noqa: N801
        def is_decode(self, rows, counts):
            return max(counts) == 1


class KeepsGroupsOfRowsThatEnd(Scheduler):
    def _schedule_decode(self):
        self._order.of(self._running)
        groups = self._order._groups
        batch = super()._schedule_decode()
        return batch and replace(batch, groups=groups)


# -- with steps in flight --------------------------------------------------------------------------


class PublishesUnreadTokens(Scheduler):
    """What a step in flight will fill is hashed with whatever stands where its token will."""

    def update(self, batch, token_ids):
        finished = super().update(batch, token_ids)
        for seq in self.running:
            num_tokens, num_launched = seq.num_tokens, seq.num_cached_tokens
            self.table.num_tokens[seq.row] = num_launched
            self.block_manager.publish(seq, 0, num_launched // self.block_size)
            self.table.num_tokens[seq.row] = num_tokens
        return finished


class PublishesForTheNextOwner(Scheduler):
    def update(self, batch, token_ids):
        owners = self.table.seq_ids[batch.rows]
        is_next = (owners != batch.seq_ids) & (owners >= 0)
        for i in is_next.nonzero()[0].tolist():
            seq, start = self._sequence(batch.rows[i]), int(batch.num_cached_tokens[i])
            if start + 1 <= seq.num_tokens:
                self._publish(seq, start, 1)
        return super().update(batch, token_ids)


class KeepsSurplusTokens(Scheduler):
    def update(self, batch, token_ids):
        rows = self.table.seq_ids[batch.rows]
        return super().update(replace(batch, seq_ids=rows), token_ids)


class PreemptsWithAStepInFlight(Scheduler):
    def _schedule_decode(self):
        num_inflight_steps, self._num_inflight_steps = self._num_inflight_steps, 0
        batch = super()._schedule_decode()
        self._num_inflight_steps = num_inflight_steps
        return batch


class ForgetsUnreadTokensAtTheEnd(Scheduler):
    """Decodes on until the end has been read back."""

    def _schedule_decode(self):
        self.table.stop_len += 1
        batch = super()._schedule_decode()
        self.table.stop_len -= 1
        return batch


class NeverOverlaps(Scheduler):
    def schedule(self):
        return None if self._num_inflight_steps else super().schedule()


class NotesNewBlocks(Scheduler):
    """Not broken: it remembers for each row the block that the device has yet to hear of."""

    def reset(self):
        super().reset()
        self.new_blocks = {}
        append_block = self.block_manager.append_block

        def append_and_note(row):
            is_added = append_block(row)
            if is_added:
                self.new_blocks[row] = self.table.sequences[row].block_table[-1]
            return is_added

        self.block_manager.append_block = append_and_note

    def _admit(self, seq, num_holders):
        is_admitted = super()._admit(seq, num_holders)
        if is_admitted:
            self.new_blocks.pop(seq.row, None)
        return is_admitted

    def _schedule_decode(self):
        batch = super()._schedule_decode()
        return batch and replace(batch, new_blocks=self._take_new_blocks(batch.rows.tolist()))

    def _take_new_blocks(self, rows):
        return np.array([self.new_blocks.pop(row, -1) for row in rows], np.int32)


class RepeatsNewBlocks(NotesNewBlocks):
    def _take_new_blocks(self, rows):
        return np.array([self.new_blocks.get(row, -1) for row in rows], np.int32)


class LeavesNewBlocksToTheNextOwner(NotesNewBlocks):
    """One was added, none was left for another row, and the row was freed before the next step."""

    def _admit(self, seq, num_holders):
        return Scheduler._admit(self, seq, num_holders)


class LosesNewBlocksOfACallThatGaveUp(NotesNewBlocks):
    def _schedule_decode(self):
        self.new_blocks.clear()
        return super()._schedule_decode()


# -- with ends by text, special rows, prompts published as they are scheduled ----------------------


class PublishesWhatIsNotScheduled(Scheduler):
    """The rest of a chunked prompt is written by a later step."""

    def _publish(self, seq, start, count):
        super()._publish(seq, start, seq.num_tokens - start)


class EndsWithoutFreeing(Scheduler):
    def end(self, seq, reason):
        self._running = self._running[self._running != seq.row]
        seq.status, seq.finish_reason = SequenceStatus.FINISHED, reason


class EndsInTheQueueOnly(Scheduler):
    """The decode step goes on with a row that was given back."""

    def end(self, seq, reason):
        self._finish(seq, reason)


class IgnoresStopIdsBesideAnEos(Scheduler):
    def update(self, batch, token_ids):
        has_stop_ids = self.table.has_stop_ids.copy()
        self.table.has_stop_ids &= self.table.ignore_eos
        finished = super().update(batch, token_ids)
        self.table.has_stop_ids = has_stop_ids
        return finished


class ChangesSpecialRows(Scheduler):
    def schedule(self):
        batch = super().schedule()
        if batch is None:
            return None
        changed = tuple(self._change(*pair, batch) for pair in enumerate(batch.special))
        return replace(batch, special=changed)


class CountsSpecialRowsAlone(ChangesSpecialRows):
    """Their place is that among all sampled rows."""

    def _change(self, i, special, batch):
        return special._replace(place=i)


class SendsThePromptAlone(ChangesSpecialRows):
    """After a preemption the output's tokens are news to the device as well."""

    def _change(self, i, special, batch):
        if not batch.is_prefill:
            return special
        token_ids = special.token_ids[: special.ask.num_prompt_tokens]
        return special._replace(token_ids=token_ids)


class CountsReadTokensOnly(ChangesSpecialRows):
    """A token in flight has its position already."""

    def _change(self, i, special, batch):
        return special._replace(num_tokens=int(self.table.num_tokens[special.row]))


def test_driver_accepts_another_way_to_remember_new_blocks() -> None:
    """So that the classes derived from it fail for the bug alone."""
    run_scenarios(7, 6_000, NotesNewBlocks)


class CopiesWhatIsNotWritten(BlockManager):
    """From a block that this very step computes."""

    def publish(self, seq, first_block, last_block):
        super().publish(seq, first_block, last_block)
        self._new.clear()


class CopiesOneTokenTooMany(BlockManager):
    def _find_source(self, seq, hits):
        source, num_tokens = super()._find_source(seq, hits)
        is_more = 0 < num_tokens < self.block_size - 1
        return source, num_tokens + (is_more and seq.num_tokens > num_tokens + 1)


class CopiesAgain(BlockManager):
    """In every step, after the target has got other tokens or another owner."""

    def begin_step(self):
        copies = self.copies
        super().begin_step()
        self.copies = copies


BROKEN_MANAGERS = [
    IgnoresTheParent,
    TrustsTheHash,
    PublishesAtAllocation,
    KeepsStaleEntries,
    TakesTheLastBlockFromTheCache,
    LeavesHitsInTheFreeQueue,
    FreesSharedBlocks,
    LeaksTheFirstBlock,
    CachesFailedSteps,
    ReusesContentIds,
    CopiesWhatIsNotWritten,
    CopiesOneTokenTooMany,
    CopiesAgain,
]
BROKEN_SCHEDULERS = [
    PreemptsWithoutFreeing,
    PutsThePreemptedLast,
    AdmitsBeyondTheLimit,
    OverrunsTheBudget,
    RefusesChunks,
    SkipsAheadInChunks,
    SamplesEveryChunk,
    PublishesBeforeTheBlockIsFull,
    StopsOneTokenLate,
    KnowsOneEosOnly,
    KeepsTheBadToken,
    AbortsWithoutFreeing,
    ResetsOnlyTheQueues,
    PublishesUnreadTokens,
    PublishesForTheNextOwner,
    KeepsSurplusTokens,
    PreemptsWithAStepInFlight,
    ForgetsUnreadTokensAtTheEnd,
    NeverOverlaps,
    RepeatsNewBlocks,
    LeavesNewBlocksToTheNextOwner,
    LosesNewBlocksOfACallThatGaveUp,
    PublishesWhatIsNotScheduled,
    EndsWithoutFreeing,
    EndsInTheQueueOnly,
    IgnoresStopIdsBesideAnEos,
    CountsSpecialRowsAlone,
    SendsThePromptAlone,
    CountsReadTokensOnly,
    GroupsByRow,
    GroupsThatStay,
    GroupsByStaleTables,
    GroupsByTokensAlone,
    GroupsThatGoOnThroughOthers,
    DecodesWhatReadsTheStep,
    DecodesTheMiddleOfAPrompt,
    KeepsGroupsOfRowsThatEnd,
]


@pytest.mark.parametrize("broken", BROKEN_MANAGERS)
def test_driver_catches_a_planted_block_manager_bug(broken: type[BlockManager]) -> None:
    with pytest.raises(Violation):
        run_scenarios(7, 60_000, scheduler_with(broken))


@pytest.mark.parametrize("broken", BROKEN_SCHEDULERS)
def test_driver_catches_a_planted_scheduler_bug(broken: type[Scheduler]) -> None:
    with pytest.raises(Violation) as violation:
        run_scenarios(7, 60_000, broken)
    assert "TypeError" not in str(violation.value), "the planted class no longer fits the scheduler"
