"""Mistral: no bias anywhere; with a sliding window, every layer has it."""

from typing import Any

from nanovllm.models.decoder import CausalLM, Parts


class MistralForCausalLM(CausalLM):
    model_type = "mistral"

    @classmethod
    def read_parts(cls, hf_config: Any) -> Parts:
        return Parts(sliding_window=getattr(hf_config, "sliding_window", None))
