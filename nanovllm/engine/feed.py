"""feed: requests from an iterator of any length, results as they end; only what runs is held."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from numbers import Integral
from typing import Any

from nanovllm.engine.intake import Intake, known_prompt_ids
from nanovllm.engine.request import Item, Request, refused
from nanovllm.engine.step_loop import StepLoop
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

CHUNK = 64  # prompts checked and tokenized at once, which is faster than one by one


def feed(
    loop: StepLoop, intake: Intake, check: Callable[[], object], items: Iterable[Item | None]
) -> Generator[tuple[int, RequestOutput], None, None]:
    """See LLMEngine.generate_each. check: raises if the engine can take no such call now."""
    check()  # again: another one may have been begun meanwhile
    source = _Source(intake, items)
    todo = source.requests()
    while not source.is_done:  # serving ends where there is nothing for now, too
        with closing(loop.serve(todo)) as outcomes:
            for outcome in outcomes:
                for request in outcome.ended:
                    yield request.index, request.output()
                yield from source.take_refused()
        yield from source.take_refused()


class _Source:
    def __init__(self, intake: Intake, items: Iterable[Item | None]) -> None:
        self.is_done = False  # nothing will come any more
        self._intake, self._items = intake, enumerate(items)
        self._refused: list[tuple[int, RequestOutput]] = []

    def requests(self) -> Iterator[Request | None]:
        """A request for each item that can be run; None: none for now."""
        while not self.is_done:
            chunk, is_short = self._next_chunk()
            params = [SamplingParams() if params is None else params for _, _, params in chunk]
            # A number is a bad prompt, and at the start of a list it would make that one prompt.
            prompts = [
                {"prompt_token_ids": p} if isinstance(p, Integral) else p for _, p, _ in chunk
            ]
            prepared = self._intake.read(prompts, params, "return")
            for (key, _, _), p in zip(chunk, prepared, strict=True):
                if p.error is None:
                    yield self._intake.make(replace(p, index=key), turn=key)
                else:
                    error = _without_place(p.error, p.index)
                    self._refused.append((key, refused(known_prompt_ids(p), error)))
            if is_short or self._refused:  # these are told of after a step
                yield None

    def take_refused(self) -> list[tuple[int, RequestOutput]]:
        taken, self._refused = self._refused, []
        return taken

    def _next_chunk(self) -> tuple[list[Item], bool]:
        """And whether there is less than a chunk for now."""
        chunk: list[Item] = []
        for i, item in islice(self._items, CHUNK):
            if item is None:
                return chunk, True
            _check_item(f"requests[{i}]", item)
            chunk.append(item)
        self.is_done = len(chunk) < CHUNK
        return chunk, False


def _check_item(name: str, item: Any) -> None:
    got = type(item).__name__
    if isinstance(item, (tuple, list)):
        key = item[0] if len(item) == 3 else None
        if isinstance(key, Integral) and 0 <= int(key) < 2**63:
            return
        kind = "an integer out of range" if isinstance(key, Integral) else type(key).__name__
        got = f"{kind} as key" if len(item) == 3 else f"{got} of {len(item)}"
    need = "needs (key, prompt, SamplingParams or None), the key an integer from 0, below 2**63"
    raise TypeError(f"{name}: got {got}, {need}, try enumerate(prompts) for the keys")


def _without_place(error: Exception, place: int) -> ValueError:
    """Places in a chunk mean nothing to the caller."""
    said = str(error).replace(f"sampling_params[{place}].", "")
    for name in ("prompt", "sampling_param"):
        said = said.replace(f"{name}s[{place}]", name)
    return ValueError(said)
