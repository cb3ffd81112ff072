"""Llama 2 and 3, and what shares their architecture's name, such as SmolLM."""

from typing import Any

from nanovllm.models import checks
from nanovllm.models.decoder import CausalLM, Parts


class LlamaForCausalLM(CausalLM):
    model_type = "llama"

    @classmethod
    def check_own_fields(cls, hf_config: Any) -> None:
        checks.check_flags(hf_config, ["attention_bias", "mlp_bias"])

    @classmethod
    def read_parts(cls, hf_config: Any) -> Parts:
        return Parts(
            qkv_bias=hf_config.attention_bias,
            o_bias=hf_config.attention_bias,
            mlp_bias=hf_config.mlp_bias,
        )
