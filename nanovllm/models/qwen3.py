"""Qwen3: the dense decoder, from token ids to hidden states to logits.

Owns the module tree, whose parameter names equal the checkpoint's, and the check of a config before
anything is allocated. Knows tensors and the current `Context`, never sequences.
"""

from typing import Any

import torch
from torch import nn

from nanovllm.kernels.norm_linear import NormInput, normalize
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    num_kv_replicas,
)
from nanovllm.layers.rotary_embedding import RotaryEmbedding, rope_theta
from nanovllm.utils.context import get_context

MAX_RANKS = 8  # as many as Config allows; looked at when those that work are listed

MAX_HEAD_DIM = 512  # twice the largest published; the table of rotations has as many columns
_DTYPES = ("None", "auto", "float64", "float32", "float16", "bfloat16")


def head_dim_of(hf_config: Any) -> int:
    """Values per head: the config's own number, which need not be hidden_size / heads."""
    head_dim = getattr(hf_config, "head_dim", None)
    return hf_config.hidden_size // hf_config.num_attention_heads if head_dim is None else head_dim


class Qwen3Attention(nn.Module):
    """Projections, per-head norm of q and k, rotation, attention over this rank's heads."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__()
        head_dim, num_heads = head_dim_of(hf_config), hf_config.num_attention_heads
        hidden_size, bias = hf_config.hidden_size, hf_config.attention_bias
        self.qkv_proj = QKVParallelLinear(
            hidden_size, head_dim, num_heads, hf_config.num_key_value_heads, bias
        )
        self.o_proj = RowParallelLinear(num_heads * head_dim, hidden_size, bias)
        self.q_norm = RMSNorm(head_dim, hf_config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, hf_config.rms_norm_eps)
        self.attn = Attention(
            self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, head_dim, hidden_size
        )

    def forward(
        self,
        x: NormInput,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        next_norm: RMSNorm,
        indices: torch.Tensor | None,
    ) -> NormInput:
        """x: rows [num_tokens, hidden_size]; returns the stream for next_norm's reader.

        indices: int [n] rows to go on with, None for all
        """
        qkv, sum_squares = self.qkv_proj(x)
        out = self.attn(qkv, sum_squares, positions, cos_sin, self.q_norm, self.k_norm)
        hidden = x.hidden
        if indices is not None:
            out, hidden = out.index_select(0, indices), hidden.index_select(0, indices)
        return self.o_proj(out, hidden, next_norm.weight, next_norm.eps)


class Qwen3MLP(nn.Module):
    """The gated MLP."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__()
        hidden_size, size = hf_config.hidden_size, hf_config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [size, size])
        self.down_proj = RowParallelLinear(size, hidden_size)

    def forward(self, x: NormInput, next_norm: RMSNorm) -> NormInput:
        """x: rows [num_tokens, hidden_size]; returns the stream for next_norm's reader."""
        out = self.gate_up_proj.silu_mul(x)
        return self.down_proj(out, x.hidden, next_norm.weight, next_norm.eps)


class Qwen3DecoderLayer(nn.Module):
    """Attention and MLP. Each leaves the residual stream with the norm of whoever reads it next,
    so that adding to the stream and norming it need no pass of their own."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__()
        self.self_attn = Qwen3Attention(hf_config)
        self.mlp = Qwen3MLP(hf_config)
        self.input_layernorm = RMSNorm(hf_config.hidden_size, hf_config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(hf_config.hidden_size, hf_config.rms_norm_eps)

    def forward(
        self,
        x: NormInput,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        next_norm: RMSNorm,
        indices: torch.Tensor | None = None,
    ) -> NormInput:
        """x: the stream for input_layernorm's reader; returns it for next_norm's, of these rows."""
        x = self.self_attn(x, positions, cos_sin, self.post_attention_layernorm, indices)
        return self.mlp(x, next_norm)


class Qwen3Model(nn.Module):
    """Embedding, decoder layers and the last norm."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(hf_config.vocab_size, hf_config.hidden_size)
        self.rotary_emb = RotaryEmbedding(
            head_dim_of(hf_config), hf_config.max_position_embeddings, rope_theta(hf_config)
        )
        self.layers: Any = nn.ModuleList(
            Qwen3DecoderLayer(hf_config) for _ in range(hf_config.num_hidden_layers)
        )
        self.norm = RMSNorm(hf_config.hidden_size, hf_config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """input_ids, positions: int [num_tokens]; returns float [num_logits, hidden_size].

        Of a prompt only the last row is read. The last layer needs the others' keys and values,
        and nothing after its attention.
        """
        norms = [layer.input_layernorm for layer in self.layers] + [self.norm]
        x = norms[0](self.embed_tokens(input_ids))
        indices = [None] * (len(self.layers) - 1) + [get_context().logits_indices]
        for layer, next_norm, rows in zip(self.layers, norms[1:], indices, strict=True):
            x = layer(x, positions, self.rotary_emb.cos_sin, next_norm, rows)
        return normalize(x)


class Qwen3ForCausalLM(nn.Module):
    """The model with its LM head."""

    # Checkpoint module -> the module it is packed into, and the part it is there.
    packed_modules_mapping = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

    def __init__(self, hf_config: Any) -> None:
        super().__init__()
        self.model = Qwen3Model(hf_config)
        embedding = self.model.embed_tokens.weight if hf_config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(hf_config.vocab_size, hf_config.hidden_size, embedding)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One step over the packed batch that the current context describes.

        input_ids, positions: int64 [num_tokens]
        returns: float [num_logits, hidden_size] of the rows that the step needs logits for
        """
        return self.model(input_ids, positions)

    def compute_logits(
        self, hidden_states: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """hidden_states: float [num_logits, hidden_size]; out and result as of `ParallelLMHead`."""
        return self.lm_head(hidden_states, out)

    @classmethod
    def check_config(cls, hf_config: Any, tp_size: int, max_model_len: int) -> None:
        """Refuse, before anything is allocated, a config that would not run right."""
        _check_fields(hf_config)
        _check_unimplemented(hf_config, max_model_len)
        _check_sharding(hf_config, tp_size)


def _check_fields(hf_config: Any) -> None:
    """Presence, type and range of every field that is read here."""
    counts = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"]
    counts += ["num_attention_heads", "num_key_value_heads", "max_position_embeddings"]
    for field in counts:
        _check_field(hf_config, field, "a positive integer", lambda x: type(x) is int and x > 0)
    for field in ("attention_bias", "tie_word_embeddings"):
        _check_field(hf_config, field, "true or false", lambda x: type(x) is bool)
    _check_field(
        hf_config,
        "rms_norm_eps",
        "a small positive number",
        lambda x: type(x) is float and 0 < x < 1,
    )
    for field in ("sliding_window", "max_window_layers"):
        _check_field(hf_config, field, "an integer or null", lambda x: x is None or type(x) is int)
    _check_field(hf_config, "hidden_act", "'silu'", lambda x: x == "silu")
    _check_field(hf_config, "layer_types", "a list of names or null", _is_names_or_none)
    heads, kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(
            f"num_key_value_heads: got {kv_heads}, needs a divisor of num_attention_heads = "
            f"{heads}, try the published config.json"
        )
    head_dim = head_dim_of(hf_config)
    if type(head_dim) is not int or not 0 < head_dim <= MAX_HEAD_DIM or head_dim % 2:
        raise ValueError(
            f"head_dim: got {head_dim!r:.80}, needs a positive even integer up to {MAX_HEAD_DIM}, "
            "try the published config.json"
        )


def _check_field(hf_config: Any, field: str, need: str, is_valid: Any) -> None:
    value = getattr(hf_config, field, None)
    if not is_valid(value):
        raise ValueError(f"{field}: got {value!r:.80}, needs {need}, try the published config.json")


def _is_names_or_none(value: Any) -> bool:
    return value is None or (
        isinstance(value, list) and all(isinstance(name, str) for name in value)
    )


def _check_unimplemented(hf_config: Any, max_model_len: int) -> None:
    """Settings that other software acts on and this file does not."""
    quantization = getattr(hf_config, "quantization_config", None)
    if quantization:
        method = getattr(quantization, "quant_method", None)
        if isinstance(quantization, dict):
            method = quantization.get("quant_method")
        raise ValueError(
            f"quantization_config: got {method or 'a quantized checkpoint'}, needs unquantized "
            "weights, try the float16 or bfloat16 checkpoint of this model"
        )
    dtype = getattr(hf_config, "dtype", None) or getattr(hf_config, "torch_dtype", None)
    if str(dtype).removeprefix("torch.") not in _DTYPES:
        raise ValueError(
            f"dtype: got {dtype!r:.80}, needs one of {', '.join(_DTYPES)}, try removing it"
        )
    rope_theta(hf_config)
    layer_types = getattr(hf_config, "layer_types", None)
    unknown = set(layer_types or []) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(
            f"layer_types: got {sorted(unknown)}, needs full attention, try another checkpoint"
        )
    window = getattr(hf_config, "sliding_window", None)
    if layer_types is not None:
        is_sliding = "sliding_attention" in layer_types
    else:
        is_sliding = bool(getattr(hf_config, "use_sliding_window", False)) and (
            (getattr(hf_config, "max_window_layers", None) or 0) < hf_config.num_hidden_layers
        )
    if is_sliding and window is not None and window < max_model_len:
        raise ValueError(
            f"sliding_window: got {window}, needs at least max_model_len = {max_model_len}, "
            f"try max_model_len={window}"
        )


def _check_sharding(hf_config: Any, tp_size: int) -> None:
    """Every rank needs whole heads and equal shares; a KV head may be on several ranks."""
    needs = _sharding_needs(hf_config, tp_size)
    if needs:
        fitting = [n for n in range(1, MAX_RANKS + 1) if not _sharding_needs(hf_config, n)]
        raise ValueError(
            f"tensor_parallel_size: got {tp_size}, needs {' and '.join(needs)}, "
            f"try one of {fitting}"
        )


def _sharding_needs(hf_config: Any, tp_size: int) -> list[str]:
    """What this number of ranks fails; nothing if it works."""
    needs = []
    for field in ("num_attention_heads", "intermediate_size"):
        size = getattr(hf_config, field)
        if size % tp_size:
            needs.append(f"a divisor of {field} = {size}")
    num_kv_heads = hf_config.num_key_value_heads
    if num_kv_replicas(num_kv_heads, tp_size) is None:
        needs.append(f"a divisor or a multiple of num_key_value_heads = {num_kv_heads}")
    return needs
