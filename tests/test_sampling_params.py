"""Every bad sampling parameter is named when it is made."""

import math
from dataclasses import FrozenInstanceError, fields
from fractions import Fraction

import numpy as np
import pytest

from nanovllm import SamplingParams


def test_defaults_are_the_published_ones_whatever_the_checkpoint_says():
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (1.0, 64, False)


def test_first_three_fields_can_be_given_by_position():
    names = [field.name for field in fields(SamplingParams)]
    assert names[:3] == ["temperature", "max_tokens", "ignore_eos"]
    assert SamplingParams(0.6, 256, True) == SamplingParams(
        temperature=0.6, max_tokens=256, ignore_eos=True
    )


@pytest.mark.parametrize("value", [0, 0.0, 0.6, 100, np.float32(0.5), np.int64(1), Fraction(1, 2)])
def test_any_finite_temperature_from_zero_up_is_taken(value):
    temperature = SamplingParams(temperature=value).temperature
    assert type(temperature) is float and temperature == value


@pytest.mark.parametrize(
    "value",
    [-1, -1e-9, math.nan, math.inf, -math.inf, np.float32("nan"), pytest.param(10**400, id="huge")],
)
def test_temperature_out_of_range_is_a_value_error(value):
    with pytest.raises(ValueError, match="^temperature: got .*, needs a finite number >= 0, try"):
        SamplingParams(temperature=value)


@pytest.mark.parametrize("value", [None, "0.6", True, np.True_, [0.6], 1j, np.array([0.5])])
def test_temperature_of_another_type_is_a_type_error(value):
    with pytest.raises(TypeError, match="^temperature: got .*, needs a number >= 0, try"):
        SamplingParams(temperature=value)


@pytest.mark.parametrize("value", [1, 64, 10**12, np.int32(5), np.uint8(5), None])
def test_max_tokens_from_one_up_or_none_is_taken(value):
    max_tokens = SamplingParams(max_tokens=value).max_tokens
    assert max_tokens == value and type(max_tokens) in (int, type(None))


@pytest.mark.parametrize("value", [0, -1, np.int64(0), -(10**12)])
def test_max_tokens_below_one_is_a_value_error(value):
    """It was compared for equality after appending, so 0 and -1 never ended (R17)."""
    with pytest.raises(ValueError, match="^max_tokens: got .*, needs at least 1, try"):
        SamplingParams(max_tokens=value)


@pytest.mark.parametrize("value", [1.0, "64", True, False, np.float64(2), math.nan, [1]])
def test_max_tokens_of_another_type_is_a_type_error(value):
    with pytest.raises(TypeError, match="^max_tokens: got .*, needs an integer >= 1 or None, try"):
        SamplingParams(max_tokens=value)


@pytest.mark.parametrize("value", [0, 1, None, "yes", np.True_])
def test_ignore_eos_is_a_bool(value):
    with pytest.raises(TypeError, match="^ignore_eos: got .*, needs True or False"):
        SamplingParams(ignore_eos=value)


def test_unknown_parameter_is_refused():
    """A setting that is accepted and dropped is worse than an error (R43)."""
    with pytest.raises(TypeError, match="top_quality"):
        SamplingParams(top_quality=1)


def test_params_cannot_be_changed_afterwards():
    with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
        SamplingParams().max_tokens = 0
