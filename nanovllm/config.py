"""Config: every engine knob, checked when it is made and frozen afterwards.

Values derived from the checkpoint (its length limit, its dtype) are not written back here: they
are returned by whoever computes them and passed on.
"""

import difflib
import json
import numbers
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nanovllm.errors import naming

DTYPES = ("auto", "float32", "float16", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = ("auto", "dummy")
SCHEDULE_POLICIES = ("fcfs", "prefix")


@dataclass(frozen=True, slots=True)
class Config:
    model: str  # checkpoint directory, or a hub id to download; read by LLMEngine
    max_num_batched_tokens: int = 16384  # most tokens computed in one step; read by Scheduler
    max_num_seqs: int = 512  # most sequences running at once, >= 1; read by Scheduler
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
    attention_backend: str = "auto"  # a name from nanovllm.attention, or auto: the fastest
    load_format: str = "auto"  # auto: safetensors; dummy: random weights, for benchmarks
    seed: int = 0  # >= 0, of the sampler's random numbers
    step_timeout: float = 60.0  # seconds, > 0, for other ranks to reply to a step; WorkerGroup
    start_timeout: float = 600.0  # seconds, > 0, for other ranks to load; WorkerGroup

    def __post_init__(self) -> None:
        # Normalised in place: numpy scalars become ints, a Path becomes a str.
        for name, check in self._checks().items():
            with naming(name):
                check(name)

    def _checks(self) -> dict[str, Callable[[str], None]]:
        """How each field is checked."""
        return {
            "model": self._check_model,
            "max_num_batched_tokens": partial(self._check_int, low=1),
            "max_num_seqs": partial(self._check_int, low=1),
            "max_model_len": partial(self._check_int, low=2),
            "gpu_memory_utilization": self._check_share,
            "tensor_parallel_size": partial(self._check_int, low=1, high=8),
            "kvcache_block_size": partial(self._check_int, low=1),
            "num_kvcache_blocks": self._check_num_blocks,
            "seed": partial(self._check_int, low=0, high=2**63 - 1),
            **dict.fromkeys(("step_timeout", "start_timeout"), self._check_seconds),
            **dict.fromkeys(("enforce_eager", "overlap", "deterministic"), self._check_flag),
            "dtype": partial(self._check_choice, choices=DTYPES),
            "device": partial(self._check_choice, choices=DEVICES),
            "load_format": partial(self._check_choice, choices=LOAD_FORMATS),
            "schedule_policy": partial(self._check_choice, choices=SCHEDULE_POLICIES),
            "attention_backend": self._check_name,
        }

    @classmethod
    def from_kwargs(cls, model: str, **kwargs: Any) -> "Config":
        """Build a Config, naming the nearest field when a keyword is unknown.

        Raises TypeError for an unknown keyword or a wrong type, ValueError for a wrong value.
        """
        known = [f.name for f in fields(cls)]
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise TypeError(
                    f"{name}: not a setting of LLM, needs one of its fields, try {near}"
                    f" (all: {', '.join(known)})"
                )
        return cls(model, **kwargs)

    def _check_model(self, name: str) -> None:
        if isinstance(self.model, Path):
            object.__setattr__(self, name, str(self.model))
        if not isinstance(self.model, str):
            got = f"{self.model!r:.80}"
            raise TypeError(f"model: got {got}, needs a directory or a hub id as a string")
        if not self.model.strip():
            raise ValueError("model: got an empty string, needs a directory or a hub id")

    def _check_int(self, name: str, low: int, high: int | None = None) -> None:
        value = getattr(self, name)
        need = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{name}: got {value!r:.80}, needs {need}")
        number = int(value)
        if number < low or (high is not None and number > high):
            raise ValueError(f"{name}: got {value!s:.80}, needs {need}")
        object.__setattr__(self, name, number)

    def _check_num_blocks(self, name: str) -> None:
        if self.num_kvcache_blocks is not None:
            self._check_int(name, 1)

    def _check_share(self, name: str) -> None:
        if not 0 < self._number(name, "a number, try 0.9") <= 1:  # also false for NaN
            got = getattr(self, name)
            raise ValueError(f"{name}: got {got!s:.80}, needs 0 < x <= 1, try 0.9")

    def _check_seconds(self, name: str) -> None:
        seconds = self._number(name, "a number of seconds, try 60")
        if not 0 < seconds < 1e6:  # also false for NaN
            got = getattr(self, name)
            raise ValueError(f"{name}: got {got!s:.80}, needs 0 < seconds < 1e6, try 60")
        object.__setattr__(self, name, seconds)

    def _number(self, name: str, need: str) -> float:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name}: got {value!r:.80}, needs {need}")
        return float(value)

    def _check_flag(self, name: str) -> None:
        if not isinstance(getattr(self, name), bool):
            raise TypeError(f"{name}: got {getattr(self, name)!r:.80}, needs True or False")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        self._check_name(name, f"a string, one of {', '.join(choices)}")
        if getattr(self, name) not in choices:
            got = getattr(self, name)
            raise ValueError(f"{name}: got {got!r:.80}, needs one of {', '.join(choices)}")

    def _check_name(self, name: str, need: str = "a name") -> None:
        if not isinstance(getattr(self, name), str):
            raise TypeError(f"{name}: got {getattr(self, name)!r:.80}, needs {need}")


def resolve_checkpoint(model: str) -> Path:
    """The checkpoint directory `model` names, downloading it when it is a hub id.

    Raises ValueError, saying what to try, when it is neither a directory nor reachable on the hub.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ValueError(
            f"model: got {model!r}, needs an existing checkpoint directory (or a hub id such as"
            " Qwen/Qwen3-0.6B), check the path"
        )
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
        raise ValueError(
            f"model: {str(path)!r} has no config.json{' but ' * bool(others)}"
            f"{', '.join(others[:5])}, needs a folder with config.json and *.safetensors, try the "
            "safetensors version of this checkpoint"
        )
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
            raise ValueError(
                f"{name}: got {value!r:.80}, needs a positive integer up to {limit}, try the"
                " published config.json"
            )
