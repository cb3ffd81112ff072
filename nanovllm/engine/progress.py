"""Progress: the bar over finished requests, with the speed of the last steps of each kind, and the
line about all of them at the end."""

import logging
import time
from collections.abc import Collection

from tqdm.auto import tqdm

from nanovllm.engine.sequence import ScheduledBatch
from nanovllm.outputs import RequestOutput, count_tokens

logger = logging.getLogger("nanovllm")


class Progress:
    def __init__(self, num_requests: int, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._bar = tqdm(total=num_requests, desc="Generating", disable=not is_shown)
        self._speeds = {"prefill": "0 tok/s", "decode": "0 tok/s"}
        self._start = self._last = time.perf_counter()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()

    def update(self, batch: ScheduledBatch | None, num_finished: int) -> None:
        """batch: the step that was launched last, if there was one."""
        if self._bar.disable:
            return
        if batch is not None:
            now = time.perf_counter()
            speed = batch.num_tokens / (now - self._last)
            self._last = now
            self._speeds["prefill" if batch.is_prefill else "decode"] = f"{speed:.0f} tok/s"
            self._bar.set_postfix(self._speeds, refresh=False)
        self._bar.update(num_finished)

    def log_end(self, outputs: Collection[RequestOutput]) -> None:
        """How much there was, and how much of it the prefix cache spared, unless nobody watches."""
        if not self._is_shown:
            return
        num_prompt = sum(len(output["prompt_token_ids"]) for output in outputs)
        num_cached = sum(output["num_cached_tokens"] for output in outputs)
        num_output = sum(map(count_tokens, outputs))
        seconds = time.perf_counter() - self._start
        logger.info(
            f"nanovllm: {len(outputs)} requests, {num_prompt} prompt tokens "
            f"({100 * num_cached / max(num_prompt, 1):.0f} % of them cached), {num_output} output "
            f"tokens in {seconds:.1f} s, {num_output / seconds:.0f} tok/s"
        )
