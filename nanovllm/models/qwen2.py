"""Qwen2 and Qwen2.5: biases on q, k and v alone, which no field of the config mentions."""

from typing import Any

from nanovllm.models import checks
from nanovllm.models.decoder import CausalLM, Parts


class Qwen2ForCausalLM(CausalLM):
    model_type = "qwen2"

    @classmethod
    def read_parts(cls, hf_config: Any) -> Parts:
        return Parts(qkv_bias=True, sliding_window=checks.window_of_layers(hf_config))
