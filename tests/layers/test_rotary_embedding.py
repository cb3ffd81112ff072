"""R12: rotations equal transformers', and settings that are not implemented are refused by name."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanovllm.layers.rotary_embedding import RopeSettings, RotaryEmbedding

POSITIONS = [0, 1, 4095, 8192, 40_000]
KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    # Llama 3.1's and 3.2's, and one whose middle band is wide.
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3 wide": {
        "factor": 32.0,
        "low_freq_factor": 0.5,
        "high_freq_factor": 64,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16384},
    "yarn scale": {
        "factor": 4.0,
        "original_max_position_embeddings": 16384,
        "attention_factor": 0.75,
        "beta_fast": 64.0,
        "beta_slow": 2.0,
    },
    "yarn mscale": {
        "factor": 4.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.5,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
}


def config_of(kind, theta=10_000.0, max_positions=65_536, spelling="rope_parameters", **others):
    settings = dict(KINDS[kind])
    name = kind.split()[0]
    fields = {"max_position_embeddings": max_positions, **others}
    if spelling == "rope_parameters":
        fields["rope_parameters"] = {"rope_type": name, "rope_theta": theta, **settings}
    else:
        fields["rope_theta"] = theta
        fields["rope_scaling"] = {spelling: name, **settings}
    return fields


@pytest.mark.parametrize("head_dim", [16, 20, 64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 1_000_000.0])
@pytest.mark.parametrize("kind", KINDS)
def test_table_equals_transformers(kind, theta, head_dim):
    if kind == "yarn mscale" and transformers.__version__ < "5":
        pytest.skip("its settings are newer")
    fields = config_of(kind, theta, spelling="rope_type")
    hf_config = LlamaConfig(
        head_dim=head_dim, hidden_size=4 * head_dim, num_attention_heads=4, **fields
    )
    theirs = LlamaRotaryEmbedding(hf_config)
    table = RotaryEmbedding(head_dim, RopeSettings(hf_config)).cos_sin
    assert table.shape == (65_536, head_dim)
    cos, sin = theirs(torch.zeros(1), torch.tensor([POSITIONS]))
    expected = torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), -1)
    torch.testing.assert_close(table[POSITIONS], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_spelling_gives_the_same_table(kind):
    """As a file has it, without transformers in between."""
    tables = [
        RotaryEmbedding(64, RopeSettings(SimpleNamespace(**config_of(kind, spelling=s)))).cos_sin
        for s in ("rope_parameters", "rope_type", "type")
    ]
    converted = LlamaConfig(head_dim=64, **config_of(kind, spelling="rope_type"))
    tables.append(RotaryEmbedding(64, RopeSettings(converted)).cos_sin)
    assert all(torch.equal(tables[0], table) for table in tables[1:])


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_scaling_changes_the_table(kind):
    tables = [
        RotaryEmbedding(64, RopeSettings(SimpleNamespace(**config_of(k)))).cos_sin
        for k in (kind, "default")
    ]
    assert (tables[0][POSITIONS] - tables[1][POSITIONS]).abs().max() > 0.1


def test_dynamic_scaling_begins_where_no_sequence_gets():
    """transformers changes the rotations once a context outgrows max_position_embeddings, for all
    tokens from then on; here no context may."""
    fields = config_of("dynamic", max_positions=4096, spelling="rope_type")
    hf_config = LlamaConfig(head_dim=64, hidden_size=256, num_attention_heads=4, **fields)
    settings = RopeSettings(hf_config)
    assert settings.max_positions == 4096
    table = RotaryEmbedding(64, settings).cos_sin
    theirs = LlamaRotaryEmbedding(hf_config)
    cos, _ = theirs(torch.zeros(1), torch.arange(4096)[None])
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], atol=1e-6, rtol=0)
    longer, _ = theirs(torch.zeros(1), torch.arange(4097)[None])
    assert (longer[0, :4096, :32] - table[:, :32]).abs().max() > 1e-2


@pytest.mark.parametrize(
    "max_positions, expected", [(16_384, 65_536), (65_536, 65_536), (131_072, 131_072)]
)
def test_yarn_reaches_as_far_as_its_factor_says(max_positions, expected):
    """Qwen's model cards turn it on by rope_scaling alone."""
    settings = RopeSettings(SimpleNamespace(**config_of("yarn", max_positions=max_positions)))
    assert settings.max_positions == expected
    assert len(RotaryEmbedding(16, settings).cos_sin) == expected


def test_yarn_without_a_factor_has_the_lengths_ratio():
    fields = config_of("yarn")
    whole = RopeSettings(SimpleNamespace(**fields))
    fields["rope_parameters"]["factor"] = None
    derived = RopeSettings(SimpleNamespace(**fields))
    assert derived.factor == whole.factor == 4.0


def settings_of(**fields):
    return RopeSettings(SimpleNamespace(**{"max_position_embeddings": 64, **fields}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_table_is_fp32_and_real_whatever_was_built_before(dtype):
    """The engine builds every model on the meta device first: nothing of that may be kept."""
    settings = settings_of(rope_theta=1e4)
    with torch.device("meta"):
        assert RotaryEmbedding(16, settings).cos_sin.is_meta
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cpu"):
            table = RotaryEmbedding(16, settings).cos_sin
    finally:
        torch.set_default_dtype(torch.float32)
    assert table.device.type == "cpu" and table.dtype == torch.float32
    assert torch.equal(table, RotaryEmbedding(16, settings).cos_sin)
    assert table[0].tolist() == [1.0] * 8 + [0.0] * 8
    assert not RotaryEmbedding(16, settings).state_dict()


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
def test_both_spellings_of_no_scaling_are_read(config):
    settings = settings_of(**config)
    assert (settings.kind, settings.theta) == ("default", 5e5)


@pytest.mark.parametrize("kind", ["longrope", "su", "mrope", "proportional", "new", 7])
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
def test_other_scaling_is_refused_by_name(kind, config):
    with pytest.raises(ValueError, match=f"rope_type: got {kind!r}.*needs one of default, linear"):
        settings_of(**config(kind))


def llama3(**changes):
    return {"rope_theta": 1e4, "rope_scaling": {"type": "llama3", **KINDS["llama3"], **changes}}


def yarn(**changes):
    return {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", **KINDS["yarn"], **changes}}


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
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "rope_type": "linear"}}, "rope_type"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "default", "mrope_section": [8]}}, "mrope"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, "factor: got None"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 0.5}}, "factor: got 0.5"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": "2"}}, "factor"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2, "x": 1}}, r"\['x'\]"),
        (llama3(low_freq_factor=None), "low_freq_factor: got None"),
        (llama3(high_freq_factor=1.0), "high_freq_factor: got 1.0, needs a number above 1"),
        (llama3(original_max_position_embeddings=-1), "original_max_position_embeddings: got -1"),
        (yarn(beta_fast=-1), "beta_fast: got -1"),
        (yarn(attention_factor="1"), "attention_factor: got '1'"),
        (yarn(rope_theta=0.5), "rope_theta: got 0.5, needs a number above 1"),
    ],
)
def test_settings_without_meaning_are_refused(config, field):
    with pytest.raises(ValueError, match=field) as refusal:
        settings_of(**config).inverse_frequencies(16)
    assert "try " in str(refusal.value)
