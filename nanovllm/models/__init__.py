"""Model families: the architectures that can be run, by the name in a checkpoint's config.

Owns the list. Imports a family only when a checkpoint asks for it.
"""

from importlib import import_module
from typing import Any

# Architecture -> "module:Class" within this package.
_MODELS = {
    "Qwen3ForCausalLM": "qwen3:Qwen3ForCausalLM",
}


def get_model_class(hf_config: Any) -> Any:
    """The class that implements the architecture of a transformers config."""
    architectures = getattr(hf_config, "architectures", None) or []
    for architecture in architectures:
        if architecture in _MODELS:
            module, _, class_name = _MODELS[architecture].partition(":")
            return getattr(import_module(f"{__name__}.{module}"), class_name)
    raise ValueError(
        f"architectures: got {architectures}, needs one of {sorted(_MODELS)}, "
        "try a checkpoint of a supported family"
    )
