"""Rotary position embedding in the rotate-half layout, and the reading of its settings.

Owns the cos/sin table, in fp32 whatever the model's type. All frequencies are those of
transformers. Settings that are not implemented are refused by name: ignored, they would give
fluent nonsense on long prompts.
"""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_MAX_POSITIONS = 2**20  # rows of the table, however far a scaling could reach
# Kind -> settings it reads; with them may stand those of every kind, and a note of the authors'.
_KINDS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {
        *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    },
    "yarn": {
        *("factor", "original_max_position_embeddings", "attention_factor"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    },
}
_COMMON = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "finetuned"}


class RopeSettings:
    """What a config says of its rotations, checked.

    transformers 4 keeps `rope_theta` and `rope_scaling` (with "type" or "rope_type") apart,
    transformers 5 has both in `rope_parameters`; checkpoints have either.
    """

    def __init__(self, hf_config: Any) -> None:
        self._settings = _read_settings(hf_config)
        self.kind = self._read_kind()
        self.theta = self._number("rope_theta", above=0.0)
        self.max_positions: int = hf_config.max_position_embeddings
        self.original = self.max_positions  # before any scaling
        self.factor = self.scale = 1.0  # scale: of cosines and sines, yarn's attention factor
        if self.kind in ("llama3", "yarn"):
            self.original = _original_positions(hf_config, self._settings)
        if self.kind != "default":
            # Written nowhere, yarn's factor follows from the two lengths.
            ratio = self.max_positions / self.original if self.kind == "yarn" else None
            self.factor = self._number("factor", default=ratio, least=1.0)
        if self.kind == "yarn":
            # Authors who turn it on by hand often leave the unscaled length in its place.
            reach = min(int(self.factor * self.original), _MAX_POSITIONS)
            self.max_positions = max(self.max_positions, reach)
            self.scale = self._yarn_scale()

    def _read_kind(self) -> str:
        settings = self._settings
        kinds = [settings[key] for key in ("rope_type", "type") if settings.get(key) is not None]
        kind = kinds[0] if kinds else "default"
        if kinds[1:] not in ([], [kind]) or not isinstance(kind, str) or kind not in _KINDS:
            raise ValueError(
                f"rope_type: got {' and '.join(map(repr, kinds)):.80}, needs one of "
                f"{', '.join(_KINDS)}, try another checkpoint"
            )
        known = _COMMON | _KINDS[kind]
        unknown = [key for key, value in settings.items() if value is not None and key not in known]
        if unknown:
            raise ValueError(
                f"rope_parameters: got {unknown!r:.200} for {kind!r}, needs none but the settings "
                "of that kind, try removing them"
            )
        return kind

    def _number(
        self, name: str, default: float | None = None, above: float = 0.0, least: float = 0.0
    ) -> float:
        value: Any = self._settings.get(name)
        value = default if value is None else value
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (max(above, 1e-9) < value < 1e38 and value >= least):
            need = f"of at least {least:g}" if least else f"above {above:g}"
            raise ValueError(
                f"{name}: got {value!r:.80}, needs a number {need}, try the published config.json"
            )
        return float(value)

    def _yarn_scale(self) -> float:
        def mscale(weight: float) -> float:
            return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        default = mscale(1.0)
        if self._settings.get("mscale") and self._settings.get("mscale_all_dim"):
            default = mscale(self._number("mscale")) / mscale(self._number("mscale_all_dim"))
        return self._number("attention_factor", default)

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """float32 [head_dim / 2]: radians per position of each pair.

        Dynamic NTK changes them once a context outgrows max_position_embeddings, and no sequence
        here does: `max_positions` is not extended for it.
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        wavelengths = self.theta**exponents
        frequencies = 1.0 / wavelengths
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "llama3":
            return self._llama3(frequencies)
        if self.kind == "yarn":
            slow = 1.0 / (self.factor * wavelengths)
            kept = 1 - self._yarn_ramp(head_dim)
            return slow * (1 - kept) + frequencies * kept
        return frequencies

    def _llama3(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Long waves are slowed down by the factor, short ones kept, those between mixed."""
        low = self._number("low_freq_factor")
        high = self._number("high_freq_factor", above=low)
        wavelengths = 2 * math.pi / frequencies
        is_long = wavelengths > self.original / low
        is_between = ~is_long & (wavelengths >= self.original / high)
        share = (self.original / wavelengths - low) / (high - low)
        mixed = (1 - share) * frequencies / self.factor + share * frequencies
        scaled = torch.where(is_long, frequencies / self.factor, frequencies)
        return torch.where(is_between, mixed, scaled)

    def _yarn_ramp(self, head_dim: int) -> torch.Tensor:
        """float32 [head_dim / 2]: 0 for pairs that turn often in the original length, which keep
        their frequency, up to 1 for those that hardly turn, which are slowed down."""

        log_theta = math.log(self._number("rope_theta", above=1.0))

        def pair_that_turns(times: float) -> float:
            return head_dim * math.log(self.original / (times * 2 * math.pi)) / (2 * log_theta)

        low = pair_that_turns(self._number("beta_fast", 32.0))
        high = pair_that_turns(self._number("beta_slow", 1.0))
        if self._settings.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001
        pairs = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
        return ((pairs - low) / (high - low)).clamp(0, 1)


def _read_settings(hf_config: Any) -> dict[str, Any]:
    """The settings of either spelling as one mapping."""
    settings: dict[str, Any] = {}
    for field in ("rope_scaling", "rope_parameters"):
        with warnings.catch_warnings():
            # transformers 5 warns about the name that its own version 4 gave this field.
            warnings.simplefilter("ignore", FutureWarning)
            value = getattr(hf_config, field, None) or {}
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{field}: got {value!r:.80}, needs a mapping or null, try another checkpoint"
            )
        settings.update(value)
    for name in ("rope_theta", "partial_rotary_factor"):
        settings.setdefault(name, getattr(hf_config, name, None))
    nested = [key for key, value in settings.items() if isinstance(value, Mapping)]
    rotary_factor = settings["partial_rotary_factor"]
    if nested or rotary_factor not in (None, 1.0):
        what = f"settings per layer type {nested}" if nested else f"a rotary part {rotary_factor}"
        raise ValueError(
            f"rope_parameters: got {what:.200}, needs the same full rotation in all layers, "
            "try another checkpoint"
        )
    return settings


def _original_positions(hf_config: Any, settings: Mapping[str, Any]) -> int:
    """The length before scaling, from the places where transformers looks, in its order."""
    name = "original_max_position_embeddings"
    places = getattr(hf_config, name, None), settings.get(name), hf_config.max_position_embeddings
    value = next((value for value in places if value is not None), None)
    if type(value) is not int or not 0 < value <= _MAX_POSITIONS:
        raise ValueError(
            f"{name}: got {value!r:.80}, needs a positive integer up to {_MAX_POSITIONS}, try the "
            "published config.json"
        )
    return value


class RotaryEmbedding(nn.Module):
    """Rotation of pairs (x[i], x[i + head_dim / 2]) by position * frequency[i]."""

    # float32 [max_positions, head_dim]: head_dim / 2 cosines, then as many sines.
    cos_sin: torch.Tensor

    def __init__(self, head_dim: int, settings: RopeSettings) -> None:
        super().__init__()
        device, size = torch.get_default_device(), (settings.max_positions, head_dim)
        table = torch.empty(size, dtype=torch.float32, device="meta")
        if device.type != "meta":
            # The CPU makes the table whatever the device, so that every device has the same one.
            positions = torch.arange(settings.max_positions, dtype=torch.float32, device="cpu")
            angles = torch.outer(positions, settings.inverse_frequencies(head_dim))
            table = torch.cat((angles.cos() * settings.scale, angles.sin() * settings.scale), -1)
            table = table.to(device)
        self.register_buffer("cos_sin", table, persistent=False)
