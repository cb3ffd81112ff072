"""Model families: the architectures that can be run, by the name in a checkpoint's config.

Owns the list. Imports a family only when a checkpoint asks for it.
"""

from importlib import import_module
from typing import Any

# Architecture, which is the class's name too -> its module within this package.
_MODELS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


def get_model_class(hf_config: Any) -> Any:
    """The class that implements the architecture of a transformers config."""
    names = getattr(hf_config, "architectures", None) or []
    name = names[0] if names else None
    if name not in _MODELS:
        need = f"one of {sorted(_MODELS)}, try a checkpoint of a supported family"
        raise ValueError(f"architectures: got {names}, needs {need}")
    return getattr(import_module(f"{__name__}.{_MODELS[name]}"), name)
