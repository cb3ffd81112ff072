"""R09: a checkpoint gets the code of its own architecture or a refusal, never a relative's."""

from types import SimpleNamespace

import pytest

from nanovllm.models import get_model_class
from nanovllm.models.qwen3 import Qwen3ForCausalLM


def test_known_architecture_is_found_by_name():
    assert get_model_class(SimpleNamespace(architectures=["Qwen3ForCausalLM"])) is Qwen3ForCausalLM


@pytest.mark.parametrize(
    "architectures",
    [
        ["GPT2LMHeadModel"],
        ["Qwen3ForCausalLm"],
        ["Qwen3Model"],
        ["X", "Qwen3ForCausalLM"],
        [],
        None,
    ],
)
def test_unknown_architecture_is_refused_with_the_known_ones(architectures):
    with pytest.raises(ValueError, match="architectures: got.*Qwen3ForCausalLM"):
        get_model_class(SimpleNamespace(architectures=architectures))


def test_config_without_architectures_is_refused():
    with pytest.raises(ValueError, match="architectures"):
        get_model_class(SimpleNamespace())
