"""Structured output without a model: random walks over the allowed tokens end in what was asked."""

import json
import random
import re
import sys

import numpy as np
import pytest
import torch

from nanovllm.engine.json_schema import _FORMATS
from nanovllm.engine.prompts import load_tokenizer
from nanovllm.engine.structured import (
    CompiledGrammar,
    GrammarCompiler,
    fill_bitmask,
    new_bitmask,
)
from nanovllm.sampling_params import SamplingParams
from tests.test_bundled import BUNDLED

pytest.importorskip("xgrammar", reason="needs the extra: structured")

VOCAB_SIZE = 2048
ENDOFTEXT, IM_START, IM_END = 2045, 2046, 2047
STOP_IDS = [ENDOFTEXT, IM_END]
NUM_SCHEMAS = 500


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BUNDLED)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, VOCAB_SIZE, STOP_IDS)


# -- random schemas, also for tests that run the engine --------------------------------------------


def random_schema(rng: random.Random, depth: int = 3) -> dict:
    """A JSON schema that outputs can be held to, objects and arrays nested to a depth."""
    kinds = [
        "string",
        "integer",
        "number",
        "boolean",
        "null",
        "enum",
        "const",
        "nullable",
        "any_of",
    ]
    kinds += ["object", "array", "tuple"] * 2 if depth > 0 else []
    kind = rng.choice(kinds)
    if kind == "object":
        names = rng.sample(["a", "b", "name", "x y", 'q"', "é", "id"], rng.randint(1, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))),
            **rng.choice([{}, {"additionalProperties": False}]),
        }
    if kind == "array":
        low = rng.randint(0, 2)
        bounds = {"minItems": low, "maxItems": low + rng.randint(0, 2)}
        return {"type": "array", "items": random_schema(rng, depth - 1), **_some(rng, bounds)}
    if kind == "tuple":
        parts = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 2))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
    if kind == "nullable":
        return {"anyOf": [random_schema(rng, depth - 1), {"type": "null"}]}
    if kind == "any_of":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    return _random_leaf(rng, kind)


def _random_leaf(rng: random.Random, kind: str) -> dict:
    values = [
        0,
        -3,
        2.5,
        "",
        "red",
        'a "quoted"\n\\',
        "né中😀",
        None,
        True,
        [1, "x"],
        {"k": [None]},
    ]
    if kind == "enum":
        return {"enum": rng.sample(values, rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice(values)}
    low = rng.randint(0, 3)
    if kind == "string":
        lengths = {"minLength": low, "maxLength": low + rng.randint(0, 5)}
        others = [
            {"pattern": "^[a-z]{2}-[0-9]+$"},
            {"pattern": "^(red|green)$"},
            {"format": "date"},
        ]
        return {"type": rng.choice(["string", ["string", "null"]])} | rng.choice(
            [{}, _some(rng, lengths), lengths, *others]
        )
    if kind == "integer":
        limits = {"minimum": low - 2, "maximum": low + rng.randint(0, 200)}
        return {"type": "integer"} | rng.choice([_some(rng, limits), {"multipleOf": low + 1}])
    if kind == "number":
        limits = {"minimum": low - 1.5, "exclusiveMaximum": low + rng.randint(2, 6) / 4}
        return {"type": "number", **_some(rng, limits)}
    return {"type": kind}


def _some(rng: random.Random, words: dict) -> dict:
    return {word: value for word, value in words.items() if rng.random() < 0.5}


# -- walks -----------------------------------------------------------------------------------------


def allowed_ids(state, vocab_size=VOCAB_SIZE) -> np.ndarray:
    bitmask = new_bitmask(1, vocab_size)
    fill_bitmask([state], bitmask)
    bits = np.unpackbits(bitmask.numpy().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:vocab_size])


class Walker:
    """Takes random allowed tokens until the grammar ends, with a bias to what closes things."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        texts = [tokenizer.decode([i]) for i in range(VOCAB_SIZE)]
        self.closing = np.array([bool(re.fullmatch(r'[\]}",:]+', text)) for text in texts])

    def walk(self, grammar: CompiledGrammar, rng: random.Random, max_tokens=300) -> str | None:
        """The text of a complete output, None if it was cut."""
        state, ids = grammar.start(), []
        for _ in range(max_tokens):
            allowed = allowed_ids(state)
            assert len(allowed), f"nothing may follow {self.tokenizer.decode(ids)!r}"
            stops = np.intersect1d(allowed, STOP_IDS)
            closing = allowed[self.closing[allowed]]
            if len(stops) and rng.random() < 0.5:
                allowed = stops
            elif len(closing) and rng.random() < 0.3:
                allowed = closing
            ids.append(int(rng.choice(allowed)))
            assert state.accept(ids[-1])
            if state.is_terminated:
                assert ids[-1] in STOP_IDS
                return self.tokenizer.decode(ids[:-1])
            assert ids[-1] not in (ENDOFTEXT, IM_START, IM_END)
        return None


@pytest.fixture(scope="module")
def walker(tokenizer):
    return Walker(tokenizer)


@pytest.mark.parametrize("part", range(10))
def test_finished_outputs_of_random_schemas_parse_and_validate(compiler, walker, part):
    jsonschema = pytest.importorskip("jsonschema", reason="needs the extra: test")
    num_finished, num = 0, NUM_SCHEMAS // 10
    for seed in range(part * num, (part + 1) * num):
        rng = random.Random(seed)
        schema = random_schema(rng)
        text = walker.walk(compiler.compile({"json_schema": schema}), rng)
        if text is not None:
            num_finished += 1
            value = json.loads(text)
            jsonschema.Draft202012Validator.check_schema(schema)
            jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
    assert num_finished >= num * 0.7


@pytest.mark.parametrize(
    "regex",
    [
        "(a|b)+",
        "[0-9]{3}-[0-9]{4}",
        "^yes|no$",
        "",
        r"\d+\.\d{2}",
        "é+中?😀",
        r"[^\x00-\x7f]{1,2}x",
        r"\^\$",
    ],
)
def test_finished_outputs_match_their_regex(compiler, walker, regex):
    grammar = compiler.compile({"regex": regex})
    texts = [walker.walk(grammar, random.Random(seed)) for seed in range(20)]
    assert any(text is not None for text in texts)
    for text in texts:
        assert text is None or "\ufffd" in text or re.fullmatch(f"(?:{regex})", text, re.ASCII)


CHOICES = [
    "yes",
    "no",
    'a "quoted" one',
    "back\\slash",
    "né中😀",
    "\n\t\r\b\f\x00\x1f\x7f",
    "ye",
    "#",
]


def test_finished_outputs_are_among_the_choices_and_each_is_reached(compiler, walker):
    grammar = compiler.compile({"choice": CHOICES})
    assert {walker.walk(grammar, random.Random(seed)) for seed in range(200)} == set(CHOICES)


def test_finished_outputs_follow_their_grammar(compiler, walker):
    grammar = compiler.compile(
        {"grammar": 'root ::= sum\nsum ::= term (" + " term)*\nterm ::= [0-9] | "(" sum ")"'}
    )
    texts = [walker.walk(grammar, random.Random(seed), 100) for seed in range(30)]
    finished = [text for text in texts if text is not None]
    assert len(finished) > 10
    for text in finished:
        assert isinstance(eval(text), int)


def test_characters_split_over_tokens_come_out_whole(compiler, tokenizer):
    """The tokens of single bytes are allowed in the middle of a character, and only the right."""
    state = compiler.compile({"choice": ["é😀"]}).start()
    byte_ids = {i for token, i in tokenizer.get_vocab().items() if len(token) == 1}
    ids = []
    for _ in "é😀".encode():
        (token_id,) = byte_ids & set(allowed_ids(state).tolist())
        ids.append(token_id)
        assert state.accept(token_id)
    assert tokenizer.decode(ids) == "é😀"
    assert allowed_ids(state).tolist() == STOP_IDS


def test_strings_of_limited_length_hold_no_raw_control_character(compiler, tokenizer):
    """xgrammar's own grammar for them lets a raw tab into a string, which does not parse."""
    schema = {"type": "string", "minLength": 2, "maxLength": 3}
    state = compiler.compile({"json_schema": schema}).start()
    accept_text(state, tokenizer, '"')
    texts = [tokenizer.decode([i]) for i in allowed_ids(state)]
    assert len(texts) > 500 and not any(c < " " or c in '"\\' for text in texts for c in text)


# -- masks and states ------------------------------------------------------------------------------


def accept_text(state, tokenizer, text):
    for token_id in tokenizer(text)["input_ids"]:
        assert state.accept(token_id)


def test_stop_tokens_are_allowed_when_complete_and_only_then(compiler, tokenizer):
    state = compiler.compile({"regex": "ab?"}).start()
    assert not set(allowed_ids(state)) & {ENDOFTEXT, IM_START, IM_END}
    assert not state.accept(IM_END)
    accept_text(state, tokenizer, "a")
    assert set(allowed_ids(state)) == {*tokenizer("b")["input_ids"], *STOP_IDS}
    accept_text(state, tokenizer, "b")
    assert allowed_ids(state).tolist() == STOP_IDS
    assert not state.is_terminated


@pytest.mark.parametrize("stop_id", STOP_IDS)
def test_any_stop_token_terminates_and_nothing_follows(compiler, tokenizer, stop_id):
    state = compiler.compile({"choice": ["a"]}).start()
    accept_text(state, tokenizer, "a")
    assert state.accept(stop_id)
    assert state.is_terminated
    assert not state.accept(stop_id)
    bitmask = torch.zeros(1, VOCAB_SIZE // 32, dtype=torch.int32)
    fill_bitmask([state], bitmask)  # a step that runs ahead may still ask
    assert (bitmask == -1).all()


@pytest.mark.parametrize("stop_ids", [[IM_END], []])
@pytest.mark.parametrize(
    "spec", [{"json_schema": {}}, {"regex": r"[\s\S]*"}, {"grammar": "root ::= [^a]*"}]
)
def test_special_and_padded_ids_are_never_text(tokenizer, spec, stop_ids):
    vocab_size = VOCAB_SIZE + 100
    state = GrammarCompiler(tokenizer, vocab_size, stop_ids).compile(spec).start()
    allowed = set(allowed_ids(state, vocab_size))
    assert allowed
    assert max(allowed - set(stop_ids)) < ENDOFTEXT
    assert not state.accept(VOCAB_SIZE + 1)
    assert not state.accept(ENDOFTEXT)


def test_without_a_stop_token_a_complete_output_ends_when_nothing_may_follow(tokenizer):
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE + 8, [])
    state = compiler.compile({"regex": "ab?"}).start()
    accept_text(state, tokenizer, "a")
    assert not state.is_terminated
    accept_text(state, tokenizer, "b")
    assert state.is_terminated


def test_states_of_one_grammar_are_independent(compiler, tokenizer):
    grammar = compiler.compile({"regex": "ab|cd"})
    first, second, third = grammar.start(), grammar.start(), grammar.start()
    accept_text(first, tokenizer, "a")
    accept_text(third, tokenizer, "a")
    accept_text(first, tokenizer, "b")
    assert allowed_ids(first).tolist() == STOP_IDS
    assert allowed_ids(third).tolist() == tokenizer("b")["input_ids"]
    assert set(tokenizer("ac")["input_ids"]) <= set(allowed_ids(second))
    assert first.accept(IM_END)
    assert first.is_terminated and not third.is_terminated


def test_rows_without_a_grammar_are_all_ones_and_the_others_their_own(compiler):
    states = [None, compiler.compile({"choice": ["a"]}).start(), None]
    states.append(compiler.compile({"json_schema": {"type": "boolean"}}).start())
    bitmask = torch.zeros(5, VOCAB_SIZE // 32, dtype=torch.int32)
    fill_bitmask(states, bitmask)
    assert (bitmask[[0, 2, 4]] == -1).all()
    for row in (1, 3):
        alone = new_bitmask(1, VOCAB_SIZE)
        fill_bitmask([states[row]], alone)
        assert (alone[0] == bitmask[row]).all() and (alone != -1).any()


@pytest.mark.parametrize(("vocab_size", "num_words"), [(1, 1), (32, 1), (33, 2), (151936, 4748)])
def test_bitmask_has_a_bit_for_each_id(vocab_size, num_words):
    bitmask = new_bitmask(3, vocab_size)
    assert (bitmask.shape, bitmask.dtype) == ((3, num_words), torch.int32)
    assert (bitmask == -1).all()


# -- compiling -------------------------------------------------------------------------------------


def test_same_specification_is_compiled_once(compiler):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    grammar = compiler.compile({"json_schema": schema})
    assert compiler.compile({"json_schema": json.dumps(schema, indent=1)}) is grammar
    assert compiler.compile({"regex": "a"}) is not compiler.compile({"grammar": 'root ::= "a"'})


def test_schema_of_the_caller_is_not_changed(compiler):
    schema = {"type": "string", "maxLength": 3}
    compiler.compile({"json_schema": schema})
    assert schema == {"type": "string", "maxLength": 3}


def test_cache_forgets_what_was_used_longest_ago(tokenizer, monkeypatch):
    monkeypatch.setattr("nanovllm.engine.structured.MAX_CACHED", 2)
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, STOP_IDS)
    a, b = (compiler.compile({"choice": [x]}) for x in "ab")
    assert compiler.compile({"choice": ["a"]}) is a
    compiler.compile({"choice": ["c"]})
    assert compiler.compile({"choice": ["a"]}) is a
    assert compiler.compile({"choice": ["b"]}) is not b


def test_compiling_that_takes_too_long_is_refused(tokenizer, monkeypatch):
    """Nothing stops xgrammar: this one would take minutes."""
    monkeypatch.setattr("nanovllm.engine.structured.MAX_COMPILE_SECONDS", 0.05)
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, STOP_IDS)
    with pytest.raises(ValueError, match="^structured_outputs: compiling took over 0.05 s"):
        compiler.compile({"regex": "(a|b|ab)*" * 150})


def test_missing_xgrammar_is_one_sentence_naming_the_extra(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, STOP_IDS)
    with pytest.raises(
        ValueError, match=r"^structured_outputs: .*nano-vllm\[structured\]"
    ) as error:
        compiler.compile({"regex": "a"})
    assert "\n" not in str(error.value)


def string(**words):
    return {"type": "string", **words}


def nested(depth):
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "null"}


BAD_SCHEMAS = [
    "{",
    "",
    "[1]",
    '{"type": "integer"} x',
    '{"minimum": NaN}',
    "[" * 100_000,
    "[" * 60_000,
    {"const": {1, 2}},
    {"const": "\ud800"},
    {"const": float("nan")},
    {"const": "x" * 300_000},
    {"const": "é" * 60_000},
    None,
    5,
    [1],
    False,
    {"type": "strin"},
    {"type": 5},
    {"type": []},
    {"type": ["string", "nul"]},
    {"type": [{}]},
    {"properties": []},
    {"properties": {"a": 5}},
    {"properties": {"a": False}},
    {"properties": {}, "required": ["a"]},
    {"type": "object", "required": [5]},
    {"type": "object", "required": "a"},
    {"type": "object", "minProperties": 2},
    {"type": "object", "patternProperties": {"a": {}}},
    {"type": "object", "propertyNames": {"maxLength": 2}},
    {"type": "object", "additionalProperties": 5},
    {"type": "object", "properties": {"a": {}}, "dependentRequired": {"a": ["b"]}},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {}},
    {"type": "array", "minItems": -1},
    {"type": "array", "minItems": 3, "maxItems": 2},
    {"type": "array", "minItems": 10**12},
    {"type": "array", "minItems": True},
    {"type": "array", "items": [{}]},
    string(minLength=-1),
    string(maxLength=1.5),
    string(minLength=3, maxLength=2),
    string(pattern="(a"),
    string(pattern="a$b"),
    string(pattern=5),
    string(pattern="a", maxLength=2),
    string(format="date", maxLength=2),
    string(format=5),
    *(string(format=name) for name in ["bogus", "regex", "iri", "idn-email", "DATE", ""]),
    {"minLength": 2},
    {"minimum": 2},
    {"type": "integer", "minimum": "2"},
    {"type": "integer", "minimum": 1.5},
    {"type": "integer", "minimum": 10**30},
    {"type": "integer", "minimum": 3, "maximum": 2},
    {"type": "integer", "multipleOf": 0},
    {"type": "integer", "multipleOf": 2000},
    {"type": "integer", "multipleOf": 2, "minimum": 3},
    {"type": "number", "multipleOf": 0.5},
    {"type": "number", "minimum": 1e-9},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.000001},
    {"type": "number", "minimum": 1, "maximum": 1},
    {"enum": []},
    {"enum": 5},
    {"enum": ["a", 1], "type": "string"},
    {"const": True, "type": "integer"},
    {"const": 1, "enum": [1]},
    {"anyOf": []},
    {"anyOf": {}},
    {"anyOf": [{"type": "integer"}], "minimum": 2},
    {"allOf": [{"type": "integer"}, {"type": "integer"}]},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"oneOf": [{"const": 1}, {"enum": [1, 2]}]},
    {"oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}]},
    {"not": {"type": "integer"}},
    {"if": {}, "then": {}},
    {"$ref": "#"},
    {"$ref": 5},
    {"$ref": "#/$defs/a"},
    {"$ref": "#a"},
    {"$ref": "other.json"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
    nested(100),
]


@pytest.mark.parametrize(
    "spec",
    [
        5,
        "a",
        [],
        {},
        {"regex": "a", "choice": ["a"]},
        {"json": {}},
        {5: "a"},
        {"regex": None},
        {"regex": b"a"},
        *(
            {"regex": regex}
            for regex in ["(", "*", "a**", "[", "[z-a]", "a{2,1}", "(?=a)b", "\ud800"]
        ),
        *(
            {"regex": regex}
            for regex in [r"\bx", r"(a)\1", r"\p{L}", r"\Ax", "a^b", "a$|b", "x" * 10**6]
        ),
        {"regex": "(" * 50_000 + ")" * 50_000},
        {"regex": "(" * 30_000 + ")" * 30_000},
        {"regex": r"[^\x00-\U0010ffff]"},
        {"grammar": None},
        *(
            {"grammar": text}
            for text in ["", "root ::= x", 'a ::= "a"', 'root ::= "a', "root ::= root"]
        ),
        {"grammar": "root ::= Token(99999)"},
        *(
            {"choice": choice}
            for choice in [None, "ab", [], [1], ["a", None], ["\ud800"], {"a": 1}]
        ),
        {"choice": ["x" * 300_000]},
        {"choice": ["x" * 1000 + str(i) for i in range(1000)]},
        *({"json_schema": schema} for schema in BAD_SCHEMAS),
    ],
    ids=lambda spec: repr(spec)[:60].encode("ascii", "replace").decode(),
)
def test_bad_specification_is_one_sentence(compiler, spec):
    """Refused by SamplingParams or, what that lets through, by the compiler."""
    with pytest.raises((ValueError, TypeError), match="^structured_outputs.*: .+") as error:
        compiler.compile(dict(SamplingParams(structured_outputs=spec).structured_outputs))
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


GOOD_SCHEMAS = [
    True,
    {},
    {"type": "object"},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "integer", "title": "T", "description": "D", "default": 3, "x-order": 1},
    {"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "null"}}},
    {
        "allOf": [{"$ref": "#/definitions/a"}],
        "definitions": {"a": {"enum": ["x"], "type": "string"}},
    },
    {"type": "object", "properties": {"child": {"$ref": "#"}}, "unevaluatedProperties": False},
    {"oneOf": [{"type": "integer"}, {"type": ["string", "null"]}]},
    {
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "$defs": {
            name: {"type": "object", "properties": {"k": {"const": name}}, "required": ["k"]}
            for name in "ab"
        },
    },
    string(pattern="^(a|b)$"),
    string(pattern=r"^[^$^\]]\$x$"),
    *(string(format=name) for name in sorted(_FORMATS)),
    {"type": ["integer", "null"], "minimum": 3},
]


@pytest.mark.parametrize("schema", GOOD_SCHEMAS, ids=repr)
def test_schema_that_can_be_held_to_is_taken(compiler, walker, schema):
    jsonschema = pytest.importorskip("jsonschema", reason="needs the extra: test")
    grammar = compiler.compile({"json_schema": schema})
    texts = [walker.walk(grammar, random.Random(seed)) for seed in range(10)]
    assert any(text is not None for text in texts)
    for text in texts:
        if text is not None:
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


def test_formats_that_are_taken_are_held_to(compiler, tokenizer):
    """xgrammar takes a format that it does not know for none."""

    def takes(schema):
        state = compiler.compile({"json_schema": schema}).start()
        return all(state.accept(i) for i in tokenizer.encode('"{ "'))

    assert takes(string())
    assert not [name for name in sorted(_FORMATS) if takes(string(format=name))]


def test_unknown_format_is_named(compiler):
    with pytest.raises(ValueError, match="format: an output cannot be held to 'bogus', needs one"):
        compiler.compile({"json_schema": {"properties": {"a": string(format="bogus")}}})
