"""A seeded driver over Scheduler and BlockManager, and the oracle that checks every call.

The oracle plays the model. It keeps a *shadow* of the KV cache: which prefix wrote each slot. A
prefix is named by an interned id, so two ids are equal only if every token up to there is.

    request       7 3 9 1 4        block size 2, block table [5, 0, 2]
    prefix ids    1 2 3 4 5        1 = "7", 2 = "7 3", 3 = "7 3 9", ...
    shadow[5]     1 2              what a read of positions 0 and 1 must find, and so on
    shadow[0]     3 4
    shadow[2]     5 .

One operation is one call into the scheduler (add, schedule, update, abort or reset). After each,
these hold, and a Violation says which did not:

 1. free and held blocks partition the pool           7. a shared or published block is not written
 2. reference count = number of tables holding it     8. token and sequence budgets hold
 3. a cached key points at exactly its prefix         9. 0 < scheduled, cached + scheduled <= length
 4. no held block is in the free queue               10. each request is in exactly one queue
 5. every read slot holds the reader's own prefix    11. every request ends within a step bound
 6. no slot is written twice in a step               12. at idle no block is held

and, beyond those: requests are served first come first served, end for the right reason with the
tokens that were sampled (10), and nothing that a step with bad logits computed stays cached (3).
"""

import random
from collections import Counter
from typing import NoReturn

import numpy as np

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import ScheduledBatch, Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams

NUM_TOKENS = 5  # ids in use; few, so that prefixes and single blocks often repeat
EOS_TOKEN_IDS = (0, 4)
MAX_REQUESTS = 64  # added in one scenario
MAX_LIVE = 14  # at one time
PARAMS = {
    (max_tokens, ignore_eos): SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    for max_tokens in [*range(1, 25), None]
    for ignore_eos in (False, True)
}


class Violation(AssertionError):
    """The scheduler or the block manager broke one of the rules."""


class Request:
    """What the oracle knows about one request, from the calls alone."""

    __slots__ = ("blocks", "ignore_eos", "prefix", "stop_len", "tokens")

    def __init__(self, params: SamplingParams, num_prompt_tokens: int, max_len: int):
        self.tokens: list[int] = []  # the prompt and what was sampled since
        self.prefix = 0  # id of all of it
        self.blocks: list[list[int]] = []  # ids of every prefix of it, cut into blocks
        self.ignore_eos = params.ignore_eos
        limit = params.max_tokens
        self.stop_len = max_len if limit is None else min(max_len, num_prompt_tokens + limit)

    def finish_reason(self, token: int) -> str | None:
        """Why the request ends once token has been appended; None: it goes on."""
        if token < 0:
            return "error"
        if token in EOS_TOKEN_IDS and not self.ignore_eos:
            return "stop"
        return "length" if len(self.tokens) == self.stop_len else None


class Scenario:
    """One scheduler with random sizes, driven by random calls."""

    def __init__(self, seed: int, scheduler_class: type[Scheduler] = Scheduler) -> None:
        self.random = r = random.Random(seed)
        self.block_size = size = r.randint(1, 8)
        self.num_blocks = r.choice([r.randint(2, 12), r.randint(2, 40)])
        self.max_num_seqs = r.randint(1, 8)
        self.budget = r.choice([r.randint(1, 8), r.randint(1, 64)])
        max_model_len = r.randint(2, 64)
        self.scheduler = scheduler_class(
            self.max_num_seqs, self.budget, max_model_len, size, self.num_blocks, EOS_TOKEN_IDS
        )
        self.max_len = min(max_model_len, self.num_blocks * size)
        # A prompt takes at most this many steps, so at least one of as many brings a token.
        self.max_silent_steps = -(-self.max_len // self.budget)
        self.silent_steps = 0
        self.num_ops = 0
        self.counts: Counter[str] = Counter()
        self.live: dict[Sequence, Request] = {}  # in order of submission
        self.num_added = 0
        self.keys = [0]  # prefix id -> parent id * NUM_TOKENS + last token
        self.ids: dict[int, int] = {}  # and back
        self.shadow = [[-1] * size for _ in range(self.num_blocks)]  # prefix that wrote each slot
        self.stems = [r.choices(range(NUM_TOKENS), k=self.max_len) for _ in range(2)]
        self._forget_cache()

    # -- driving ---------------------------------------------------------------------------------

    def run(self, num_ops: int) -> None:
        """About num_ops random operations, then no new requests until every one has ended."""
        r = self.random
        p_add, p_abort, p_reset = r.choice([0.15, 0.3, 0.5]), r.choice([0, 0.02]), 0.005
        self.max_tokens = r.choice([4, 8, 24])
        while self.num_ops < num_ops and self.num_added < MAX_REQUESTS:
            x = r.random()
            if x < p_add and len(self.live) < MAX_LIVE:
                self.add()
            elif p_add < x < p_add + p_abort:
                self.abort()
            else:
                self.step(is_interrupted=x > 1 - p_reset)
        num_tokens_left = sum(req.stop_len - len(req.tokens) for req in self.live.values())
        bound = num_tokens_left * self.max_silent_steps
        for _ in range(bound):
            if not self.live:
                break
            self.step()
        if self.live:
            self._fail(11, f"{len(self.live)} requests unfinished after {bound} steps")
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
        params = PARAMS[max_tokens, r.random() < 0.5]
        seq = Sequence(prompt, params, self.max_len)
        req = self.live[seq] = Request(params, n, self.max_len)
        for token in prompt:
            self._append(req, token)
        self.num_added += 1
        self.scheduler.add(seq)
        self._check("adds")

    def abort(self) -> None:
        seqs = self.random.sample(list(self.live), self.random.randint(0, min(3, len(self.live))))
        self.scheduler.abort(seqs)
        for seq in seqs:
            del self.live[seq]
        self.silent_steps = 0
        self._check("aborts")

    def step(self, is_interrupted: bool = False) -> None:
        """schedule, model, update; or, interrupted, what an exception in the model leads to."""
        batch = self.scheduler.schedule()
        if batch is None:
            if self.live:
                self._fail(11, "no work, though requests are left")
            self._check("schedules")
            return
        seqs = [self.scheduler.table.sequences[row] for row in batch.rows.tolist()]
        is_sampled = batch.is_sampled.tolist()
        # Prompts whose last chunk this is have left one queue and join the other with the update.
        self.joining = [s for s, x in zip(seqs, is_sampled, strict=True) if x and batch.is_prefill]
        self._check("schedules")
        self.joining = []
        self._run_model(batch, seqs)
        if is_interrupted:
            self.scheduler.reset()
            self.live.clear()
            self.silent_steps = 0
            self._forget_cache()
            self._check("resets")
        else:
            self._update(batch, [s for s, x in zip(seqs, is_sampled, strict=True) if x])

    def _update(self, batch: ScheduledBatch, seqs: list[Sequence]) -> None:
        sampled = []
        ended = {}
        failed_blocks: list[int] = []
        for seq in seqs:
            req = self.live[seq]
            token = self._sample(req)
            sampled.append(token)
            if token < 0:
                failed_blocks += seq.block_table.tolist()
            else:
                self._append(req, token)
            reason = req.finish_reason(token)
            if reason is not None:
                ended[seq] = reason
        finished = self.scheduler.update(batch, np.array(sampled, np.int64))
        if finished != list(ended):
            self._fail(10, "the wrong requests finished")
        for seq, reason in ended.items():
            if seq.status is not SequenceStatus.FINISHED or seq.finish_reason != reason:
                self._fail(10, f"{seq.status}, {seq.finish_reason}, not {reason}")
            if seq.token_ids.tolist() != self.live.pop(seq).tokens:
                self._fail(10, f"other tokens than sampled: {seq.token_ids}")
            self.counts[reason] += 1
        if failed_blocks:
            self._poison(failed_blocks)
        self._check("updates")

    def _sample(self, req: Request) -> int:
        """A random token, but mostly one that equal prefixes agree on, so that outputs repeat."""
        x = self.random.random()
        if x < 0.7:
            return req.prefix % (NUM_TOKENS - 2) + 1
        return -1 if x > 0.995 else self.random.randrange(NUM_TOKENS)

    def _append(self, req: Request, token: int) -> None:
        key = req.prefix * NUM_TOKENS + token
        prefix = self.ids.get(key)
        if prefix is None:
            prefix = self.ids[key] = len(self.keys)
            self.keys.append(key)
        if len(req.tokens) % self.block_size == 0:
            req.blocks.append([])
        req.blocks[-1].append(prefix)
        req.tokens.append(token)
        req.prefix = prefix

    # -- the model -------------------------------------------------------------------------------

    def _run_model(self, batch: ScheduledBatch, seqs: list[Sequence]) -> None:
        """Write and read the slots that the model would."""
        reqs = [self.live[seq] for seq in seqs]
        starts, counts = batch.num_cached_tokens.tolist(), batch.num_scheduled_tokens.tolist()
        tables, is_sampled = batch.block_tables.tolist(), batch.is_sampled.tolist()
        num_held = self.scheduler.table.num_blocks[batch.rows].tolist()
        if sum(counts) > self.budget or len(seqs) > self.max_num_seqs:
            self._fail(8, f"{sum(counts)} tokens of {len(seqs)} sequences in one step")
        tokens, written = [], []
        size, shadow = self.block_size, self.shadow
        for i, (req, start, count) in enumerate(zip(reqs, starts, counts, strict=True)):
            end, length, table = start + count, len(req.tokens), tables[i]
            if count < 1 or end > length or is_sampled[i] != (end == length):
                self._fail(9, f"{start} + {count} of {length}, sampled: {is_sampled[i]}")
            if end > num_held[i] * size:
                self._fail(5, f"{end} tokens in {num_held[i]} blocks")
            tokens += req.tokens[start:end]
            for position in range(start, end):
                n, offset = divmod(position, size)
                shadow[table[n]][offset] = req.blocks[n][offset]
                written.append((table[n], offset))
        if batch.input_ids.tolist() != tokens:
            self._fail(5, f"computes {batch.input_ids}, not {tokens}")
        if not batch.is_prefill and len(tokens) != self.scheduler.num_running:
            self._fail(8, "a decode step is one token for each running sequence")
        self._count_step(sum(starts) if batch.is_prefill else 0, len(seqs), sum(is_sampled))

        if len(set(written)) < len(written):
            self._fail(6, f"slots {written}")
        manager = self.scheduler.block_manager
        for block, _ in written:
            if manager._ref_counts[block] != 1 or manager._hashes[block] is not None:
                self._fail(7, f"block {block} is shared or published, and written")
        for req, start, count, table in zip(reqs, starts, counts, tables, strict=True):
            n, rest = divmod(start + count, size)
            found = [shadow[block] for block in table[:n]]
            if found != req.blocks[:n] or rest and shadow[table[n]][:rest] != req.blocks[n][:rest]:
                self._fail(5, f"{start} + {count} tokens of {req.blocks} read {found}, ...")

    def _count_step(self, num_hit_tokens: int, num_seqs: int, num_sampled: int) -> None:
        self.counts["hit tokens"] += num_hit_tokens
        self.counts["chunks"] += num_seqs - num_sampled
        self.silent_steps = 0 if num_sampled else self.silent_steps + 1
        if self.silent_steps >= self.max_silent_steps:
            self._fail(11, f"{self.silent_steps} steps without a token")

    def _poison(self, blocks: list[int]) -> None:
        """Take the K/V of failed requests for garbage, where no healthy one vouches for it."""
        for block, num_holders in Counter(blocks).items():
            if num_holders == self.ref_counts[block]:
                self.shadow[block] = [-1] * self.block_size
                if self.scheduler.block_manager._hashes[block] is not None:
                    self._fail(3, f"block {block} of a failed step is cached")

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
        if running + self.joining + waiting != list(self.live):
            self._fail(10, "the queues are not what was submitted, in its order")
        num_cached, num_tokens = table.num_cached_tokens.tolist(), table.num_tokens.tolist()
        rows = []
        for seq in running:
            row = seq.row
            rows.append(row)
            if num_cached[row] != num_tokens[row] - 1 or seq.status is not SequenceStatus.RUNNING:
                self._fail(9, f"running: {num_cached[row]} of {num_tokens[row]}, {seq.status}")
        for i, seq in enumerate(self.joining + waiting):
            row = seq.row
            if seq.status is not SequenceStatus.WAITING:
                self._fail(10, f"waiting: {seq.status}")
            if row is None:
                continue
            rows.append(row)
            if i > len(self.joining) or num_cached[row] >= num_tokens[row]:
                self._fail(9, "admitted out of turn, or with nothing left to compute")
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
        ref_counts = [0] * self.num_blocks
        for row in rows:
            for block in tables[row][: num_held[row]]:
                ref_counts[block] += 1
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
        self.joining: list[Sequence] = []
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
        ids = self.shadow[block]
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
        totals["scenarios"] += 1
    return totals
