"""SamplingParams: what one request asks of the sampler, validated; the engine never changes it.

It knows neither model nor tokenizer: whether an id is in the vocabulary, and what a schema or a
grammar means, is checked where these are known.

Names and meanings are vLLM's. What the caller passes becomes Python's own immutable values: numpy's
and torch's scalars int or float, lists and one-dimensional arrays tuples without duplicates, dicts
tuples of (key, value) pairs, and an empty one of these None. So nothing that happens to the
caller's objects later matters, and params hash, compare, copy and pickle by value. The stored form
is accepted too, as dataclasses.replace needs it.
"""

import json
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, TypeVar

# Limits that no honest request meets, so that the worst to check takes milliseconds.
MAX_N = 16_384  # completions of one request
MAX_LOGPROBS = 100  # tokens reported per position
MAX_ITEMS = 1_024  # of a list or dict, except
MAX_ALLOWED = 16_384  # allowed_token_ids
MAX_CHARS = 1_024  # of a stop string, a bad word or a choice
MAX_SPEC_CHARS = 65_536  # of a JSON schema, regex or grammar

GREEDY_BELOW = 1e-5  # as vLLM: such temperatures would only amplify rounding
MAX_FLOAT32 = 3.4028234663852886e38  # the sampler computes in float32
MAX_INT32 = 2**31 - 1  # token ids
MAX_INT64 = 2**63 - 1

TokenBiases = Mapping[int, float] | tuple[tuple[int, float], ...]
OutputSpec = Mapping[str, Any] | tuple[tuple[str, Any], ...]
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one request. The defaults are these, whatever generation_config.json says.

    Raises TypeError for a wrong type and ValueError for a wrong value, naming the field.
    """

    temperature: float = 1.0  # >= 0; 0, as all below 1e-5, is greedy: the most probable token
    max_tokens: int | None = 64  # >= 1 new tokens; None: up to the engine's length limit
    ignore_eos: bool = False  # True: an end-of-sequence token is a token like any other
    n: int = 1  # 1 to 16,384 completions of the prompt; 1 if greedy, as all would be the same
    top_k: int = 0  # draw from the k most probable tokens; 0 or -1: from all; no effect if greedy
    top_p: float = 1.0  # > 0 to 1: from the top tokens of this joint probability; as top_k
    min_p: float = 0.0  # 0 to 1: from those of at least this part of the top probability; as top_k
    presence_penalty: float = 0.0  # -2 to 2, off the logits of the tokens that the output has
    frequency_penalty: float = 0.0  # -2 to 2, off the same logits once per occurrence
    repetition_penalty: float = 1.0  # 0.001 to 1000; > 1: less of what prompt and output have
    seed: int | None = None  # int64, of this request's random numbers; None or -1: the engine's
    min_tokens: int = 0  # 0 to max_tokens new tokens before an EOS or a stop token id may come
    stop: str | Sequence[str] | None = None  # texts that end the request; need detokenize
    stop_token_ids: Sequence[int] | None = None  # token ids that end the request as an EOS does
    include_stop_str_in_output: bool = False  # True: the text keeps the stop string at its end
    logprobs: int | None = None  # 0 to 100 most probable tokens to report beside the drawn one
    prompt_logprobs: int | None = None  # 0 to 100, the same for each token of the prompt
    logit_bias: TokenBiases | None = None  # token id -> what to add to its logit, cut to -100..100
    bad_words: Sequence[str] | None = None  # texts whose last token is not drawn after the others
    allowed_token_ids: Sequence[int] | None = None  # draw from these only; at least one
    skip_special_tokens: bool = True  # False: the text shows tokens such as <|im_end|>
    detokenize: bool = True  # False: token ids only, the text stays empty
    structured_outputs: OutputSpec | None = None  # {json_schema, regex, grammar or choice: ...}

    def __post_init__(self) -> None:
        for name, default, check, limits in _RULES:
            value = getattr(self, name)
            if value is not default and not (value is None and name == "max_tokens"):
                stored = check(name, value, *limits)
                object.__setattr__(self, name, None if stored == () else stored)
        if self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)  # also for -0.0
        if self.n > 1 and self.is_greedy:
            raise ValueError(_say("n", self.n, "1 if greedy, as all are equal", "temperature 0.6"))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            needs = f"at most max_tokens ({self.max_tokens})"
            raise ValueError(_say("min_tokens", self.min_tokens, needs, "0"))
        if self.stop is not None and not self.detokenize:
            raise ValueError("stop: got detokenize=False too, needs True, try stop_token_ids")

    @property
    def is_greedy(self) -> bool:
        """Always the most probable token; top_k, top_p, min_p and seed have no effect."""
        return self.temperature == 0

    @property
    def is_plain(self) -> bool:
        """Drawing the next token needs the logits and the temperature, and nothing else."""
        full_vocab = self.temperature == 0 or (self.top_k == self.min_p == 0 and self.top_p == 1)
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty - 1
        changes = self.logit_bias or self.bad_words or self.allowed_token_ids
        used = penalties or changes or self.structured_outputs or self.min_tokens > 0
        return full_vocab and not used and self.logprobs is None


# -- one check per kind of field: its name, what was passed, limits -> what is stored --------------


def _plain(value: Any, most: int = 0) -> Any:
    """value in Python's own types, at most most + 1 items of it; as it is if it is none of these.

    Checks after this ask for exact types, so no code of the caller's classes runs in them.
    """
    kind = type(value)
    if kind is int or kind is float or kind is str or kind is bool:
        return value
    try:
        ndim = getattr(value, "ndim", None)
        if ndim == 0 or ndim == 1:  # numpy's or torch's
            value = (value[: most + 1] if ndim else value).tolist()
        if isinstance(value, bool):
            return value
        if isinstance(value, (int, numbers.Integral)):
            return int(value)
        if isinstance(value, (float, numbers.Real)):
            return float(value)
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, Mapping):
            return dict(islice(value.items(), most + 1))
        if isinstance(value, (list, tuple, range)):
            return tuple(islice(value, most + 1))
    except Exception:  # raised by the caller's class: then it is of no use
        pass
    return value


def _say(name: str, value: Any, needs: str, example: str) -> str:
    """The error's sentence; of a value without a short form it shows the type."""
    kind = type(value)
    got = kind.__name__[:40]
    if kind is int and value.bit_length() > 128:
        got = f"an integer of {value.bit_length():,} bits"
    elif kind is str and len(value) > 40:
        got = f"{value[:40]!r}... ({len(value):,} characters)"
    elif value is None or kind is bool or kind is int or kind is float or kind is str:
        got = repr(value)
    return f"{name}: got {got}, needs {needs}, try {example}"


def _flag(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(_say(name, value, "True or False", "True"))
    return value


def _number(
    name: str, value: Any, kind: type[Number], low: float, high: float, span: str, example: str
) -> Number:
    number = _plain(value)
    if type(number) is not int and type(number) is not kind:
        noun = "an integer" if kind is int else "a number"
        raise TypeError(_say(name, value, f"{noun} {span}", example))
    if not low <= number <= high:  # also for NaN
        needs = f"at least {low}" if number < low else f"at most {high}"
        needs = needs if kind is int else f"a finite number {span}"
        raise ValueError(_say(name, number, needs, example))
    return kind(number)


def _top_k(name: str, value: Any) -> int:
    return max(0, _number(name, value, int, -1, MAX_INT32, ">= 1, or 0 for all", "50 or 0"))


def _seed(name: str, value: Any) -> int | None:
    span = "from -2**63 to 2**63 - 1 or None"
    seed = _number(name, value, int, -MAX_INT64 - 1, MAX_INT64, span, "42 or None")
    return None if seed == -1 else seed


def _items(name: str, value: Any, least: int, most: int, example: str) -> tuple[Any, ...]:
    items = _plain(value, most)
    if type(items) is not tuple:
        raise TypeError(_say(name, value, "a list", example))
    if not least <= len(items) <= most:
        got = f"more than {most:,}" if items else "0"
        raise ValueError(f"{name}: got {got} items, needs {least} to {most:,}, try {example}")
    return items


def _token_ids(name: str, value: Any, least: int, most: int) -> tuple[int, ...]:
    ids = _items(name, value, least, most, "[0, 1]")
    if set(map(type, ids)) != {int}:
        ids = tuple(map(_plain, ids))
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > MAX_INT32:
        ids = tuple(_number(f"{name}[{i}]", x, *_TOKEN_ID) for i, x in enumerate(ids))
    return tuple(dict.fromkeys(ids))


def _text(name: str, value: Any, most: int, example: str) -> str:
    text = _plain(value)
    if type(text) is not str:
        raise TypeError(_say(name, value, "a string", example))
    if not 0 < len(text) <= most:
        raise ValueError(_say(name, text, f"1 to {most:,} characters", example))
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(_say(name, text, "text without lone surrogates", example)) from None
    return text


def _texts(name: str, value: Any, least: int, example: str) -> tuple[str, ...]:
    items = enumerate(_items(name, value, least, MAX_ITEMS, example))
    return tuple(dict.fromkeys(_text(f"{name}[{i}]", x, MAX_CHARS, example) for i, x in items))


def _stop(name: str, value: Any) -> tuple[str, ...]:
    text = _plain(value, MAX_ITEMS)
    return _texts(name, [text] if type(text) is str else value, 0, r"['\n\n']")


def _pairs(name: str, value: Any, example: str) -> tuple[tuple[Any, Any], ...]:
    plain = _plain(value, MAX_ITEMS)
    pairs = tuple(plain.items()) if type(plain) is dict else plain
    if type(pairs) is not tuple or any(type(p) is not tuple or len(p) != 2 for p in pairs):
        raise TypeError(_say(name, value, "a dict", example))
    return _items(name, pairs, 0, MAX_ITEMS, example)


def _logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    biases = {}
    for key, bias in _pairs(name, value, "{0: -100}"):
        token_id = _number(f"{name} key", key, *_TOKEN_ID)
        number = _number(f"{name}[{token_id}]", bias, *_BIAS)
        biases[token_id] = min(100.0, max(-100.0, number))
    return tuple(sorted(biases.items()))


def _structured_outputs(name: str, value: Any) -> tuple[tuple[str, Any], ...]:
    pairs = _pairs(name, value, _SPEC_EXAMPLE)
    kind, spec = pairs[0] if len(pairs) == 1 else (value, None)
    if type(kind) is not str or kind not in _SPECS:
        needs = f"a dict with exactly one key, {', '.join(_SPECS[:-1])} or {_SPECS[-1]}"
        raise ValueError(_say(name, kind, needs, _SPEC_EXAMPLE))
    name = f"{name}.{kind}"
    if kind == "choice":
        return ((kind, _texts(name, spec, 1, "['yes', 'no']")),)
    text = _json_text(name, spec) if kind == "json_schema" and type(_plain(spec)) is dict else spec
    return ((kind, _text(name, text, MAX_SPEC_CHARS, _SPEC_EXAMPLE)),)


def _json_text(name: str, schema: Any) -> str:
    """The schema as JSON, with its keys in their order: that in which properties are generated."""
    try:
        # Measured first, as the least that it can be: a list that holds one list twice, and so on
        # down, has no end as text.
        num_chars, nodes = 0, [schema]
        while nodes:
            node = nodes.pop()
            kind = type(node)
            if kind is str:
                num_chars += len(node)
            elif kind is dict or kind is list or kind is tuple:
                num_chars += (7 if kind is dict else 3) * len(node)  # "": 0, and 0,
                if num_chars <= MAX_SPEC_CHARS:
                    nodes += [*node, *node.values()] if kind is dict else node
            elif not (node is None or kind is int or kind is float or kind is bool):
                raise TypeError  # json would run the code of a subclass
            if num_chars > MAX_SPEC_CHARS:
                raise OverflowError
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        needs = f"JSON values, at most {MAX_SPEC_CHARS:,} characters"
        raise ValueError(_say(name, schema, needs, _SPEC_EXAMPLE)) from error


_SPECS = ("json_schema", "regex", "grammar", "choice")
_SPEC_EXAMPLE = "{'choice': ['yes', 'no']}"
# kind, low, high, the same in words, an example
_TOKEN_ID = (int, 0, MAX_INT32, ">= 0", "0")
_BIAS = (float, -MAX_FLOAT32, MAX_FLOAT32, "from -100 to 100", "-100")
_PENALTY = (_number, float, -2, 2, "from -2 to 2", "0.5 or 0 (off)")
_LOGPROBS = (_number, int, 0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS} or None", "5")
# Fields that are not here are flags.
_CHECKS: dict[str, tuple[Any, ...]] = {
    "temperature": (_number, float, 0, MAX_FLOAT32, ">= 0", "0.6 or 0 for greedy"),
    "max_tokens": (_number, int, 1, MAX_INT64, ">= 1 or None", "256 or None (no limit)"),
    "n": (_number, int, 1, MAX_N, ">= 1", "1"),
    "top_k": (_top_k,),
    "top_p": (_number, float, math.ulp(0), 1, "> 0 and <= 1", "0.9 or 1 (off)"),
    "min_p": (_number, float, 0, 1, "from 0 to 1", "0.05 or 0 (off)"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": (_number, float, 1e-3, 1e3, "from 0.001 to 1000", "1.1 or 1 (off)"),
    "seed": (_seed,),
    "min_tokens": (_number, int, 0, MAX_INT64, ">= 0", "0"),
    "stop": (_stop,),
    "stop_token_ids": (_token_ids, 0, MAX_ITEMS),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "logit_bias": (_logit_bias,),
    "bad_words": (_texts, 0, "['bad']"),
    "allowed_token_ids": (_token_ids, 1, MAX_ALLOWED),
    "structured_outputs": (_structured_outputs,),
}
_RULES = [
    (f.name, f.default, check, limits)
    for f in fields(SamplingParams)
    for check, *limits in [_CHECKS.get(f.name, (_flag,))]
]
