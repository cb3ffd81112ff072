"""The decoder that the families share, from token ids to hidden states to logits.

Owns the module tree, whose parameter names equal the checkpoint's. A family is a subclass of
`CausalLM` that says what differs: `Parts`, read from the config, and its own fields' checks. Knows
tensors and the current `Context`, never sequences.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nanovllm.kernels.norm_linear import NormInput, normalize
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RopeSettings, RotaryEmbedding
from nanovllm.models import checks
from nanovllm.utils.context import get_context


@dataclass(frozen=True, slots=True)
class Parts:
    """What the families differ in."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # whether each head of q and k is normed before its rotation
    sliding_window: int | None = None  # tokens that some layer sees; None: all see everything


class DecoderAttention(nn.Module):
    """Projections, per-head norm of q and k, rotation, attention over this rank's heads."""

    def __init__(self, hf_config: Any, parts: Parts) -> None:
        super().__init__()
        head_dim, num_heads = checks.head_dim_of(hf_config), hf_config.num_attention_heads
        hidden_size, self.eps = hf_config.hidden_size, hf_config.rms_norm_eps
        self.qkv_proj = QKVParallelLinear(
            hidden_size, head_dim, num_heads, hf_config.num_key_value_heads, parts.qkv_bias
        )
        self.o_proj = RowParallelLinear(num_heads * head_dim, hidden_size, parts.o_bias)
        self.q_norm = RMSNorm(head_dim, self.eps) if parts.qk_norm else None
        self.k_norm = RMSNorm(head_dim, self.eps) if parts.qk_norm else None
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
        q_weight = None if self.q_norm is None else self.q_norm.weight
        k_weight = None if self.k_norm is None else self.k_norm.weight
        out = self.attn(qkv, sum_squares, positions, cos_sin, q_weight, k_weight, self.eps)
        hidden = x.hidden
        if indices is not None:
            out, hidden = out.index_select(0, indices), hidden.index_select(0, indices)
        return self.o_proj(out, hidden, next_norm.weight, next_norm.eps)


class GatedMLP(nn.Module):
    """down(SiLU(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        super().__init__()
        sizes = [intermediate_size, intermediate_size]
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, sizes, bias)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias)

    def forward(self, x: NormInput, next_norm: RMSNorm) -> NormInput:
        """x: rows [num_tokens, hidden_size]; returns the stream for next_norm's reader."""
        out = self.gate_up_proj.silu_mul(x)
        return self.down_proj(out, x.hidden, next_norm.weight, next_norm.eps)


class DecoderLayer(nn.Module):
    """Attention and MLP. Each leaves the residual stream with the norm of whoever reads it next,
    so that adding to the stream and norming it need no pass of their own."""

    def __init__(self, hf_config: Any, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
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


class Decoder(nn.Module):
    """Embedding, decoder layers and the last norm."""

    def __init__(self, hf_config: Any, make_layer: Callable[[int], DecoderLayer]) -> None:
        super().__init__()
        head_dim = checks.head_dim_of(hf_config)
        self.embed_tokens = VocabParallelEmbedding(hf_config.vocab_size, hf_config.hidden_size)
        self.rotary_emb = RotaryEmbedding(head_dim, RopeSettings(hf_config))
        self.layers: Any = nn.ModuleList(map(make_layer, range(hf_config.num_hidden_layers)))
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


class CausalLM(nn.Module):
    """The decoder with its LM head; a family overrides what differs, from `model_type` on down."""

    # Checkpoint module -> the module it is packed into, and the part it is there.
    packed_modules_mapping: dict[str, tuple[str, Any]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }
    model_type: str  # transformers' name, which config.json has beside the architecture's

    def __init__(self, hf_config: Any) -> None:
        super().__init__()
        self.hf_config, self.parts = hf_config, self.read_parts(hf_config)
        self.model = Decoder(hf_config, self.make_layer)
        embedding = self.model.embed_tokens.weight if hf_config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(hf_config.vocab_size, hf_config.hidden_size, embedding)

    @classmethod
    def read_parts(cls, hf_config: Any) -> Parts:
        """What this family's layers have, by a config whose fields are sound."""
        raise NotImplementedError(cls)

    @classmethod
    def check_own_fields(cls, hf_config: Any) -> None:
        """Refuse wrong values of fields that only this family reads."""

    @classmethod
    def sharded_fields(cls, hf_config: Any) -> list[str]:
        """Sizes that are cut into a share for each rank."""
        return ["num_attention_heads", "intermediate_size"]

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Be the last layer and one of each kind before it: all the kernels, few launches."""
        layers = self.model.layers
        kinds = {type(layer.mlp): layer for layer in layers[:-1]}
        self.model.layers = nn.ModuleList([*kinds.values(), layers[-1]])
        try:
            yield
        finally:
            self.model.layers = layers

    def make_mlp(self, layer_idx: int) -> nn.Module:
        sizes = self.hf_config.hidden_size, self.hf_config.intermediate_size
        return GatedMLP(*sizes, self.parts.mlp_bias)

    def make_layer(self, layer_idx: int) -> DecoderLayer:
        attention = DecoderAttention(self.hf_config, self.parts)
        return DecoderLayer(self.hf_config, attention, self.make_mlp(layer_idx))

    @classmethod
    def check_config(cls, hf_config: Any, tp_size: int, max_model_len: int) -> int:
        """Refuse, before anything is allocated, a config that would not run right.

        max_model_len: tokens that a sequence is to have; returns how many of them it may have
        """
        checks.check_unquantized(hf_config)
        checks.check_fields(hf_config)
        cls.check_own_fields(hf_config)
        checks.check_settings(hf_config, cls.model_type)
        max_model_len = min(max_model_len, RopeSettings(hf_config).max_positions)
        checks.check_window(cls.read_parts(hf_config).sliding_window, max_model_len)
        checks.check_sharding(hf_config, cls.sharded_fields(hf_config), tp_size)
        return max_model_len

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
