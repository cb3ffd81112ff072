"""Model families: the architectures that can be run, by the name in a checkpoint's config.

Owns the list. Imports a family only when a checkpoint asks for it.
"""

from importlib import import_module
from typing import Any

# Architecture -> "module:Class" within this package.
_MODELS = {
    "LlamaForCausalLM": "llama:LlamaForCausalLM",
    "MistralForCausalLM": "mistral:MistralForCausalLM",
    "Qwen2ForCausalLM": "qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "qwen3_moe:Qwen3MoeForCausalLM",
}


def get_model_class(hf_config: Any) -> Any:
    """The class that implements the architecture of a transformers config."""
    architectures = getattr(hf_config, "architectures", None) or []
    if not architectures or architectures[0] not in _MODELS:
        raise ValueError(
            f"architectures: got {architectures}, needs one of {sorted(_MODELS)}, "
            "try a checkpoint of a supported family"
        )
    module, _, class_name = _MODELS[architectures[0]].partition(":")
    return getattr(import_module(f"{__name__}.{module}"), class_name)
