"""nanovllm: offline LLM inference that one person can read in an evening."""

import gc
from typing import TYPE_CHECKING

from nanovllm.errors import EngineDeadError, EngineTimeoutError
from nanovllm.outputs import Logprob, RequestOutput, StreamDelta
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM

__version__ = "0.3.0"
__all__ = [
    "LLM",
    "EngineDeadError",
    "EngineTimeoutError",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StreamDelta",
]


def __getattr__(name: str) -> object:
    # torch takes seconds to import; a script that only builds SamplingParams does not wait for it.
    if name == "LLM":
        # Of the million objects that come with it none is garbage; looking for it takes a sixth.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            from nanovllm.llm import LLM
        finally:
            if was_enabled:
                gc.enable()
        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
