"""StepLoop: launches steps, reads them back, and moves every request on to its end.

It knows requests and what a step gives; which requests there are, and what becomes of their
results, is up to the engine.
"""

import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.request import Request, Sample
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import ScheduledBatch, Sequence
from nanovllm.engine.step_handle import StepHandle
from nanovllm.engine.worker_group import WorkerGroup
from nanovllm.errors import EngineDeadError

_FIRST = 128  # requests: a step long enough to make those of the next one meanwhile


@dataclass(slots=True)
class Outcome:
    """What one call of step did."""

    batch: ScheduledBatch | None  # launched
    ended: list[Request]
    touched: list[Sample]  # watched ones that got a token


class StepLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        workers: WorkerGroup,
        overlap: bool,
        close: "weakref.finalize[Any, Any]",
    ) -> None:
        """close: ends the engine, when its ranks can no longer work together."""
        self._close, self._end = close, "was closed"
        self._scheduler, self._runner, self._workers = scheduler, runner, workers
        self._overlap = overlap
        self.is_serving = False
        # Held by the thread that changes what is below; another one waits until a step is over.
        self.turn = threading.RLock()
        self._requests: dict[int, Request] = {}  # of each unfinished sequence, by its id
        self._by_id: dict[int, Request] = {}  # those with a sample that has not ended
        self._watched: dict[int, Sample] = {}  # likewise, those that look at each token
        self._ended: list[Request] = []  # aborted since the last step
        # Steps launched and not read back, oldest first: at most one between two calls.
        self._inflight: deque[tuple[ScheduledBatch, StepHandle]] = deque()

    def check_open(self) -> None:
        if not self._close.alive:
            raise RuntimeError(f"this engine {self._end}, needs an open one, make a new LLM")

    def is_finished(self) -> bool:
        """Whether no request is waiting or running, or has an end that no step has told of."""
        return self._scheduler.is_finished() and not self._ended

    def abort(self, request_id: int) -> None:
        """End a request, which the next step tells of; one that has ended is left alone."""
        with self.turn:
            request = self._by_id.pop(request_id, None)
            if request is not None:
                seqs = [s.seq for s in request.samples if s.seq.seq_id in self._requests]
                self._scheduler.abort(seqs)
                self._forget(seqs)
                self._ended.append(request)

    def add(self, request: Request) -> None:
        seqs = [sample.seq for sample in request.samples]
        self._by_id[request.request_id] = request
        for sample in request.samples:
            self._requests[sample.seq.seq_id] = request
            if sample.is_watched:
                self._watched[sample.seq.seq_id] = sample
        try:
            for seq in seqs:
                self._scheduler.add(seq)
        except BaseException:  # an interrupt
            self._scheduler.abort(seqs)
            self._forget(seqs)
            del self._by_id[request.request_id]
            raise

    def _forget(self, seqs: Iterable[Sequence]) -> None:
        for seq in seqs:
            del self._requests[seq.seq_id]
            self._watched.pop(seq.seq_id, None)

    def serve(self, todo: Iterator[Request | None]) -> Generator[Outcome, None, None]:
        """Run these requests, a step at a time. None among them: there are no more for now.

        Only as many are taken as the scheduler may want soon, so that the device need not wait for
        the others. Whatever ends this early, no request and no block stays behind. Raises
        RuntimeError where there are other requests, as of a call in another thread.
        """
        with self.turn:
            if self.is_serving or not self.is_finished():
                raise RuntimeError(
                    "this engine is at work for another call, perhaps in another thread, needs to"
                    " end it first, try one call with all prompts, or a lock around the calls"
                )
            self.is_serving = True
        try:
            while True:
                self._fill_queue(todo)
                with self.turn:
                    if self.is_finished():
                        return
                    outcome = self.step()
                yield outcome
        except BaseException:  # an interrupt too
            self.reset()
            raise
        finally:
            self.is_serving = False

    def _fill_queue(self, todo: Iterator[Request | None]) -> None:
        """Take as many as the scheduler may want soon; for an idle device only those of a first
        step, unless policy "prefix" is to bring more of them into order."""
        scheduler, wanted = self._scheduler, self._scheduler.max_num_running + 1
        if scheduler.is_finished() and scheduler.policy != "prefix":
            wanted = min(wanted, _FIRST)
        while scheduler.num_waiting < wanted:
            request = next(todo, None)
            if request is None:
                break
            with self.turn:  # not around next: what makes requests may wait for other threads
                self.add(request)

    def step(self) -> Outcome:
        """Launch the next step, then read back the one before it, or this one without overlap. It
        takes the caller's turn.

        While the host does the second, stores the tokens and makes their text, the device works
        on the first.
        """
        self.check_open()
        outcome = Outcome(None, self._ended, [])
        self._ended = []
        try:
            if any(sample.grammar is not None for sample in self._watched.values()):
                while self._inflight:  # a mask needs the token before it
                    self._read_back(outcome)
            outcome.batch = batch = self._scheduler.schedule()
            if batch is not None:
                self._launch(batch)
            num_kept = 1 if self._overlap and batch is not None else 0
            # Once every request has ended, the step still in flight holds nothing but surplus.
            while len(self._inflight) > num_kept or (
                self._inflight and self._scheduler.is_finished()
            ):
                self._read_back(outcome)
            return outcome
        except BaseException:
            # How far the step got is unknown, so nothing of it is kept.
            self.reset()
            raise

    def _launch(self, batch: ScheduledBatch) -> None:
        """On every rank. Ranks of which one fails in between are out of step for good."""
        with self._in_step():
            self._workers.send_batch(batch)
            self._inflight.append((batch, self._runner.launch(batch)))
            self._workers.wait()

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """What goes wrong in here is about all ranks, and ends them."""
        with self._workers.uninterrupted():
            try:
                yield
            except BaseException as error:
                fault = self._workers.explain(error)
                if fault is None:  # there is one rank
                    raise
                self._end = f"ended with {type(error).__name__} in a step of several ranks"
                self._close()
                if isinstance(error, EngineDeadError) or not isinstance(error, Exception):
                    raise
                raise fault from error

    def _read_back(self, outcome: Outcome) -> None:
        """Wait for the oldest step in flight, and move on the sequences it computed."""
        batch, handle = self._inflight.popleft()
        with self._in_step():
            token_ids = handle.token_ids()
            self._workers.check()  # of a step that lost a rank nothing is sound
        finished = self._scheduler.update(batch, token_ids)
        if self._watched:
            self._take_logprobs(batch, token_ids, handle)
            finished += self._watch(batch, token_ids, outcome)
        requests = [self._requests[seq.seq_id] for seq in finished]
        self._forget(finished)
        for request in requests:
            request.num_running -= 1
            if not request.num_running:
                del self._by_id[request.request_id]
                outcome.ended.append(request)

    def _watch(self, batch: ScheduledBatch, token_ids: Any, outcome: Outcome) -> list[Sequence]:
        """Show new tokens to the samples that look at each one; those which that ended."""
        ended = []
        seq_ids = batch.seq_ids[batch.is_sampled].tolist()
        for seq_id, token in zip(seq_ids, token_ids.tolist(), strict=True):
            sample = self._watched.get(seq_id)
            if sample is None:  # most are not watched, some ended a step before
                continue
            outcome.touched.append(sample)
            if token >= 0 and (reason := sample.append(token)) is not None:
                if sample.seq.finish_reason is None:
                    self._scheduler.end(sample.seq, reason)
                    ended.append(sample.seq)
                sample.seq.finish_reason = reason
        return ended

    def _take_logprobs(self, batch: ScheduledBatch, token_ids: Any, handle: StepHandle) -> None:
        found = handle.logprobs()
        if found is not None:
            rows = [row for row in batch.special if row.ask.params.logprobs is not None]
            for row, *values in zip(rows, *(part.tolist() for part in found), strict=True):
                sample, token = self._watched.get(row.ask.seq_id), int(token_ids[row.place])
                if sample is not None and token >= 0:
                    sample.add_logprobs(token, *values)
        pieces = (batch.prompt_logprobs >= 0).nonzero()[0].tolist()
        for i, piece in zip(pieces, handle.prompt_logprobs(), strict=True):
            request = self._requests.get(int(batch.seq_ids[i]))
            if request is not None:
                request.add_prompt_logprobs(int(batch.num_cached_tokens[i]), piece)

    def reset(self) -> None:
        """Drop all requests."""
        with self.turn:
            self._inflight.clear()
            self._requests.clear()
            self._by_id.clear()
            self._watched.clear()
            self._ended.clear()
            self._scheduler.reset()
