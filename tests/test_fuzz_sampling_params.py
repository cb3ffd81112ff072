"""Whatever one passes to SamplingParams, it answers at once: params, or an error naming the field.

The values are those that other libraries choke on (reliability.md R3). Time is that of this thread
on the processor, so that a busy machine does not fail the test.
"""

import math
import pickle
import random
import re
import time
from collections import OrderedDict, UserDict
from dataclasses import fields, replace
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType

import numpy as np
import pytest
import torch

from nanovllm import SamplingParams

NUM_CALLS = 100_000  # over all seeds
SEEDS = range(4)
MAX_P99_SECONDS = 0.010

FIELDS = [field.name for field in fields(SamplingParams)]
# The field, or an entry of it, and what is wrong in one sentence.
MESSAGE = re.compile(rf"({'|'.join(FIELDS)})( key|\.\w+)?(\[\d+\])?: got .+, needs .+, try .+")


class Raises:
    """Every way to look at it raises."""

    def __getattribute__(self, name):
        raise ZeroDivisionError(name)

    def _raise(self, *args):
        raise ZeroDivisionError

    __eq__ = __hash__ = __bool__ = __len__ = __iter__ = __int__ = __float__ = _raise
    __index__ = __getitem__ = __repr__ = __str__ = __lt__ = __le__ = _raise


class OddInt(int):
    def __int__(self):
        raise RuntimeError("temperature: looks like one of ours")

    __index__ = __eq__ = __hash__ = __repr__ = __lt__ = __le__ = __bool__ = __int__


class OddFloat(float):
    def __float__(self):
        return "no number"


class OddStr(str):
    def __str__(self):
        raise ValueError("stop: looks like one of ours")

    __eq__ = __hash__ = __len__ = __repr__ = __str__

    def encode(self, *args):
        raise KeyError


class OddList(list):
    def __iter__(self):
        while True:
            yield 1

    def __len__(self):
        return -1


class OddDict(dict):
    def items(self):
        raise OSError

    keys = values = __iter__ = __len__ = items


class Liar:
    """Says that it is an array."""

    ndim = 0

    def tolist(self):
        raise MemoryError


def deep(depth):
    value = {}
    for _ in range(depth):
        value = {"a": [value]}
    return value


def laughs():
    """Small in memory, 2**100 items as text."""
    value = [1]
    for _ in range(100):
        value = [value, value]
    return {"a": value}


def cycle():
    value = {}
    value["properties"] = value
    return value


NUMBERS = [
    *(0, 1, -1, 2, 5, 64, 100, 101, 16_385, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 10**5000),
    *(0.0, -0.0, 1.0, 0.5, -0.5, 2.0, 5e-324, 1e-9, 1e308, math.nan, math.inf, -math.inf, 1j),
    *(np.int64(3), np.uint64(2**64 - 1), np.float16(0.5), np.float64("nan"), np.longdouble(1)),
    *(np.bool_(True), np.array(3), np.array(0.25), np.array([0.5]), np.array([[1]]), np.array("x")),
    *(torch.tensor(2), torch.tensor(0.5), torch.tensor([1, 2]), torch.tensor(True)),
    *(torch.tensor(math.nan), torch.empty(0), torch.empty(1, device="meta")),
    *(Fraction(1, 2), Fraction(10**400), Decimal("0.5"), OddInt(1), OddFloat(0.5)),
    *(np.datetime64("2020-01-01"), np.timedelta64(5, "s"), torch.empty((), device="meta")),
]
OTHERS = [
    *(None, True, False, object(), object, len, ..., NotImplemented, Raises(), Liar(), Raises),
    *("", "a", "\n\n", "\ud800", "a\udfffb", "日本語", "\0", "1", "x" * 2000, OddStr("a")),
    *(b"a", bytearray(b"a"), memoryview(b"a"), {1, 2}, frozenset({"a"}), range(5), range(10**12)),
    *((), [], {}, [[]], [None], ["a", "b"], ("a",), ["a", ""], ["\udc00"], ["a", 1], [b"a"]),
    *([1, 2, 2], [True], [-1], [2**31], [1.0], [np.int32(4)], [torch.tensor(4)], [Raises()]),
    *(np.array([1, 2]), np.array(["a"]), np.array([0.5]), np.array([None, {}], object)),
    *(OddList([1]), OddDict({1: 2.0}), OddDict(regex="a"), [OddStr("a")], [OddInt(1)]),
    *({1: 2.0}, {1: 10**400}, {1: math.nan}, {"1": 1.0}, {1: "a"}, {-1: 1.0}, {True: 1.0}),
    *({np.int64(5): np.float32(1)}, {1: Raises()}, {1: [1]}, ((1, 2.0),), ((1, 2, 3),)),
    *(UserDict({1: 1.0}), MappingProxyType({1: 1.0}), OrderedDict({3: 1.0})),
    *({"regex": "a+"}, {"regex": ""}, {"regex": 5}, {"grammar": "\ud800"}, {"json_schema": "{}"}),
    *({"json_schema": {"type": "object"}}, {"json_schema": OrderedDict(type="array")}),
    *({"json_schema": {"a": math.nan}}, {"json_schema": {"a": Raises()}}, {"json_schema": 1}),
    *({"json_schema": {"\ud800": 1}}, {"json_schema": {(1, 2): 1}}, {"json_schema": OddDict()}),
    *({"json_schema": Raises()}, {"json_schema": {"a": OddList([1])}}, {"json_schema": b"{}"}),
    *({"choice": ["a", "b"]}, {"choice": []}, {"choice": "ab"}, {"choice": [1]}, {"other": 1}),
    *({"regex": "a", "choice": ["a"]}, (("regex", "a"),), UserDict(choice=("a",))),
]
# Limits, and what is far beyond them.
HUGE = [
    *("x" * 10**7, "\U0001f600" * 10**6, [0] * 10**6, ["a"] * 10**6, np.zeros(10**7)),
    *(torch.zeros(10**7), dict.fromkeys(range(10**5), 1.0), list(range(16_384)), np.arange(16_384)),
    *([str(i) for i in range(1024)], dict.fromkeys(range(1024), 1.0), list(range(10**6))),
    *({"json_schema": v} for v in (deep(5000), laughs(), cycle(), {"a": [1] * 10**6})),
    *({"json_schema": {str(i): {"type": "string"} for i in range(n)}} for n in (2000, 10**5)),
    *({"regex": "a" * 10**7}, {"choice": ["a"] * 10**6}, type("N" * 10**6, (), {})()),
]
VALID = {
    "temperature": [0, 0.6, 1.5],
    "max_tokens": [1, 256, None],
    "n": [1, 4],
    "stop": ["\n", ["a", "b"]],
    "detokenize": [True, False],
    "min_tokens": [0, 3],
    "logit_bias": [{5: 1.0}],
    "structured_outputs": [{"regex": "a"}],
}


def random_kwargs(rng):
    kwargs = {}
    for name in rng.sample(FIELDS, rng.choice([1, 1, 2, 3, 8, len(FIELDS)])):
        zoo = rng.choices([NUMBERS, OTHERS, VALID.get(name, [])], [3, 3, 6])[0]
        if zoo:
            kwargs[name] = rng.choice(zoo)
    if rng.random() < 0.005:
        kwargs[rng.choice(FIELDS)] = rng.choice(HUGE)
    if rng.random() < 0.005:
        kwargs[rng.choice(["top_q", "", "self_", "\ud800"])] = rng.choice(OTHERS)
    return kwargs


def is_immutable(value):
    """Of Python's own types all the way down, so nobody else can change it."""
    if type(value) is tuple:
        return all(map(is_immutable, value))
    return value is None or type(value) in (bool, int, float, str)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_arguments_give_params_or_an_error_that_names_the_field(seed):
    rng = random.Random(seed)
    seconds, num_made = [], 0
    for i in range(NUM_CALLS // len(SEEDS)):
        kwargs = random_kwargs(rng)
        start = time.thread_time()
        try:
            params = SamplingParams(**kwargs)
        except (ValueError, TypeError) as error:
            seconds.append(time.thread_time() - start)
            message = str(error)
            if unknown := kwargs.keys() - set(FIELDS):
                assert any(name in message for name in unknown)
                continue
            match = MESSAGE.fullmatch(message)
            assert match and match[1] in kwargs.keys() | {"min_tokens"}, (i, message)
            assert len(message) < 400, i
            continue
        seconds.append(time.thread_time() - start)
        num_made += 1
        assert all(is_immutable(getattr(params, name)) for name in FIELDS), i
        again = replace(params), pickle.loads(pickle.dumps(params))
        assert again == (params, params) and hash(again[0]) == hash(params), i
        assert type(params.is_plain) is bool
    assert num_made > len(seconds) / 20  # else the values are too evil to test anything
    assert sorted(seconds)[len(seconds) * 99 // 100] < MAX_P99_SECONDS


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_survives_each_value(name):
    for value in [*NUMBERS, *OTHERS, *HUGE]:
        try:
            assert is_immutable(getattr(SamplingParams(**{name: value}), name))
        except (ValueError, TypeError) as error:
            match = MESSAGE.fullmatch(str(error))
            assert match and match[1] in (name, "min_tokens"), error
            assert len(str(error)) < 400
