"""LLM: the engine under the name users of vLLM look for."""

from nanovllm.engine.llm_engine import LLMEngine


class LLM(LLMEngine):
    """See LLMEngine; `LLM(model, **kwargs)` takes the fields of `Config`."""
