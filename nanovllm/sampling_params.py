"""SamplingParams: what one request asks of the sampler, validated; the engine never changes it."""

import math
import numbers
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one request. The defaults are these, whatever generation_config.json says."""

    temperature: float = 1.0  # >= 0; 0 is greedy: always the most probable token
    max_tokens: int | None = 64  # >= 1 new tokens; None: up to the engine's length limit
    ignore_eos: bool = False  # True: an end-of-sequence token is a token like any other

    def __post_init__(self) -> None:
        t = self.temperature
        if isinstance(t, bool) or not isinstance(t, numbers.Real):
            raise TypeError(f"temperature: got {t!r}, needs a number >= 0, try 0.6 or 0 for greedy")
        try:
            t = float(t)
        except OverflowError:  # an integer too large for a float
            t = math.inf
        if not (math.isfinite(t) and t >= 0):
            raise ValueError(f"temperature: got {t}, needs a finite number >= 0, try 0.6 or 0")
        n = self.max_tokens
        if n is not None:
            if isinstance(n, bool) or not isinstance(n, numbers.Integral):
                raise TypeError(f"max_tokens: got {n!r}, needs an integer >= 1 or None, try 256")
            if n < 1:
                raise ValueError(
                    f"max_tokens: got {n}, needs at least 1, try 256 or None (no limit)"
                )
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos: got {self.ignore_eos!r}, needs True or False")
        object.__setattr__(self, "temperature", t)
        object.__setattr__(self, "max_tokens", None if n is None else int(n))
