"""R12: rotations equal transformers', and settings that are not implemented are refused by name."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from nanovllm.layers.rotary_embedding import RotaryEmbedding, rope_theta


@pytest.mark.parametrize("head_dim", [16, 20, 64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_table_equals_transformers(head_dim, theta):
    positions = torch.tensor([0, 1, 4095, 8192])
    config = Qwen3Config(
        head_dim=head_dim,
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=9000,
        **rope_settings(theta),
    )
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions[None])
    table = RotaryEmbedding(head_dim, 9000, rope_theta(config)).cos_sin
    expected = torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), -1)
    torch.testing.assert_close(table[positions], expected, atol=1e-6, rtol=0)


def rope_settings(theta):
    """As this version of transformers spells them."""
    has_both_in_one = not hasattr(Qwen3Config(), "rope_theta")
    if has_both_in_one:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    return {"rope_theta": theta}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_table_is_fp32_and_real_whatever_was_built_before(dtype):
    """The engine builds every model on the meta device first: nothing of that may be kept."""
    with torch.device("meta"):
        assert RotaryEmbedding(16, 64, 1e4).cos_sin.is_meta
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cpu"):
            table = RotaryEmbedding(16, 64, 1e4).cos_sin
    finally:
        torch.set_default_dtype(torch.float32)
    assert table.device.type == "cpu" and table.dtype == torch.float32
    assert torch.equal(table, RotaryEmbedding(16, 64, 1e4).cos_sin)
    assert table[0].tolist() == [1.0] * 8 + [0.0] * 8
    assert not RotaryEmbedding(16, 64, 1e4).state_dict()


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 500_000, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 1.0}},
    ],
)
def test_both_spellings_are_read(config):
    assert rope_theta(SimpleNamespace(**config)) == 5e5


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn", "llama3", "longrope", "new"])
@pytest.mark.parametrize(
    "config",
    [
        lambda kind: {"rope_theta": 1e4, "rope_scaling": {"type": kind, "factor": 4.0}},
        lambda kind: {"rope_theta": 1e4, "rope_scaling": {"rope_type": kind, "factor": 4.0}},
        lambda kind: {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}},
        # Converted from the old spelling: both at once.
        lambda kind: {"rope_parameters": {"rope_type": kind, "type": kind, "rope_theta": 1e4}},
    ],
)
def test_scaling_is_refused_by_name(rope_type, config):
    with pytest.raises(ValueError, match=f"rope_type: got '{rope_type}'"):
        rope_theta(SimpleNamespace(**config(rope_type)))


@pytest.mark.parametrize(
    "config, field",
    [
        ({}, "rope_theta"),
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_theta": True}, "rope_theta"),
        ({"rope_theta": 1e4, "rope_scaling": "yarn"}, "rope_scaling"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "rotary part 0.5"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "0.25"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
    ],
)
def test_settings_without_meaning_are_refused(config, field):
    with pytest.raises(ValueError, match=field):
        rope_theta(SimpleNamespace(**config))
