"""Qwen3, dense: every head of q and k has a norm before its rotation."""

from typing import Any

from nanovllm.models import checks
from nanovllm.models.decoder import CausalLM, Parts


class Qwen3ForCausalLM(CausalLM):
    model_type = "qwen3"

    @classmethod
    def check_own_fields(cls, hf_config: Any) -> None:
        checks.check_flags(hf_config, ["attention_bias"])

    @classmethod
    def read_parts(cls, hf_config: Any) -> Parts:
        return Parts(
            qkv_bias=hf_config.attention_bias,
            o_bias=hf_config.attention_bias,
            qk_norm=True,
            sliding_window=checks.window_of_layers(hf_config),
        )
