"""A seeded driver over Scheduler and BlockManager, and the oracle that checks every call.

The oracle plays the device. It keeps a *shadow* of the KV cache: which prefix wrote each slot. A
prefix is named by an interned id, so two ids are equal only if every token up to there is.

    request       7 3 9 1 4        block size 2, block table [5, 0, 2]
    prefix ids    1 2 3 4 5        1 = "7", 2 = "7 3", 3 = "7 3 9", ...
    shadow[5]     1 2              what a read of positions 0 and 1 must find, and so on
    shadow[0]     3 4
    shadow[2]     5 .

It also keeps each row as engine/decode_state.py does, from nothing but the batches: the newest
token, the length, the block table. A launch advances the rows and samples at once. What the step
writes and reads happens as late as it can, when its tokens are waited for, but in the order of the
launches. `depth` is how many steps may be launched and not read back between two calls:

    depth 1   schedule 1, launch 1, schedule 2, launch 2, run 1 and wait for it, update 1,
              schedule 3, launch 3, run 2 and wait for it, update 2, ...

So where update 1 ends a request, step 2 holds a surplus row: it writes into a block that has been
freed, and that step 3 may have handed to another request, which must write there later.

Some come with others of the same prompt, as samples do. Some have stop token ids, some are ended by
their text after an update, as by a stop string, and some ask for more than a temperature, so that
batches name their rows.

One operation is one call into the scheduler (add, schedule, update, end, abort, reset). After each,
these hold, and a Violation says which did not:

 1. free and held blocks partition the pool           8. token and sequence budgets hold
 2. reference count = number of tables holding it     9. 0 < scheduled, cached + scheduled <= length
 3. a cached key points at exactly its prefix        10. each request is in exactly one queue
 4. no held block is in the free queue               11. every request ends within a step bound
 5. every read slot holds the reader's own prefix    12. at idle no block is held
 6. no slot is written twice in a step               13. the device's lengths and block tables are
 7. a shared or published block is not written           the scheduler's, of every admitted request
    but by the step that publishes it                15. groups of a decode share what they say,
                                                         and work lists read it once for each row

and, beyond those: requests are served first come first served and end for the right reason with
the tokens that were sampled (10), nothing that a step with bad logits computed stays cached (3),
there is always a step to launch unless all blocks are taken or all ends are in flight (11), and a
batch's special rows are those that ask, with all their tokens in a prefill (14).
"""

import operator
import random
from collections import Counter, deque
from typing import NoReturn

import numpy as np

from nanovllm.engine.prefix_groups import work_list
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import (
    IntArray,
    RowAsk,
    ScheduledBatch,
    Sequence,
    SequenceStatus,
    SpecialRow,
)
from nanovllm.sampling_params import SamplingParams

NUM_TOKENS = 5  # ids in use; few, so that prefixes and single blocks often repeat
EOS_TOKEN_IDS = (0, 4)
DEPTHS = (0, 1, 2)  # LLMEngine's are 0 and 1
STOP_IDS = ((2,), (1, 4))  # of the requests that have any; 4 is an EOS as well
MAX_REQUESTS = 64  # added in one scenario
GARBAGE = -1  # the prefix of what nobody may read
PARAMS = {
    (max_tokens, ignore_eos, stop_ids): SamplingParams(
        max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=stop_ids
    )
    for max_tokens in [*range(1, 25), None]
    for ignore_eos in (False, True)
    for stop_ids in (None, *STOP_IDS)
}


class Violation(AssertionError):
    """The scheduler or the block manager broke one of the rules."""


class Request:
    """One request as it is once all launched steps have run; the scheduler learns of it later."""

    __slots__ = (
        "blocks",
        "ignore_eos",
        "num_read",
        "num_unread",
        "prefix",
        "reason",
        "stop_ids",
        "stop_len",
        "tokens",
    )

    def __init__(self, params: SamplingParams, num_prompt_tokens: int, max_len: int):
        self.tokens: list[int] = []  # the prompt and what was sampled since
        self.prefix = 0  # id of all of it
        self.blocks: list[list[int]] = []  # ids of every prefix of it, cut into blocks
        self.num_unread = 0  # tokens sampled for it by steps in flight, surplus ones included
        self.num_read = num_prompt_tokens  # of its tokens, those that the scheduler knows
        self.reason: str | None = None  # why it ended; what is sampled after that is surplus
        self.ignore_eos = params.ignore_eos
        self.stop_ids = params.stop_token_ids or ()
        limit = params.max_tokens
        self.stop_len = max_len if limit is None else min(max_len, num_prompt_tokens + limit)

    def finish_reason(self, token: int) -> str | None:
        """Why the request ends once token has been appended; None: it goes on."""
        if token < 0:
            return "error"
        if token in self.stop_ids or (token in EOS_TOKEN_IDS and not self.ignore_eos):
            return "stop"
        return "length" if len(self.tokens) == self.stop_len else None


class DeviceRow:
    """A row of DecodeState."""

    __slots__ = ("num_tokens", "prefix", "table")

    def __init__(self, max_num_blocks: int) -> None:
        self.prefix = GARBAGE  # of all its tokens, the newest included
        self.num_tokens = 0
        self.table = [0] * max_num_blocks


class Step:
    """A launched step: what it will write and read, and what it samples."""

    __slots__ = ("batch", "ended", "reads", "sampled", "tokens", "writes")

    def __init__(self, batch: ScheduledBatch) -> None:
        self.batch = batch
        self.writes: list[tuple[int, int, int, Sequence]] = []  # block, offset, prefix, for whom
        self.reads: list[tuple[Sequence, Request, list[int], int]] = []  # ..., table, num_tokens
        self.sampled: list[Sequence] = []
        self.tokens: list[int] = []
        self.ended: list[Sequence] = []  # whose last token this step samples


class Scenario:
    """One scheduler with random sizes, driven by random calls."""

    def __init__(self, seed: int, scheduler_class: type[Scheduler] = Scheduler) -> None:
        self.random = r = random.Random(seed)
        self.depth = r.choice(DEPTHS)
        self.block_size = size = r.randint(1, 8)
        self.num_blocks = r.choice([r.randint(2, 12), r.randint(2, 40)])
        # Of nine rows and more, one alone is not worth a prefill: see _is_prefill_worthwhile.
        self.max_num_seqs = r.choice([*[r.randint(1, 8)] * 4, r.randint(9, 24)])
        self.max_live = max(14, self.max_num_seqs + 6)  # at one time
        self.budget = r.choice([r.randint(1, 8), r.randint(1, 64)])
        max_model_len = r.randint(2, 64)
        self.scheduler = scheduler_class(
            self.max_num_seqs, self.budget, max_model_len, size, self.num_blocks, EOS_TOKEN_IDS
        )
        self.min_copied = r.choice([1, 2, 3, 100])
        self.key_step = r.choice([step for step in (1, 2, 3, 4) if size % step == 0])
        self.min_rows, self.min_saved = r.choice([1, 2, 2, 3]), r.choice([0, 0, 3, 8])
        self._lower_limits()
        self.max_len = min(max_model_len, self.num_blocks * size)
        # A prompt takes at most this many steps, so at least one of as many brings a token.
        self.max_silent_steps = -(-self.max_len // self.budget)
        self.silent_steps = 0
        self.num_ops = 0
        self.counts: Counter[str] = Counter()
        self.live: dict[Sequence, Request] = {}  # running and waiting, in their order
        self.num_added = 0
        self.keys = [0]  # prefix id -> parent id * NUM_TOKENS + last token
        self.ids: dict[int, int] = {}  # and back
        self.stems = [r.choices(range(NUM_TOKENS), k=self.max_len) for _ in range(2)]
        # And one that parts from the first on its way.
        half = self.max_len // 2
        self.stems.append(self.stems[0][:half] + self.stems[1][half:])
        # The device. A reset of the scheduler does not touch it.
        self.rows = [DeviceRow(-(-self.max_len // size)) for _ in self.scheduler.table.sequences]
        self.shadow = [[GARBAGE] * size for _ in range(self.num_blocks)]  # who wrote each slot
        # The same once all launched steps have run.
        self.ahead = [[GARBAGE] * size for _ in range(self.num_blocks)]
        self.queue: deque[Step] = deque()  # launched, not run
        self.inflight: deque[Step] = deque()  # launched, not read back
        self._forget_cache()

    def _lower_limits(self) -> None:
        """Below them blocks are not copied, nor are rows grouped; all too high for small sizes."""
        self.scheduler.block_manager.MIN_COPIED_TOKENS = self.min_copied
        self.scheduler._order.MIN_ROWS = self.min_rows
        self.scheduler._order.MIN_SAVED = self.min_saved
        self.scheduler._order.key_step = self.key_step

    # -- driving ---------------------------------------------------------------------------------

    def run(self, num_ops: int) -> None:
        """About num_ops random operations, then no new requests until every one has ended."""
        r = self.random
        p_add, p_abort, p_reset = r.choice([0.15, 0.3, 0.5]), r.choice([0, 0.02]), 0.005
        self.max_tokens = r.choice([4, 8, 24])
        while self.num_ops < num_ops and self.num_added < MAX_REQUESTS:
            x = r.random()
            if x < p_add and len(self.live) < self.max_live:
                self.add()
            elif p_add < x < p_add + p_abort:
                self.abort()
            else:
                self.step(is_interrupted=x > 1 - p_reset)
        reqs = self.live.values()
        num_tokens_left = sum(req.stop_len - len(req.tokens) for req in reqs)
        num_tokens_left += len(reqs) * (self.depth + 1)  # surplus, and rows at their end
        bound = 2 * num_tokens_left * self.max_silent_steps  # between two waits there is a launch
        for _ in range(bound):
            if not self.live:
                break
            self.step()
        if self.live:
            self._fail(11, f"{len(self.live)} requests unfinished after {bound} steps")
        if self.inflight:  # those that were aborted last
            self.step()
        if self.inflight or self.scheduler._num_inflight_steps:
            self._fail(12, "steps in flight after the last request")
        if not self.scheduler.is_finished():
            self._fail(12, "not idle after the last request")
        self.counts["preemptions"] += self.scheduler.num_preemptions

    def add(self) -> None:
        r, size = self.random, self.block_size
        n = r.choice([1, size - 1, size, size + 1, 2 * size, r.randint(1, self.max_len)])
        n = min(max(n, 1), self.max_len - 1)
        num_shared = r.choice([n, n - 1, n // 2, n // size * size, 0])
        prompt = r.choice(self.stems)[:num_shared]
        prompt += r.choices(range(NUM_TOKENS), k=n - num_shared)
        max_tokens = r.randint(1, self.max_tokens) if r.random() < 0.95 else None
        stop_ids = r.choice(STOP_IDS) if r.random() < 0.1 else None
        params = PARAMS[max_tokens, r.random() < 0.5, stop_ids]
        is_special = r.random() < 0.15
        for _ in range(r.randint(2, 4) if r.random() < 0.04 else 1):
            seq, req = self._make(prompt, params, is_special)
            self.live[seq] = req
            self.scheduler.add(seq)
        self._check("adds")

    def _make(
        self, prompt: list[int], params: SamplingParams, is_special: bool
    ) -> tuple[Sequence, Request]:
        seq = Sequence(prompt, params, self.max_len)
        if is_special:
            seq.ask = RowAsk(seq.seq_id, params, len(prompt), 0, (), (), None)
        req = Request(params, len(prompt), self.max_len)
        for token in prompt:
            self._append(req, token)
        self.num_added += 1
        return seq, req

    def abort(self) -> None:
        r = self.random
        seqs = r.sample(list(self.live), r.randint(0, min(3, len(self.live))))
        self.scheduler.abort(seqs)
        for seq in seqs:
            self.counts["aborts in flight"] += self.live.pop(seq).num_unread > 0
        self.silent_steps = 0
        self._check("aborts")

    def end(self, seq: Sequence) -> None:
        """What its newest token did to its text was not known to the scheduler."""
        req = self.live.pop(seq)
        self.scheduler.end(seq, "stop")
        if seq.status is not SequenceStatus.FINISHED or seq.finish_reason != "stop":
            self._fail(10, f"{seq.status}, {seq.finish_reason} after end()")
        if seq.token_ids.tolist() != req.tokens[: req.num_read]:
            self._fail(10, f"other tokens than read: {seq.token_ids}, not {req.tokens}")
        self.counts["ends in flight"] += req.num_unread > 0
        self._check("ends")

    def step(self, is_interrupted: bool = False) -> None:
        """LLMEngine._step; or, interrupted, what an exception leads to."""
        batch = self.scheduler.schedule()
        if batch is not None:
            self._launch(batch)
        elif self.live:
            self._check_wait()
        self._check("schedules")
        if is_interrupted:
            self.counts["resets in flight"] += len(self.inflight) > 1
            self.inflight.clear()
            self.scheduler.reset()
            self._lower_limits()
            self.live.clear()
            self.silent_steps = 0
            self._forget_cache()
            self._check("resets")
            return
        num_kept = 0 if batch is None else self.depth
        while len(self.inflight) > num_kept or (self.inflight and self.scheduler.is_finished()):
            self._update(self.inflight.popleft())

    def _update(self, step: Step) -> None:
        while self.queue:
            first = self.queue.popleft()
            self._run(first)
            if first is step:
                break
        ended = [seq for seq in step.ended if seq in self.live]  # and not aborted meanwhile
        failed = [seq for seq in ended if self.live[seq].reason == "error"]
        failed_blocks = [block for seq in failed for block in seq.block_table.tolist()]
        finished = self.scheduler.update(step.batch, np.array(step.tokens, np.int64))
        if finished != ended:
            self._fail(10, "the wrong requests finished")
        for seq in step.sampled:
            req = self.live.get(seq)
            if req is not None:
                req.num_unread -= 1
                req.num_read += 1
        for seq in ended:
            req = self.live.pop(seq)
            if seq.status is not SequenceStatus.FINISHED or seq.finish_reason != req.reason:
                self._fail(10, f"{seq.status}, {seq.finish_reason}, not {req.reason}")
            if seq.token_ids.tolist() != req.tokens:
                self._fail(10, f"other tokens than sampled: {seq.token_ids}")
            stop = req.tokens[-1] if req.reason == "stop" else None
            is_eos = stop in EOS_TOKEN_IDS and not req.ignore_eos  # which needs no other reason
            if seq.stop_reason != (stop if stop in req.stop_ids and not is_eos else None):
                self._fail(10, f"stop reason {seq.stop_reason} of {req.tokens}")
            self.counts["stop ids"] += seq.stop_reason is not None
            self.counts[req.reason] += 1
        if failed_blocks:
            self._poison(failed_blocks)
        self._check("updates")
        if self.random.random() < 0.02:
            candidates = [seq for seq in step.sampled if seq in self.live]
            if candidates:
                self.end(self.random.choice(candidates))

    def _append(self, req: Request, token: int) -> None:
        prefix = self._prefix(req.prefix, token)
        if len(req.tokens) % self.block_size == 0:
            req.blocks.append([])
        req.blocks[-1].append(prefix)
        req.tokens.append(token)
        req.prefix = prefix

    def _prefix(self, parent: int, token: int) -> int:
        """The id of a prefix with one token more."""
        if parent == GARBAGE or token < 0:
            return GARBAGE
        key = parent * NUM_TOKENS + token
        prefix = self.ids.get(key)
        if prefix is None:
            prefix = self.ids[key] = len(self.keys)
            self.keys.append(key)
        return prefix

    # -- the device ------------------------------------------------------------------------------

    def _launch(self, batch: ScheduledBatch) -> None:
        """Advance the rows by one step and sample its tokens."""
        rows, counts = batch.rows.tolist(), batch.num_scheduled_tokens.tolist()
        seqs = [self.scheduler.table.sequences[row] for row in rows]
        is_sampled = batch.is_sampled.tolist()
        if sum(counts) > self.budget or len(seqs) > self.max_num_seqs:
            self._fail(8, f"{sum(counts)} tokens of {len(seqs)} sequences in one step")
        if batch.seq_ids.tolist() != [seq.seq_id for seq in seqs]:
            self._fail(10, f"rows {rows} are not those of {batch.seq_ids}")
        step = Step(batch)
        if batch.is_prefill:
            self._prefill(step, rows, seqs, counts)
        else:
            self._decode(step, rows, seqs, counts)
        special = iter(batch.special)
        place = 0
        for row, seq, samples in zip(rows, seqs, is_sampled, strict=True):
            if samples:
                if seq.ask is not None:
                    self._check_special(next(special, None), place, row, seq, batch.is_prefill)
                self._sample(step, self.rows[row], seq)
                place += 1
        if batch.is_redrawn != bool(batch.special) or next(special, None) is not None:
            self._fail(14, f"special rows {batch.special}, redrawn: {batch.is_redrawn}")
        self._check_writes(step)
        self._copy(step, self.ahead)
        if batch.as_decode:
            self._check_as_decode(step, rows, counts)
        for block, offset, prefix, _ in step.writes:
            self.ahead[block][offset] = prefix
        self._count_step(step)
        self.queue.append(step)
        self.inflight.append(step)

    def _prefill(self, step: Step, rows: list, seqs: list[Sequence], counts: list[int]) -> None:
        batch, size = step.batch, self.block_size
        tables, input_ids = batch.block_tables.tolist(), batch.input_ids.tolist()
        starts, is_sampled = batch.num_cached_tokens.tolist(), batch.is_sampled.tolist()
        at = 0
        for i, (row, seq, start, count) in enumerate(zip(rows, seqs, starts, counts, strict=True)):
            req, end, device = self.live[seq], start + count, self.rows[row]
            if count < 1 or end > len(req.tokens) or is_sampled[i] != (end == len(req.tokens)):
                self._fail(9, f"{start} + {count} of {req.tokens}, sampled: {is_sampled[i]}")
            if input_ids[at : at + count] != req.tokens[start:end]:
                self._fail(5, f"computes {input_ids} at {at}, not {req.tokens[start:end]}")
            at += count
            device.num_tokens, device.prefix = end, req.prefix
            device.table[: len(tables[i])] = tables[i]
            self._check_row(seq, device)
            for position in range(start, end):
                n, offset = divmod(position, size)
                step.writes.append((device.table[n], offset, req.blocks[n][offset], seq))
            step.reads.append((seq, req, device.table[: -(-end // size)], end))
        if at != len(input_ids):
            self._fail(5, f"computes {input_ids}, of which {at} belong to someone")

    def _decode(self, step: Step, rows: list, seqs: list[Sequence], counts: list[int]) -> None:
        batch, size = step.batch, self.block_size
        starts, new_blocks = batch.num_cached_tokens.tolist(), batch.new_blocks.tolist()
        if counts != [1] * len(rows) or not batch.is_sampled.all():
            self._fail(9, f"a decode step of {counts} tokens, sampled: {batch.is_sampled}")
        for row, seq, start, new_block in zip(rows, seqs, starts, new_blocks, strict=True):
            req, device = self.live[seq], self.rows[row]
            position = device.num_tokens - 1
            n, offset = divmod(position, size)
            if start != position or device.num_tokens >= req.stop_len:
                self._fail(9, f"{start} cached of {device.num_tokens}, to stop at {req.stop_len}")
            if new_block >= 0:
                if offset:
                    self._fail(13, f"block {new_block} is no news at position {position}")
                device.table[n] = new_block
            self._check_row(seq, device)
            step.writes.append((device.table[n], offset, device.prefix, seq))
            if req.reason is None:
                if device.prefix != req.prefix:
                    self._fail(5, f"computes another token than the last of {req.tokens}")
                step.reads.append((seq, req, device.table[: n + 1], position + 1))
        goes_on = [seq for seq in self.scheduler.running if self._goes_on(seq)]
        by_id = operator.attrgetter("seq_id")
        if sorted(seqs, key=by_id) != sorted(goes_on, key=by_id):
            self._fail(8, "a decode step is one token for each running sequence that goes on")
        self._check_groups(batch, rows, starts)

    def _check_as_decode(self, step: Step, rows: list[int], counts: list[int]) -> None:
        """A prefill as a decode: a token a row, groups, and nobody reads what another writes."""
        batch = step.batch
        if not batch.is_prefill or counts != [1] * len(rows) or not batch.is_sampled.all():
            self._fail(9, f"{counts} tokens as a decode, sampled: {batch.is_sampled}")
        if len(batch.prompt_logprobs):
            self._fail(14, "a decode that is asked for log-probabilities of prompts")
        writers = {(block, offset): seq for block, offset, _, seq in step.writes}
        for seq, _, table, num_tokens in step.reads:
            slots = [divmod(i, self.block_size) for i in range(num_tokens - 1)]
            if any(writers.get((table[n], offset), seq) is not seq for n, offset in slots):
                self._fail(15, f"a decode whose rows read what others of it write: {table}")
        self._check_groups(batch, rows, batch.num_cached_tokens.tolist())
        self.counts["prefills as decodes"] += 1

    def _sample(self, step: Step, device: DeviceRow, seq: Sequence) -> None:
        """A random token, but mostly one that equal prefixes agree on, so that outputs repeat."""
        x, req = self.random.random(), self.live[seq]
        token = -1 if x > 0.995 else self.random.randrange(NUM_TOKENS)
        if x < 0.7:
            token = device.prefix % (NUM_TOKENS - 2) + 1
        device.num_tokens += 1
        device.prefix = self._prefix(device.prefix, token)
        step.sampled.append(seq)
        step.tokens.append(token)
        req.num_unread += 1
        if req.reason is not None:
            self.counts["surplus"] += 1
            return
        if token >= 0:
            self._append(req, token)
        req.reason = req.finish_reason(token)
        if req.reason is not None:
            step.ended.append(seq)

    def _run(self, step: Step) -> None:
        """Write and read the slots that the model does."""
        size, shadow = self.block_size, self.shadow
        self._copy(step, shadow)
        for block, offset, prefix, seq in step.writes:
            shadow[block][offset] = prefix
            if seq not in self.live:
                is_held = self.scheduler.block_manager._ref_counts[block] > 0
                self.counts["writes to another's block"] += is_held
        for seq, req, table, num_tokens in step.reads:
            n, rest = divmod(num_tokens, size)
            found = [shadow[block] for block in table]
            is_right = found[:n] == req.blocks[:n]
            if rest:
                is_right = is_right and found[n][:rest] == req.blocks[n][:rest]
            if not is_right and seq in self.live:  # and not aborted meanwhile
                self._fail(5, f"{num_tokens} tokens of {req.blocks} read {found}")

    def _copy(self, step: Step, slots: list[list[int]]) -> None:
        """K/V of some tokens from one block to another, ahead of what the step computes."""
        for source, target, n in step.batch.copies.tolist():
            slots[target][:n] = slots[source][:n]

    def _poison(self, blocks: list[int]) -> None:
        """Take the K/V of failed requests for garbage, where no healthy one vouches for it."""
        copied = {source for step in self.queue for source in step.batch.copies[:, 0].tolist()}
        for block, num_holders in Counter(blocks).items():
            if num_holders == self.ref_counts[block] and block not in copied:
                self.shadow[block] = [GARBAGE] * self.block_size
                self.ahead[block] = [GARBAGE] * self.block_size
                if self.scheduler.block_manager._hashes[block] is not None:
                    self._fail(3, f"block {block} of a failed step is cached")

    # -- a launch --------------------------------------------------------------------------------

    def _goes_on(self, seq: Sequence) -> bool:
        """Whether a running request is short of its longest length, unread tokens included."""
        req = self.live[seq]
        num_tokens = seq.num_tokens + req.num_unread
        return num_tokens < req.stop_len

    def _check_writes(self, step: Step) -> None:
        slots = {(block, offset) for block, offset, _, _ in step.writes}
        if len(slots) < len(step.writes):
            self._fail(6, f"slots {step.writes}")
        manager = self.scheduler.block_manager
        for block in {block for block, _ in slots}:
            is_new = manager._content_ids[block] != self.entries[block][1]
            if manager._hashes[block] is not None and is_new:
                # By this step, whose other rows may read it: they do so after all have written.
                self.counts["read in the step that wrote"] += manager._ref_counts[block] > 1
            elif manager._ref_counts[block] != 1 or manager._hashes[block] is not None:
                self._fail(7, f"block {block} is shared or published, and written")

    def _check_row(self, seq: Sequence, device: DeviceRow) -> None:
        held = seq.block_table.tolist()
        if device.table[: len(held)] != held:
            self._fail(13, f"the device has {device.table}, the scheduler {held}")

    def _check_groups(self, batch: ScheduledBatch, rows: list[int], starts: list[int]) -> None:
        """Each group's rows share its keys, stored ones; longest contexts first among its own."""
        num_rows = len(rows)
        group_of, depth = [-1] * num_rows, [0] * num_rows
        for g, (first, end, key, end_key) in enumerate(batch.groups.tolist()):
            if not (0 <= first < end <= num_rows and 0 <= key < end_key):
                self._fail(15, f"groups {batch.groups} of {num_rows} rows")
            if key % self.key_step or end_key % self.key_step:
                self._fail(15, f"groups {batch.groups} in steps of {self.key_step}")
            shared = self._keys(rows[first], key, end_key)
            for i in range(first, end):
                if self._keys(rows[i], key, end_key) != shared:
                    self._fail(15, f"row {i} does not share {shared}: {batch.groups}")
                if (group_of[i], depth[i]) != (group_of[first], key):
                    self._fail(15, f"groups that are not nested: {batch.groups}")
                if end_key > starts[i]:
                    self._fail(15, f"keys that are not stored: {batch.groups}, {starts}")
            group_of[first:end] = [g] * (end - first)
            depth[first:end] = [end_key] * (end - first)
            self.counts["shared beyond blocks"] += end_key % self.block_size > 0
        for g in set(group_of):
            lens = [start for start, group in zip(starts, group_of, strict=True) if group == g]
            if lens != sorted(lens, reverse=True):
                self._fail(8, f"contexts of {lens} tokens in a decode step, longest first")
        self.counts["grouped rows"] += sum(g >= 0 for g in group_of)
        self.counts["nested groups"] += int((batch.groups[:, 2] > 0).sum())
        if len(batch.groups):
            self._check_work_list(batch.groups, depth)

    def _keys(self, row: int, start: int, end: int) -> list[int]:
        """What the K/V at these positions of the row is of."""
        size, table = self.block_size, self.rows[row].table
        return [self.ahead[table[i // size]][i % size] for i in range(start, end)]

    def _check_work_list(self, groups: IntArray, depth: list[int]) -> None:
        """Each row's shared keys are read by items, once and in the order of their slots."""
        r, size, num_rows = self.random, self.block_size, len(depth) + self.random.randint(0, 2)
        most, wanted = r.randint(1, 5), r.randint(1, 9)
        keys = r.choice([1, size, 3 * size, 1 << 20])
        lists = work_list(groups, num_rows, self.key_step, most, keys, wanted)
        items, own_starts = lists["items"].tolist(), lists["own_starts"].tolist()
        reads: list[list[tuple[int, int, int]]] = [[] for _ in range(num_rows)]
        for first, end, key, end_key, slot, *_ in items[: lists["num_items"][0]]:
            if not (first < end <= first + most and key < end_key):
                self._fail(15, f"items {items}")
            for row in range(first, end):
                reads[row].append((slot, key, end_key))
        starts = lists["partial_starts"].tolist()
        for row, parts in enumerate(reads):
            at = 0
            for slot, (number, key, end_key) in enumerate(sorted(parts)):
                if (slot, at) != (number, key):
                    self._fail(15, f"row {row} reads {parts}")
                at = end_key
            if at != own_starts[row] or at != (depth + [0, 0])[row]:
                self._fail(15, f"row {row} reads {parts}, its own part begins at {own_starts}")
            if starts[row + 1] - starts[row] != len(parts):
                self._fail(15, f"partial results {starts} of {reads}")
        if starts[-1] > len(items):
            self._fail(15, f"{starts[-1]} partial results, room for {len(items)}")

    def _check_special(
        self, special: SpecialRow | None, place: int, row: int, seq: Sequence, is_prefill: bool
    ) -> None:
        num_tokens = self.rows[row].num_tokens
        token_ids = None if special is None else special.token_ids
        if (
            special is None
            or (special.place, special.row, special.num_tokens) != (place, row, num_tokens)
            or special.ask is not seq.ask
            or is_prefill != (token_ids is not None)
            or (token_ids is not None and token_ids.tolist() != self.live[seq].tokens)
        ):
            self._fail(14, f"special row {special} at {place}, row {row} of {num_tokens} tokens")
        self.counts["special rows"] += 1

    def _check_wait(self) -> None:
        """There was no work, though requests are left."""
        self.counts["waits"] += 1
        if not self.inflight:
            self._fail(11, "no work, and no step in flight")
        going_on = [seq for seq in self.scheduler.running if self._goes_on(seq)]
        if going_on and self.scheduler.block_manager.num_free_blocks:
            self._fail(11, "waits for a step in flight, though there are blocks")

    def _count_step(self, step: Step) -> None:
        batch, scheduler = step.batch, self.scheduler
        if batch.is_prefill:
            self.counts["copied tokens"] += int(batch.copies[:, 2].sum())
            self.counts["hit tokens"] += int(batch.num_cached_tokens.sum())
        elif scheduler._num_decodes_since_prefill and scheduler.table.free_rows:
            self.counts["rows left to gather"] += 1
        self.counts["chunks"] += batch.num_seqs - len(step.tokens)
        self.silent_steps = 0 if step.tokens else self.silent_steps + 1
        if self.silent_steps >= self.max_silent_steps:
            self._fail(11, f"{self.silent_steps} steps without a token")

    # -- the state after each call ---------------------------------------------------------------

    def _fail(self, invariant: int, message: str) -> NoReturn:
        raise Violation(f"invariant {invariant}: {message}")

    def _check(self, kind: str) -> None:
        self.num_ops += 1
        self.counts[kind] += 1
        self._check_pool(self._check_queues())
        self._check_cache()

    def _check_queues(self) -> list[int]:
        """The rows that admitted requests own."""
        scheduler, table = self.scheduler, self.scheduler.table
        running, waiting = scheduler.running, list(scheduler.waiting)
        # First come, first served: running, then waiting, is the order of submission.
        if running + waiting != list(self.live):
            self._fail(10, "the queues are not what was submitted, in its order")
        num_cached, num_tokens = table.num_cached_tokens.tolist(), table.num_tokens.tolist()
        rows = []
        for seq in running:
            row, num_unread = seq.row, self.live[seq].num_unread
            rows.append(row)
            if num_cached[row] != num_tokens[row] + num_unread - 1:
                self._fail(9, f"{num_cached[row]} of {num_tokens[row]} + {num_unread} cached")
            if self.rows[row].num_tokens != num_tokens[row] + num_unread:
                self._fail(13, f"{num_tokens[row]} + {num_unread} tokens, other on the device")
            if seq.status is not SequenceStatus.RUNNING:
                self._fail(10, f"running: {seq.status}")
        for i, seq in enumerate(waiting):
            row = seq.row
            if seq.status is not SequenceStatus.WAITING:
                self._fail(10, f"waiting: {seq.status}")
            if row is None:
                continue
            rows.append(row)
            if i > 0 or num_cached[row] >= num_tokens[row]:
                self._fail(9, "admitted out of turn, or with nothing left to compute")
            if self.rows[row].num_tokens != num_cached[row]:
                self._fail(13, f"{num_cached[row]} tokens launched, other on the device")
        if len(rows) > self.max_num_seqs:
            self._fail(8, f"{len(rows)} admitted")
        if sorted(rows + table.free_rows) != list(range(len(table.sequences))):
            self._fail(10, f"rows {rows}, free {table.free_rows}")
        return rows

    def _check_pool(self, rows: list[int]) -> None:
        table, manager = self.scheduler.table, self.scheduler.block_manager
        num_held, free = table.num_blocks.tolist(), list(manager._free)
        state = (rows, num_held.copy(), table.block_tables.tobytes(), manager._ref_counts, free)
        if self.seen_pool == state and self.live:
            return  # checked before, and nothing has changed
        self.seen_pool = (*state[:3], manager._ref_counts.copy(), free)
        tables = table.block_tables[:, : max(num_held)].tolist()
        num_cached = table.num_cached_tokens.tolist()
        ref_counts = [0] * self.num_blocks
        for row in rows:
            held, known = tables[row][: num_held[row]], self.rows[row].table
            for block in held:
                ref_counts[block] += 1
            # A block for the next token may have been added by a call that then gave up.
            n, rest = divmod(num_cached[row], self.block_size)
            num_known = n if not rest and len(held) == n + 1 else len(held)
            if (
                held[:num_known] != known[:num_known]
                or num_known * self.block_size < num_cached[row]
            ):
                self._fail(13, f"the device has {known}, the scheduler {held}")
            num_held[row] = 0
        if any(num_held):
            self._fail(1, "a row without a sequence holds blocks")
        if ref_counts != manager._ref_counts:
            self._fail(2, f"reference counts {manager._ref_counts}, held {ref_counts}")
        if len(free) != ref_counts.count(0) or [b for b in free if ref_counts[b]]:
            self._fail(1, f"free {free}, held {ref_counts}")
        if len(set(free)) < len(free) or len(free) != manager.num_free_blocks:
            self._fail(4, f"free {free}")
        if not self.live and len(free) < self.num_blocks:
            self._fail(12, f"{self.num_blocks - len(free)} blocks held at idle")
        self.ref_counts = ref_counts

    def _forget_cache(self) -> None:
        self.contents = {0: 0}  # content id -> the prefix it stands for
        self.entries: list[tuple] = [(None, 0)] * self.num_blocks
        self.seen_cache: tuple = ()
        self.seen_pool: tuple = ()

    def _check_cache(self) -> None:
        """Check what changed in the cache; the rest stays right, as rule 7 guards its slots."""
        manager = self.scheduler.block_manager
        state = (manager._hashes, manager._content_ids, manager._parent_ids, manager._hash_to_block)
        tokens = manager._tokens.tobytes()
        if self.seen_cache == (*state, tokens):
            return
        self.seen_cache = (*[x.copy() for x in state], tokens)
        for block_hash, block in manager._hash_to_block.items():
            if manager._hashes[block] != block_hash:
                self._fail(3, f"stale entry of block {block}")
        old = self.entries
        self.entries = list(zip(*state[:3], manager._tokens.tolist(), strict=True))
        changed = [block for block, entry in enumerate(self.entries) if entry != old[block]]
        # Parents come before children, as content ids only grow.
        for block in sorted(changed, key=manager._content_ids.__getitem__):
            if manager._content_ids[block] != 0:
                self._check_content(block, *self.entries[block])

    def _check_content(
        self, block: int, block_hash: int | None, content: int, parent: int, tokens: list[int]
    ) -> None:
        ids = self.ahead[block]
        prefix = ids[-1]
        if self.contents.setdefault(content, prefix) != prefix:
            self._fail(3, f"block {block}: content id {content} stood for another prefix")
        if block_hash is None:
            return  # a second copy of a published block, itself not to be found
        for wrote, token in zip(reversed(ids), reversed(tokens), strict=True):
            if wrote != prefix or prefix <= 0 or self.keys[prefix] % NUM_TOKENS != token:
                self._fail(3, f"block {block}, published as {tokens}, holds {ids}")
            prefix = self.keys[prefix] // NUM_TOKENS
        if self.contents.get(parent) != prefix:
            self._fail(3, f"block {block} is published under another parent")


def run_scenarios(
    seed: int,
    num_ops: int,
    scheduler_class: type[Scheduler] = Scheduler,
    ops_per_scenario: int = 70,
) -> Counter[str]:
    """Scenarios until num_ops operations are done; how often each thing happened."""
    totals: Counter[str] = Counter()
    while totals["operations"] < num_ops:
        name = seed * 1_000_003 + totals["scenarios"]
        scenario = Scenario(name, scheduler_class)
        try:
            scenario.run(ops_per_scenario)
        except Exception as error:  # also what the engine itself raises
            num_done = totals["operations"] + scenario.num_ops
            place = f"Scenario({name}), operation {scenario.num_ops}, {num_done} in all"
            raise Violation(f"{place}: {type(error).__name__}: {error}") from error
        totals += scenario.counts
        totals["operations"] += scenario.num_ops
        totals[f"operations at depth {scenario.depth}"] += scenario.num_ops
        totals["scenarios"] += 1
    return totals
