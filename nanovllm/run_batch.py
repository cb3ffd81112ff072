"""run-batch: every line of a file through one engine, its results as they end.

It owns the job: which lines are in flight, what is shown and how it ends. What lines mean is in
batch_lines and batch_results, where they come from and go to in batch_files.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import IO, TYPE_CHECKING, Any

from tqdm.auto import tqdm

from nanovllm import batch_files
from nanovllm.batch_lines import Line, LineReader
from nanovllm.batch_results import known_result, result_line
from nanovllm.config import Config
from nanovllm.engine.request import Item, refused
from nanovllm.outputs import RequestOutput, count_tokens
from nanovllm.utils.garbage import collected_rarely

if TYPE_CHECKING:
    from nanovllm.llm import LLM

# Exit statuses. argparse's own is 2 as well.
ALL_DONE, SOME_FAILED, NOT_FINISHED, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class Job:
    """What a command line asks for."""

    source: str
    target: str
    config: Config
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of SamplingParams
    resume: bool = False
    ray: str | None = None  # a cluster's address, "" for one on this machine; None: no Ray
    replicas: int = 1  # engines, with Ray


def open_engine(config: Config) -> "LLM":
    from nanovllm.llm import LLM

    return LLM(**asdict(config))


def run_batch(job: Job) -> int:
    """Run a job to its end, through one engine in this process; its exit status."""
    return ending(lambda: _run_batch(job))


def _run_batch(job: Job) -> int:
    # The input comes first: without one, no output is made.
    with (
        batch_files.open_input(job.source) as stream,
        closing(batch_files.ResultFile(job.target, job.resume, known_result)) as results,
    ):
        num_lines = batch_files.count_lines(job.source)
        if num_lines is not None and results.held.last > num_lines:
            got = f"it has line {results.held.last:,} of an input of {num_lines:,}"
            raise ValueError(f"{job.target}: cannot go on with it, {got}")
        with Progress(num_lines, results.held) as progress:
            lines = new_lines(stream, LineReader(job.defaults), results.held)
            _run(job, lines, results, progress)
    progress.say_summary()
    return SOME_FAILED if progress.num_failed else ALL_DONE


def ending(run: Callable[[], int]) -> int:
    """The status that run() returns, or that of what ended it early, which is said."""
    try:
        return run()
    except KeyboardInterrupt:
        say("interrupted; --resume goes on where it ended")
        return INTERRUPTED
    except (TypeError, ValueError) as error:
        say(f"error: {error}")
        return NOT_FINISHED
    except (OSError, RuntimeError, *batch_files.GZIP_ERRORS) as error:
        # EngineDeadError is a RuntimeError.
        say(f"error: {error}; what is written stays, and --resume goes on with it")
        return NOT_FINISHED


def say(text: str) -> None:
    sys.stderr.write(f"run-batch: {text}\n")


def new_lines(stream: IO[bytes], reader: LineReader, held: batch_files.Held) -> Iterator[Line]:
    """The lines that have no result yet, those that cannot be run among them."""
    seen = batch_files.TextSet()
    for number, raw in batch_files.read_lines(stream):
        if raw is None:
            line = Line(number, b"", error=f"longer than {batch_files.MAX_LINE_BYTES:,} bytes")
        else:
            line = reader.read(number, raw)
        if line.custom_id is not None and not seen.add(line.custom_id) and line.error is None:
            line.error = f"custom_id: got {line.custom_id!r:.80} a second time, needs its own"
        if not held.has(number, line.custom_id):
            yield line


def _run(
    job: Job, lines: Iterator[Line], results: batch_files.ResultFile, progress: "Progress"
) -> None:
    window: dict[int, Line] = {}  # in flight, by their keys

    def fail(line: Line, error: str) -> None:
        results.write(result_line(line, error_output(error)))
        progress.add(0, is_failed=True)

    def runnable() -> Iterator[Line]:
        for line in lines:
            if line.error is None:
                yield line
            else:
                fail(line, line.error)

    def items(engine: "LLM", todo: Iterator[Line]) -> Iterator[Item]:
        for line in todo:
            try:
                prompt = engine_prompt(engine, line)
            except (ValueError, TypeError) as error:
                fail(line, str(error))
                continue
            window[line.key] = line
            yield line.key, prompt, line.params

    todo = runnable()
    first = next(todo, None)
    if first is None:  # an engine takes seconds to start
        return
    with collected_rarely(), closing(open_engine(job.config)) as engine:
        progress.restart()
        with closing(engine.generate_each(items(engine, chain([first], todo)))) as outputs:
            for key, output in outputs:
                results.write(result_line(window.pop(key), output))
                progress.add(count_tokens(output), output["finish_reason"] == "error")


def engine_prompt(engine: "LLM", line: Line) -> Any:
    """What generate takes; a conversation goes through the chat template."""
    if line.chat is None:
        return line.prompt
    from nanovllm.engine.chat import render_chat

    (token_ids,) = render_chat(engine.tokenizer, line.prompt, **line.chat)
    return {"prompt_token_ids": token_ids}


def error_output(error: str) -> RequestOutput:
    """Of a line that no engine has seen."""
    return refused([], ValueError(error))


class Progress:
    """The bar: finished lines of all, tokens per second, failures, and the time that is left."""

    def __init__(
        self, num_lines: int | None, held: batch_files.Held, is_shown: bool = True
    ) -> None:
        self.num_failed = held.num_failed
        self._num_done, self._num_tokens = held.num, 0
        self._start = time.perf_counter()
        # A file that keeps the log need not keep every tenth of a second.
        interval = 0.1 if sys.stderr.isatty() else 10.0
        self._bar = tqdm(
            total=num_lines,
            initial=held.num,
            unit="line",
            mininterval=interval,
            file=sys.stderr,
            disable=not is_shown,
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if exc_info[0] is None:
            self._bar.total = self._num_done  # blank lines had been counted
        self._show()
        self._bar.close()

    def restart(self) -> None:
        """What took time until now says nothing about the rest."""
        self._start = time.perf_counter()
        self._bar.unpause()

    def add(self, num_tokens: int, is_failed: bool) -> None:
        self._num_done += 1
        self._num_tokens += num_tokens
        self.num_failed += is_failed
        if self._bar.update(1):
            self._show()

    def say_summary(self) -> None:
        seconds = time.perf_counter() - self._start
        say(
            f"{self._num_done:,} lines, {self.num_failed:,} of them failed; {self._num_tokens:,}"
            f" new tokens in {seconds:,.1f} s, {self._num_tokens / seconds:,.0f} tok/s"
        )

    def _show(self) -> None:
        speed = self._num_tokens / max(time.perf_counter() - self._start, 1e-9)
        self._bar.set_postfix_str(f"{speed:,.0f} tok/s, {self.num_failed:,} failed", refresh=False)
