"""Qwen3-MoE: Qwen3's attention; of most layers the MLP is a mixture of experts."""

from typing import Any

from torch import nn

from nanovllm.layers.moe import SparseMoE, packed_experts
from nanovllm.models import checks
from nanovllm.models.decoder import CausalLM, Parts


class Qwen3MoeForCausalLM(CausalLM):
    model_type = "qwen3_moe"

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        experts = packed_experts(hf_config.num_experts)
        self.packed_modules_mapping = {**CausalLM.packed_modules_mapping, **experts}

    @classmethod
    def check_own_fields(cls, hf_config: Any) -> None:
        checks.check_flags(hf_config, ["attention_bias", "norm_topk_prob"])
        checks.check_counts(
            hf_config,
            ["moe_intermediate_size", "num_experts", "num_experts_per_tok", "decoder_sparse_step"],
        )
        limit, need = hf_config.num_experts, f"at most num_experts = {hf_config.num_experts}"
        checks.check_field(hf_config, "num_experts_per_tok", need, lambda x: x <= limit)
        need = "a list of layer numbers"
        checks.check_field(hf_config, "mlp_only_layers", need, lambda x: checks.is_list_of(x, int))

    @classmethod
    def read_parts(cls, hf_config: Any) -> Parts:
        is_sliding = getattr(hf_config, "use_sliding_window", False)
        return Parts(
            qkv_bias=hf_config.attention_bias,
            o_bias=hf_config.attention_bias,
            qk_norm=True,
            sliding_window=getattr(hf_config, "sliding_window", None) if is_sliding else None,
        )

    @classmethod
    def sharded_fields(cls, hf_config: Any) -> list[str]:
        is_sparse = [is_sparse_layer(hf_config, i) for i in range(hf_config.num_hidden_layers)]
        sizes = {True: "moe_intermediate_size", False: "intermediate_size"}
        return ["num_attention_heads", *(sizes[x] for x in (True, False) if x in is_sparse)]

    def make_mlp(self, layer_idx: int) -> nn.Module:
        c = self.hf_config
        if not is_sparse_layer(c, layer_idx):
            return super().make_mlp(layer_idx)
        sizes = c.hidden_size, c.moe_intermediate_size, c.num_experts
        return SparseMoE(*sizes, c.num_experts_per_tok, c.norm_topk_prob)


def is_sparse_layer(hf_config: Any, layer_idx: int) -> bool:
    """Whether the layer's MLP is a mixture of experts: every decoder_sparse_step-th, but for some
    that the config lists."""
    is_step = (layer_idx + 1) % hf_config.decoder_sparse_step == 0
    return is_step and layer_idx not in hf_config.mlp_only_layers
