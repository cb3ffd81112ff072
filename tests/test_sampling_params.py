"""Every bad sampling parameter is named when it is made."""

import copy
import json
import math
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from fractions import Fraction
from types import MappingProxyType

import numpy as np
import pytest
import torch

from nanovllm import SamplingParams

FIELDS = [field.name for field in fields(SamplingParams)]
FLAGS = ["ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"]
INTEGERS = ["max_tokens", "n", "top_k", "seed", "min_tokens", "logprobs", "prompt_logprobs"]
PENALTIES = ["presence_penalty", "frequency_penalty", "repetition_penalty"]
FLOATS = ["temperature", "top_p", "min_p", *PENALTIES]
LISTS = ["stop", "bad_words", "stop_token_ids", "allowed_token_ids"]
OTHER_THAN_DEFAULT = dict(
    temperature=0.5,
    max_tokens=9,
    ignore_eos=True,
    n=2,
    top_k=3,
    top_p=0.5,
    min_p=0.1,
    presence_penalty=1.0,
    frequency_penalty=-1.0,
    repetition_penalty=1.2,
    seed=7,
    min_tokens=1,
    stop=["a", "b"],
    stop_token_ids=[5],
    include_stop_str_in_output=True,
    logprobs=2,
    prompt_logprobs=0,
    logit_bias={5: 1, 3: -2},
    bad_words=["x"],
    allowed_token_ids=[2, 1],
    skip_special_tokens=False,
    structured_outputs={"json_schema": {"type": "object"}},
)


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


# -- the other fields ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("n", 1, 16_384),
        ("top_k", 0, 2**31 - 1),
        ("seed", -(2**63), 2**63 - 1),
        ("min_tokens", 0, 64),
        ("max_tokens", 1, 2**63 - 1),
        ("logprobs", 0, 100),
        ("prompt_logprobs", 0, 100),
        ("top_p", 1e-9, 1),
        ("min_p", 0, 1),
        ("presence_penalty", -2, 2),
        ("frequency_penalty", -2, 2),
        ("repetition_penalty", 0.001, 1000),
    ],
)
def test_numbers_from_low_to_high_are_taken(name, low, high):
    kind = int if name in INTEGERS else float
    for value in (low, high):
        for given in (value, np.array(value), torch.tensor(value, dtype=torch.float64).to(kind)):
            if value != 2**63 - 1 or type(given) is int:  # no float64 is that
                stored = getattr(SamplingParams(**{name: given}), name)
                assert stored == value and type(stored) is kind
    # -1 stands for "off" in these two.
    below = -2 if name == "top_k" else low - 1 if kind is int else low - 0.01
    for value in (below, high + 1 if kind is int else high * 1.01):
        if (name, value) != ("min_tokens", 65):  # this one is up to max_tokens
            with pytest.raises(ValueError, match=f"^{name}: got .*, needs .*, try"):
                SamplingParams(**{name: value})


@pytest.mark.parametrize("name", FLOATS + INTEGERS)
def test_numbers_are_neither_bools_nor_texts_nor_lists(name):
    for value in (True, False, np.True_, torch.tensor(True), "1", b"1", [1], 1j, np.array([1])):
        with pytest.raises(TypeError, match=f"^{name}: got .*, needs an? (integer|number) "):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("name", FLOATS)
def test_numbers_are_finite(name):
    for value in (math.nan, math.inf, -math.inf, np.float32("nan"), torch.tensor(math.nan)):
        with pytest.raises(ValueError, match=f"^{name}: got .*, needs a finite number "):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_no_floats_and_not_huge(name):
    for value in (1.0, np.float64(2), math.nan):
        with pytest.raises(TypeError, match=f"^{name}: got .*, needs an integer "):
            SamplingParams(**{name: value})
    with pytest.raises(ValueError, match=f"^{name}: got an integer of 16,610 bits, needs at most"):
        SamplingParams(**{name: 10**5000})


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_bools(name):
    assert getattr(SamplingParams(**{name: True}), name) is True
    assert getattr(SamplingParams(**{name: False}), name) is False
    for value in (0, 1, None, "yes", np.True_):
        with pytest.raises(TypeError, match=f"^{name}: got .*, needs True or False, try"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("name", sorted({*FIELDS} - {"max_tokens"}))
def test_none_is_taken_where_it_is_the_default(name):
    if getattr(SamplingParams(), name) is None:
        assert SamplingParams(**{name: None}) == SamplingParams()
    else:
        with pytest.raises(TypeError, match=f"^{name}: got None, needs"):
            SamplingParams(**{name: None})


def test_values_that_mean_the_same_are_stored_as_one():
    assert SamplingParams(top_k=-1, seed=-1, stop=[], logit_bias={}) == SamplingParams()
    assert SamplingParams(stop="a") == SamplingParams(stop=("a", "a")) != SamplingParams()
    assert math.copysign(1, SamplingParams(temperature=-0.0).temperature) == 1
    assert SamplingParams(temperature=9e-6).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_texts_are_checked_one_by_one(name):
    assert getattr(SamplingParams(**{name: ["b", np.str_("a"), "b"]}), name) == ("b", "a")
    for bad in ("", "x" * 1025, "a\ud800", "\udfff"):
        with pytest.raises(ValueError, match=rf"^{name}\[1\]: got .*, needs ") as error:
            SamplingParams(**{name: ["a", bad]})
        assert len(str(error.value)) < 200
    for bad in (5, None, b"a", ["a"]):
        with pytest.raises(TypeError, match=rf"^{name}\[1\]: got .*, needs a string, try"):
            SamplingParams(**{name: ["a", bad]})


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_token_ids_are_checked_one_by_one(name):
    for ids in ([3, 1, 3], (3, 1), np.array([3, 1]), torch.tensor([3, 1]), [np.int64(3), 1]):
        stored = getattr(SamplingParams(**{name: ids}), name)
        assert stored == (3, 1) and {type(i) for i in stored} == {int}
    for bad in (-1, 2**31, np.int64(-1)):
        with pytest.raises(ValueError, match=rf"^{name}\[1\]: got .*, needs at "):
            SamplingParams(**{name: [1, bad]})
    for bad in (True, 1.0, "1", None, [1]):
        with pytest.raises(TypeError, match=rf"^{name}\[1\]: got .*, needs an integer"):
            SamplingParams(**{name: [1, bad]})


@pytest.mark.parametrize("name", LISTS)
def test_lists_are_lists_and_not_too_long(name):
    for value in ({"a"}, {1: 2.0}, 5, b"ab", iter([1]), np.zeros((2, 2))):
        with pytest.raises(TypeError, match=f"^{name}: got .*, needs a list, try"):
            SamplingParams(**{name: value})
    most = 16_384 if name == "allowed_token_ids" else 1024
    item = "a" if name in ("stop", "bad_words") else 1
    SamplingParams(**{name: [item] * most})
    with pytest.raises(ValueError, match=f"^{name}: got more than {most:,} items, needs"):
        SamplingParams(**{name: [item] * (most + 1)})


def test_a_word_is_not_taken_for_its_letters():
    with pytest.raises(TypeError, match="^bad_words: got 'abc', needs a list"):
        SamplingParams(bad_words="abc")


def test_no_allowed_token_is_refused():
    with pytest.raises(ValueError, match="^allowed_token_ids: got 0 items, needs 1 to 16,384"):
        SamplingParams(allowed_token_ids=[])


def test_logit_bias_is_stored_by_id_and_within_100():
    given = {7: 1, np.int32(5): np.float32(-0.5), 6: 1000, 4: -1e30}
    want = ((4, -100.0), (5, -0.5), (6, 100.0), (7, 1.0))
    for bias in (given, MappingProxyType(given), want):
        assert SamplingParams(logit_bias=bias).logit_bias == want
    for bad in ({1: math.nan}, {1: -math.inf}, {-1: 0.0}, {2**31: 0.0}):
        with pytest.raises(ValueError, match=r"^logit_bias(\[1\]| key): got .*, needs"):
            SamplingParams(logit_bias=bad)
    for bad in (
        {"1": 1.0},
        {True: 1.0},
        {1: "a"},
        {1: True},
        {1: None},
        [1],
        "ab",
        5,
        ((1, 2, 3),),
    ):
        with pytest.raises(TypeError, match=r"^logit_bias(\[1\]| key)?: got .*, needs"):
            SamplingParams(logit_bias=bad)
    with pytest.raises(ValueError, match="^logit_bias: got more than 1,024 items"):
        SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))


def test_structured_outputs_names_one_kind():
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
    for spec, want in [
        ({"regex": "[ab]+"}, ("regex", "[ab]+")),
        ({"grammar": 'root ::= "a"'}, ("grammar", 'root ::= "a"')),
        ({"choice": ["b", "a", "b"]}, ("choice", ("b", "a"))),
        ({"json_schema": schema}, ("json_schema", json.dumps(schema))),
        ({"json_schema": json.dumps(schema)}, ("json_schema", json.dumps(schema))),
    ]:
        assert SamplingParams(structured_outputs=spec).structured_outputs == (want,)
    for bad in ({}, {"json": "{}"}, {"regex": "a", "choice": ["a"]}, {5: "a"}):
        with pytest.raises(ValueError, match="^structured_outputs: got .* exactly one key"):
            SamplingParams(structured_outputs=bad)
    for bad in ("a", ["regex"], 5, {"regex"}):
        with pytest.raises(TypeError, match="^structured_outputs: got .*, needs a dict"):
            SamplingParams(structured_outputs=bad)


@pytest.mark.parametrize(
    "spec",
    [
        {"json_schema": ""},
        {"regex": ""},
        {"grammar": ""},
        *({"regex": value} for value in (5, None, ["a"], "\ud800", "a" * 65_537)),
        *({"choice": value} for value in ([], "ab", [""], [1], {"a": 1})),
        *({"json_schema": {"a": value}} for value in (math.nan, {1}, "\ud800", object(), b"")),
        *({"json_schema": value} for value in (5, True, [1], {"a": [1] * 65_536}, {(1,): 1})),
    ],
)
def test_what_cannot_be_a_structure_is_refused(spec):
    with pytest.raises((ValueError, TypeError), match=r"^structured_outputs\.\w+(\[0\])?: got "):
        SamplingParams(structured_outputs=spec)


def test_a_schema_without_end_is_refused():
    cycle: dict = {}
    cycle["a"] = cycle
    doubled = [1]
    for _ in range(100):
        doubled = [doubled, doubled]
    for schema in (cycle, {"a": doubled}):
        with pytest.raises(ValueError, match=r"^structured_outputs\.json_schema: got dict, needs"):
            SamplingParams(structured_outputs={"json_schema": schema})


# -- fields together -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("n", dict(n=2, temperature=0)),
        ("min_tokens", dict(min_tokens=65)),
        ("min_tokens", dict(min_tokens=3, max_tokens=2)),
        ("stop", dict(stop="a", detokenize=False)),
    ],
)
def test_fields_that_contradict_each_other_are_refused(name, kwargs):
    with pytest.raises(ValueError, match=f"^{name}: got .*, needs .*, try"):
        SamplingParams(**kwargs)


def test_fields_that_go_together():
    assert SamplingParams(min_tokens=65, max_tokens=None).max_tokens is None
    assert SamplingParams(min_tokens=3, max_tokens=3).min_tokens == 3
    assert SamplingParams(stop_token_ids=[1], detokenize=False).stop is None
    assert SamplingParams(temperature=0, top_k=5, top_p=0.5).is_greedy


def test_plain_is_what_needs_the_temperature_only():
    assert SamplingParams().is_plain and not SamplingParams().is_greedy
    assert SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.1).is_plain
    free = {"temperature", "max_tokens", "ignore_eos", "n", "seed", "stop", "stop_token_ids"}
    free |= {"include_stop_str_in_output", "prompt_logprobs", "skip_special_tokens"}
    for name, value in OTHER_THAN_DEFAULT.items():
        assert SamplingParams(**{name: value}).is_plain == (name in free), name
    for name in set(OTHER_THAN_DEFAULT) - free - {"top_k", "top_p", "min_p"}:
        params = SamplingParams(temperature=0, **{name: OTHER_THAN_DEFAULT[name]})
        assert params.is_greedy and not params.is_plain, name
    assert not SamplingParams(logprobs=0).is_plain


# -- values ----------------------------------------------------------------------------------------


def test_params_compare_hash_copy_and_pickle_by_value():
    params = SamplingParams(**OTHER_THAN_DEFAULT)
    others = copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))
    for other in (SamplingParams(**OTHER_THAN_DEFAULT), replace(params), *others):
        assert other == params and hash(other) == hash(params)
    for name in OTHER_THAN_DEFAULT:
        assert replace(params, **{name: getattr(SamplingParams(), name)}) != params, name
    with pytest.raises(ValueError, match="^top_p: "):
        replace(params, top_p=2)


def test_what_the_caller_does_afterwards_changes_nothing():
    given = copy.deepcopy(OTHER_THAN_DEFAULT)
    params = SamplingParams(**given)
    for value in given.values():
        if isinstance(value, list):
            value.append(value[0] * 2)
    given["logit_bias"][9] = 1.0
    given["structured_outputs"]["json_schema"]["type"] = "array"
    given["structured_outputs"]["regex"] = "a"
    assert params == SamplingParams(**OTHER_THAN_DEFAULT)


@pytest.mark.parametrize("name", FIELDS)
def test_no_field_can_be_set_or_deleted(name):
    params = SamplingParams()
    for change in (lambda: setattr(params, name, None), lambda: delattr(params, name)):
        with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
            change()
    assert params == SamplingParams()


@pytest.mark.parametrize("name", FIELDS)
def test_messages_stay_short(name):
    for value in ("x" * 10**7, [0] * 10**7, {"x" * 10**7: 1}, ["x" * 10**7], 10**5000):
        try:
            SamplingParams(**{name: value})
        except (ValueError, TypeError) as error:
            assert str(error).startswith(name) and len(str(error)) < 300
