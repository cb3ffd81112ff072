"""What can be seen in a config before anything is allocated: fields, settings, sizes per rank.

Owns the refusals, each of the form "field: got X, needs Y, try Z". Knows no module.
"""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from nanovllm.layers.linear import num_kv_replicas
from nanovllm.layers.rotary_embedding import RopeSettings

MAX_RANKS = 8  # as many as Config allows; looked at when those that work are listed
MAX_HEAD_DIM = 512  # twice the largest published; the table of rotations has as many columns

_DTYPES = ("None", "auto", "float64", "float32", "float16", "bfloat16")
_COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)


def head_dim_of(hf_config: Any) -> int:
    """Values per head: the config's own number, which need not be hidden_size / heads."""
    head_dim = getattr(hf_config, "head_dim", None)
    return hf_config.hidden_size // hf_config.num_attention_heads if head_dim is None else head_dim


def window_of_layers(hf_config: Any) -> int | None:
    """The sliding window of Qwen's dense families, if a layer uses it."""
    layer_types = getattr(hf_config, "layer_types", None)
    if layer_types is not None:
        is_sliding = "sliding_attention" in layer_types
    else:
        is_sliding = bool(getattr(hf_config, "use_sliding_window", False)) and (
            (getattr(hf_config, "max_window_layers", None) or 0) < hf_config.num_hidden_layers
        )
    return getattr(hf_config, "sliding_window", None) if is_sliding else None


def refuse(
    field: str, got: object, need: str, remedy: str = "the published config.json"
) -> NoReturn:
    raise ValueError(f"{field}: got {got!r:.80}, needs {need}, try {remedy}")


def check_field(hf_config: Any, field: str, need: str, is_valid: Callable[[Any], bool]) -> None:
    value = getattr(hf_config, field, None)
    if not is_valid(value):
        refuse(field, value, need)


def _check_optional(hf_config: Any, field: str, need: str, is_valid: Callable[[Any], bool]) -> None:
    check_field(hf_config, field, f"{need} or null", lambda x: x is None or is_valid(x))


def check_counts(hf_config: Any, fields: Iterable[str]) -> None:
    for field in fields:
        check_field(hf_config, field, "a positive integer", lambda x: type(x) is int and x > 0)


def check_flags(hf_config: Any, fields: Iterable[str]) -> None:
    for field in fields:
        check_field(hf_config, field, "true or false", lambda x: type(x) is bool)


def check_fields(hf_config: Any) -> None:
    """Presence, type and range of every field that the shared decoder reads."""
    check_counts(hf_config, _COUNTS)
    check_flags(hf_config, ["tie_word_embeddings"])
    small = "a small positive number"
    check_field(hf_config, "rms_norm_eps", small, lambda x: type(x) is float and 0 < x < 1)
    for field in ("sliding_window", "max_window_layers"):
        _check_optional(hf_config, field, "an integer", lambda x: type(x) is int)
    _check_optional(hf_config, "use_sliding_window", "true, false", lambda x: type(x) is bool)
    check_field(hf_config, "hidden_act", "'silu'", lambda x: x == "silu")
    _check_optional(hf_config, "layer_types", "a list of names", lambda x: is_list_of(x, str))
    heads, kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
    if heads % kv_heads:
        refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")
    head_dim = head_dim_of(hf_config)
    if type(head_dim) is not int or not 0 < head_dim <= MAX_HEAD_DIM or head_dim % 2:
        refuse("head_dim", head_dim, f"a positive even integer up to {MAX_HEAD_DIM}")


def is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def check_unquantized(hf_config: Any) -> None:
    """fp8, AWQ, GPTQ, compressed-tensors, bitsandbytes: whoever made the file says so in it."""
    for field in ("quantization_config", "compression_config"):
        settings = getattr(hf_config, field, None)
        if settings:
            method = getattr(settings, "quant_method", None)
            if isinstance(settings, dict):
                method = settings.get("quant_method")
            got = f"{method or 'a quantized checkpoint'!s:.80}"
            need = "unquantized weights, try the float16 or bfloat16 checkpoint of this model"
            raise ValueError(f"{field}: got {got}, needs {need}")


def check_settings(hf_config: Any, model_type: str) -> None:
    """Settings that other software acts on and the decoder does not."""
    name = getattr(hf_config, "model_type", None) or model_type
    if name != model_type:
        refuse("model_type", name, f"{model_type!r}, as architectures says")
    dtype = getattr(hf_config, "dtype", None) or getattr(hf_config, "torch_dtype", None)
    if str(dtype).removeprefix("torch.") not in _DTYPES:
        refuse("dtype", dtype, f"one of {', '.join(_DTYPES)}", "removing it")
    RopeSettings(hf_config).inverse_frequencies(head_dim_of(hf_config))
    layer_types = getattr(hf_config, "layer_types", None)
    unknown = set(layer_types or []) - {"full_attention", "sliding_attention"}
    if unknown:
        refuse("layer_types", sorted(unknown), "full attention", "another checkpoint")


def check_window(window: int | None, max_model_len: int) -> None:
    """Exact as long as no context outgrows the window, otherwise refused."""
    if window is not None and window < max_model_len:
        need = f"at least max_model_len = {max_model_len}"
        refuse("sliding_window", window, need, f"max_model_len={window}")


def check_sharding(hf_config: Any, sharded_fields: Iterable[str], tp_size: int) -> None:
    """Every rank needs whole heads and equal shares; a KV head may be on several ranks."""
    fields = list(sharded_fields)
    needs = _sharding_needs(hf_config, fields, tp_size)
    if needs:
        fitting = [n for n in range(1, MAX_RANKS + 1) if not _sharding_needs(hf_config, fields, n)]
        refuse("tensor_parallel_size", tp_size, " and ".join(needs), f"one of {fitting}")


def _sharding_needs(hf_config: Any, fields: Iterable[str], tp_size: int) -> list[str]:
    """What this number of ranks fails; nothing if it works."""
    sizes = {field: getattr(hf_config, field) for field in fields}
    needs = [f"a divisor of {field} = {n}" for field, n in sizes.items() if n % tp_size]
    num_kv_heads = hf_config.num_key_value_heads
    if num_kv_replicas(num_kv_heads, tp_size) is None:
        needs.append(f"a divisor or a multiple of num_key_value_heads = {num_kv_heads}")
    return needs
