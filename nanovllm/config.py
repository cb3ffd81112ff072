"""Config: every engine knob, checked when it is made and frozen afterwards.

Values derived from the checkpoint (its length limit, its dtype) are not written back here: they
are returned by whoever computes them and passed on.
"""

import difflib
import json
import numbers
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nanovllm.errors import naming


@dataclass(frozen=True, slots=True)
class Config:
    model: str  # checkpoint directory, or a hub id to download; read by LLMEngine
    max_num_batched_tokens: int = 16384  # most tokens computed in one step; read by Scheduler
    max_num_seqs: int = 512  # most sequences running at once, 1 to 65,535; read by Scheduler
    max_model_len: int = 4096  # prompt + output tokens, >= 2; clamped to what the model allows
    gpu_memory_utilization: float = 0.9  # share of device memory to plan for, (0, 1]; kv_cache
    tensor_parallel_size: int = 1  # ranks, 1 to 8; read by WorkerGroup
    enforce_eager: bool = False  # True: no CUDA graphs; read by ModelRunner
    overlap: bool = True  # launch a step before the last one's tokens are read; LLMEngine
    deterministic: bool = False  # the same bits in any batch, a token at a time; CPU; row_by_row
    kvcache_block_size: int = 256  # tokens per block, >= 1; the backend may ask for a multiple
    num_kvcache_blocks: int | None = None  # pool size, >= 1; None: measured by kv_cache
    dtype: str = "auto"  # compute type; auto: the checkpoint's on CUDA, float32 on the CPU
    device: str = "auto"  # auto: CUDA where there is a GPU, else the CPU
    schedule_policy: str = "fcfs"  # or "prefix": sharers of a prefix together; read by Scheduler
    cascade_attention: bool = True  # decode reads shared prefixes once; Scheduler, ModelRunner
    attention_backend: str = "auto"  # a name from nanovllm.attention, or auto: the fastest
    load_format: str = "auto"  # auto: safetensors; dummy: random weights, for benchmarks
    seed: int = 0  # >= 0, of the sampler's random numbers
    step_timeout: float = 60.0  # seconds, > 0, for other ranks to reply to a step; WorkerGroup
    start_timeout: float = 600.0  # seconds, > 0, for other ranks to load; WorkerGroup

    def __post_init__(self) -> None:
        # Normalised in place: numpy scalars become ints, a Path becomes a str.
        for knob in fields(self):
            check, *limits = _CHECKS.get(knob.name, (_flag,))
            with naming(knob.name):
                value = check(knob.name, getattr(self, knob.name), *limits)
                object.__setattr__(self, knob.name, value)

    @classmethod
    def from_kwargs(cls, model: str, **kwargs: Any) -> "Config":
        """Build a Config, naming the nearest field when a keyword is unknown.

        Raises TypeError for an unknown keyword or a wrong type, ValueError for a wrong value.
        """
        known = [f.name for f in fields(cls)]
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                need = f"one of its fields, try {near} (all: {', '.join(known)})"
                raise TypeError(f"{name}: not a setting of LLM, needs {need}")
        return cls(model, **kwargs)


# -- one check per kind of field: its name, what was passed, limits -> what is stored --------------


def _check_type(is_right: bool, name: str, value: Any, need: str) -> None:
    if not is_right:
        raise TypeError(f"{name}: got {value!r:.80}, needs {need}")


def _flag(name: str, value: Any) -> bool:
    _check_type(isinstance(value, bool), name, value, "True or False")
    return value


def _model(name: str, value: Any) -> str:
    model = str(value) if isinstance(value, Path) else value
    _check_type(isinstance(model, str), name, value, "a directory or a hub id as a string")
    if not model.strip():
        raise ValueError(f"{name}: got an empty string, needs a directory or a hub id")
    return model


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    need = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    _check_type(is_integer, name, value, need)
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name}: got {value!s:.80}, needs {need}")
    return number


def _num_blocks(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value, 1)


def _number(
    name: str, value: Any, kind: str, span: str, example: str, fits: Callable[[float], bool]
) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    _check_type(is_number, name, value, f"{kind}, try {example}")
    number = float(value)
    if not fits(number):
        raise ValueError(f"{name}: got {value!s:.80}, needs {span}, try {example}")
    return number


def _name(name: str, value: Any, need: str = "a name") -> str:
    _check_type(isinstance(value, str), name, value, need)
    return value


def _choice(name: str, value: Any, *choices: str) -> str:
    _name(name, value, f"a string, one of {', '.join(choices)}")
    if value not in choices:
        raise ValueError(f"{name}: got {value!r:.80}, needs one of {', '.join(choices)}")
    return value


_SHARE = ("a number", "0 < x <= 1", "0.9", lambda x: 0 < x <= 1)
_SECONDS = ("a number of seconds", "0 < seconds < 1e6", "60", lambda x: 0 < x < 1e6)
# Fields that are not here are flags.
_CHECKS: dict[str, tuple[Any, ...]] = {
    "model": (_model,),
    "max_num_batched_tokens": (_integer, 1),
    "max_num_seqs": (_integer, 1, 65_535),  # a grid of programs has no more rows
    "max_model_len": (_integer, 2),
    "gpu_memory_utilization": (_number, *_SHARE),
    "tensor_parallel_size": (_integer, 1, 8),
    "kvcache_block_size": (_integer, 1),
    "num_kvcache_blocks": (_num_blocks,),
    "dtype": (_choice, "auto", "float32", "float16", "bfloat16"),
    "device": (_choice, "auto", "cpu", "cuda"),
    "schedule_policy": (_choice, "fcfs", "prefix"),
    "attention_backend": (_name,),
    "load_format": (_choice, "auto", "dummy"),
    "seed": (_integer, 0, 2**63 - 1),
    "step_timeout": (_number, *_SECONDS),
    "start_timeout": (_number, *_SECONDS),
}


def resolve_checkpoint(model: str) -> Path:
    """The checkpoint directory `model` names, downloading it when it is a hub id.

    Raises ValueError, saying what to try, when it is neither a directory nor reachable on the hub.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        need = "an existing checkpoint directory (or a hub id such as Qwen/Qwen3-0.6B)"
        raise ValueError(f"model: got {model!r}, needs {need}, check the path")
    from huggingface_hub import snapshot_download

    try:
        files = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
        # Some publish the weights a second time, in their authors' own layout.
        others = ["consolidated*", "original/*"]
        return Path(snapshot_download(model, allow_patterns=files, ignore_patterns=others))
    except Exception as error:  # the hub client's many network and lookup errors, same remedy
        raise ValueError(
            f"model: got {model!r}, which is not a directory here and could not be downloaded"
            f" ({type(error).__name__}); check the spelling and the network connection, or download"
            " it elsewhere and pass the directory"
        ) from error


# Far above any published checkpoint. Sizes beyond are damage, and tables or lists of that length,
# which transformers makes too, would take all memory.
_LIMITS = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 2**24),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2**16),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), 2**12),
    "moe_intermediate_size": 2**24,
    "num_hidden_layers": 2**9,
    "max_position_embeddings": 2**20,
}
# Fields for which a transformers config class would supply a default that we do not know, by
# architecture. A null stands for such a default too, except for those that may be null.
_EXPLICIT_FIELDS = {
    "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps",
    "tie_word_embeddings", "vocab_size",
}  # fmt: skip
_FAMILY_FIELDS = {
    "LlamaForCausalLM": {"attention_bias", "mlp_bias"},
    "MistralForCausalLM": {"sliding_window"},
    "Qwen2ForCausalLM": set[str](),
    "Qwen3ForCausalLM": {"attention_bias", "head_dim"},
    "Qwen3MoeForCausalLM": {
        *("attention_bias", "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size"),
        *("norm_topk_prob", "num_experts", "num_experts_per_tok"),
    },
}
_MAY_BE_NULL = {"max_window_layers", "sliding_window"}


def load_hf_config(path: Path) -> Any:
    """The checkpoint's config.json as an object of its fields; ValueError naming the file if bad.

    transformers reads it where it leaves fields to a default. Where it says everything, its values
    are all there is to know, and a start does not wait seconds for an import. Nor does one whose
    architecture is not among ours: it will be refused by its name.
    """
    file = path / "config.json"
    if not file.is_file():
        others = sorted(p.name for p in path.iterdir() if p.suffix in (".gguf", ".bin", ".pt"))
        found = f" but {', '.join(others[:5])}" if others else ""
        need = "a folder with config.json and *.safetensors"
        remedy = "try the safetensors version of this checkpoint"
        raise ValueError(f"model: {str(path)!r} has no config.json{found}, needs {need}, {remedy}")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        _check_sizes(values)
        if _says_everything(values):
            return SimpleNamespace(**values)
        from transformers import AutoConfig

        values.pop("num_labels", None)  # a list of that length is made
        return AutoConfig.for_model(values.pop("model_type", None), **values)
    except Exception as error:  # transformers raises whatever its parsers raise
        raise ValueError(f"model: {file} cannot be read: {error}") from error


def _says_everything(values: dict[str, Any]) -> bool:
    """Whether no default of transformers is needed, or would be of no use."""
    architecture = (values.get("architectures") or [None])[0]
    if architecture not in _FAMILY_FIELDS:
        return architecture is not None
    needed = _EXPLICIT_FIELDS | _FAMILY_FIELDS[architecture]
    if values.get("use_sliding_window"):
        needed = needed | {"sliding_window", "max_window_layers"}
    given = {name for name in values if values[name] is not None or name in _MAY_BE_NULL}
    rope = values.get("rope_parameters") or {}
    has_theta = "rope_theta" in given or (isinstance(rope, dict) and "rope_theta" in rope)
    return has_theta and needed <= given


def _check_sizes(values: dict[str, Any]) -> None:
    """Refuse what would break or exhaust those who read a config before a model checks it."""
    architectures = values.get("architectures") or []
    if not (isinstance(architectures, list) and all(isinstance(a, str) for a in architectures)):
        raise ValueError(f"architectures: got {architectures!r:.80}, needs a list of names")
    for name, limit in _LIMITS.items():
        value = values.get(name)
        if value is not None and not (type(value) is int and 0 < value <= limit):
            need = f"a positive integer up to {limit}, try the published config.json"
            raise ValueError(f"{name}: got {value!r:.80}, needs {need}")
