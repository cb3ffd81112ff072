"""Rotary position embedding in the rotate-half layout, and the reading of its settings.

Owns the cos/sin table, in fp32 whatever the model's type. Settings that are not implemented are
refused by name: ignored, they would give fluent nonsense on long prompts.
"""

import warnings
from typing import Any

import torch
from torch import nn


def rope_theta(hf_config: Any) -> float:
    """The base of the rotation frequencies, if the settings are ones this file implements.

    transformers 4 keeps `rope_theta` and `rope_scaling` (with "type" or "rope_type") apart,
    transformers 5 has both in `rope_parameters`; checkpoints have either.
    """
    settings: dict[str, Any] = {}
    for field in ("rope_scaling", "rope_parameters"):
        with warnings.catch_warnings():
            # transformers 5 warns about the name that its own version 4 gave this field.
            warnings.simplefilter("ignore", FutureWarning)
            value = getattr(hf_config, field, None) or {}
        if not isinstance(value, dict):
            raise ValueError(
                f"{field}: got {value!r}, needs a mapping or null, try another checkpoint"
            )
        settings.update(value)
    for field in ("rope_type", "type"):
        rope_type = settings.get(field, "default")
        if rope_type != "default":
            raise ValueError(
                f"rope_type: got {rope_type!r}, needs 'default', the only one implemented, "
                "try a checkpoint without RoPE scaling"
            )
    nested = [key for key, value in settings.items() if isinstance(value, dict)]
    rotary_factor = settings.get(
        "partial_rotary_factor", getattr(hf_config, "partial_rotary_factor", 1.0)
    )
    if nested or rotary_factor not in (None, 1.0):
        what = f"settings per layer type {nested}" if nested else f"a rotary part {rotary_factor}"
        raise ValueError(
            f"rope_parameters: got {what}, needs the same full rotation in all layers, "
            "try another checkpoint"
        )
    theta = settings.get("rope_theta", getattr(hf_config, "rope_theta", None))
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 < theta < 1e38:
        raise ValueError(
            f"rope_theta: got {theta!r}, needs a positive number, try the published config.json"
        )
    return float(theta)


class RotaryEmbedding(nn.Module):
    """Rotation of pairs (x[i], x[i + head_dim / 2]) by position * theta ** (-2 i / head_dim)."""

    # float32 [max_position, head_dim]: head_dim / 2 cosines, then as many sines.
    cos_sin: torch.Tensor

    def __init__(self, head_dim: int, max_position: int, theta: float) -> None:
        super().__init__()
        # The CPU makes the table whatever the device, so that every device has the same one.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        positions = torch.arange(max_position, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, 1.0 / theta**exponents)
        table = torch.cat((angles.cos(), angles.sin()), -1)
        self.register_buffer("cos_sin", table.to(torch.get_default_device()), persistent=False)
