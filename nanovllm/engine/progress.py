"""Progress: the bar over finished requests, with the speed of the last steps of each kind."""

import time

from tqdm.auto import tqdm

from nanovllm.engine.sequence import ScheduledBatch


class Progress:
    def __init__(self, num_requests: int, is_shown: bool) -> None:
        self._bar = tqdm(total=num_requests, desc="Generating", disable=not is_shown)
        self._speeds = {"prefill": "0 tok/s", "decode": "0 tok/s"}
        self._last = time.perf_counter()

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
