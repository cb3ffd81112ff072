"""Structured output through the engine: what ends with "stop" is what was asked for."""

import json
import random
import re
import sys
from collections import Counter

import pytest

from nanovllm import LLM, SamplingParams
from tests.engine.test_structured import CHOICES, random_schema
from tests.test_bundled import BUNDLED
from tests.test_streaming import assert_idle, join, split, visible

NUM_SCHEMAS = 500
SETTINGS = dict(device="cpu", max_model_len=256, kvcache_block_size=16)
ENGINES = {
    "overlap": {},
    "no_overlap": dict(overlap=False),
    "chunked": dict(max_num_batched_tokens=24),
    "preempting": dict(num_kvcache_blocks=24),
}


@pytest.fixture(scope="module")
def llms():
    made = {name: LLM(str(BUNDLED), **{**SETTINGS, **kwargs}) for name, kwargs in ENGINES.items()}
    yield made
    for llm in made.values():
        llm.close()


def make_params(kind, spec, **kwargs):
    defaults = dict(temperature=0.8, max_tokens=64, seed=0)
    return SamplingParams(**defaults | kwargs, structured_outputs={kind: spec})


def no_spaces(llm):
    """Biases against white space, with which this model goes on and on between JSON's tokens."""
    tokenizer = llm.tokenizer
    return {i: -100.0 for i in range(len(tokenizer)) if tokenizer.decode([i]).isspace()}


# -- every finished output is as asked -------------------------------------------------------------


@pytest.fixture(scope="module")
def num_ended():
    """Ends of all parts by their reason, printed at the end."""
    counts = Counter()
    yield counts
    print(f"\nof {sum(counts.values())} schemas: {dict(counts)}")


@pytest.mark.parametrize("part", range(5))
def test_finished_outputs_of_random_schemas_parse_and_validate(part, llms, num_ended):
    jsonschema = pytest.importorskip("jsonschema", reason="needs the extra: test")
    num = NUM_SCHEMAS // 5
    seeds = range(part * num, (part + 1) * num)
    schemas = [random_schema(random.Random(seed)) for seed in seeds]
    bias = no_spaces(llms["overlap"])
    params = [  # every fourth may also write as much white space as JSON allows
        make_params(
            "json_schema", schema, seed=seed, max_tokens=100, logit_bias=bias if seed % 4 else None
        )
        for schema, seed in zip(schemas, seeds, strict=True)
    ]
    prompts = [f"Answer {i} in JSON:" for i in seeds]
    outputs = llms["overlap"].generate(prompts, params, use_tqdm=False)
    counts = Counter(output["finish_reason"] for output in outputs)
    num_ended.update(counts)
    assert counts.keys() <= {"stop", "length"}
    assert counts["stop"] >= num * 0.5
    for schema, output in zip(schemas, outputs, strict=True):
        if output["finish_reason"] == "stop":
            value = json.loads(output["text"])
            jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
        else:
            assert len(output["token_ids"]) == 100


REGEXES = [
    "(a|b){1,9}",
    "[0-9]{3}-[0-9]{4}",
    "yes|no",
    r"\d+\.\d{2}",
    "(é|中|😀){1,3}",
    "[a-z ]{0,20}",
]
GRAMMAR = 'root ::= sum\nsum ::= term (" + " term)*\nterm ::= [0-9] | "(" sum ")"'


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_regexes_choices_and_grammars_are_followed(ignore_eos, llms):
    specs = [("regex", regex) for regex in REGEXES] * 4
    specs += [("choice", CHOICES)] * 12 + [("grammar", GRAMMAR)] * 12
    params = [
        make_params(*spec, seed=seed, temperature=1.5, ignore_eos=ignore_eos)
        for seed, spec in enumerate(specs)
    ]
    outputs = llms["overlap"].generate(["hello"] * len(specs), params, use_tqdm=False)
    num_finished = 0
    for (kind, spec), output in zip(specs, outputs, strict=True):
        if output["finish_reason"] == "length":
            continue
        num_finished += 1
        assert output["finish_reason"] == "stop" and output["stop_reason"] is None
        text = output["text"]
        if kind == "regex":
            assert re.fullmatch(spec, text, re.ASCII), (spec, text)
        elif kind == "choice":
            assert text in CHOICES
        else:
            assert re.fullmatch(r"[0-9()]+( \+ [0-9()]+)*", text)
            assert text.count("(") == text.count(")")
    assert num_finished > len(specs) * 0.7


def test_what_is_cut_is_the_beginning_of_an_output(llms):
    params = make_params("regex", "[a-z]{200}", max_tokens=9)
    output = llms["overlap"].generate("hello", params, use_tqdm=False)[0]
    assert output["finish_reason"] == "length" and len(output["token_ids"]) == 9
    assert re.fullmatch("[a-z]{9,}", output["text"])


# -- together with everything else -----------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é😀"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def mixed(llm, seed=0):
    """Prompts and params, structured ones and plain ones in turn."""
    params = [
        make_params("json_schema", PERSON, seed=seed, n=3, logit_bias=no_spaces(llm)),
        make_params("json_schema", PERSON, seed=seed, repetition_penalty=1.2, top_k=50),
        make_params("regex", "[0-9]{3}-[0-9]{4}", temperature=0),
        make_params("regex", "[a-z ]{0,30}", seed=seed, n=2, stop=["e", "st"]),
        make_params("choice", CHOICES, seed=seed, n=3, logprobs=2, prompt_logprobs=1),
        make_params("grammar", GRAMMAR, seed=seed, ignore_eos=True, detokenize=False),
    ]
    plain = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=24, seed=seed, n=2),
        SamplingParams(temperature=1.0, max_tokens=24, seed=seed, top_p=0.9, stop=["a"]),
    ] * 2
    params = [p for pair in zip(params, plain, strict=True) for p in pair]
    prompts = [f"{i} person " * (2 + 3 * (i % 4)) for i in range(len(params))]
    return prompts, params


@pytest.fixture(scope="module")
def expected(llms):
    llm = llms["overlap"]
    return llm.generate(*mixed(llm), use_tqdm=False)


@pytest.mark.parametrize("engine", ENGINES)
def test_output_does_not_depend_on_how_it_is_run(engine, llms, expected):
    llm = llms[engine]
    outputs = llm.generate(*mixed(llm), use_tqdm=False)
    for output, other in zip(outputs, expected, strict=True):
        for key in ("token_ids", "text", "finish_reason", "stop_reason"):
            assert [s[key] for s in output["outputs"]] == [s[key] for s in other["outputs"]]
    assert join(llm.stream(*mixed(llm))) == split(expected)
    assert (llm.scheduler.num_preemptions > 0) == (engine == "preempting")
    assert_idle(llm)


def test_mixed_outputs_are_as_asked(expected):
    jsonschema = pytest.importorskip("jsonschema", reason="needs the extra: test")
    persons = [s for output in expected[:4:2] for s in output["outputs"]]
    finished = [json.loads(s["text"]) for s in persons if s["finish_reason"] == "stop"]
    assert len(finished) >= 2
    for person in finished:
        jsonschema.validate(person, PERSON, jsonschema.Draft202012Validator)
    assert len({s["text"] for s in expected[0]["outputs"]}) == 3
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", expected[4]["text"])
    for sample in expected[6]["outputs"]:
        assert re.fullmatch("[a-z ]{0,30}", sample["text"])
        assert "e" not in sample["text"] and "st" not in sample["text"]
    assert {s["text"] for s in expected[8]["outputs"]} <= set(CHOICES)
    assert all(len(s["logprobs"]) == len(s["token_ids"]) for s in expected[8]["outputs"])
    assert expected[10]["text"] == "" and expected[10]["token_ids"]


@pytest.mark.parametrize("engine", ENGINES)
def test_plain_rows_are_as_without_the_structured_ones(engine, llms, expected):
    prompts, params = mixed(llms[engine])
    outputs = llms[engine].generate(prompts[1::2], params[1::2], use_tqdm=False)
    assert list(map(visible, outputs)) == list(map(visible, expected[1::2]))


@pytest.mark.parametrize("engine", ["overlap", "preempting"])
def test_aborted_structured_rows_leave_the_others_as_they_are(engine, llms, expected):
    llm = llms[engine]
    ids = [llm.add_request(*pair) for pair in zip(*mixed(llm), strict=True)]
    results = {}
    for _ in range(8):
        results.update(llm.step())
    for request_id in ids[0:8:2]:
        llm.abort(request_id)
    while not llm.is_finished():
        results.update(llm.step())
    for i, request_id in enumerate(ids):
        for sample, whole in zip(
            results[request_id]["outputs"], expected[i]["outputs"], strict=True
        ):
            if sample["finish_reason"] == "abort":
                assert i in range(0, 8, 2)
                num = len(sample["token_ids"])
                assert sample["token_ids"] == whole["token_ids"][:num]
            else:
                assert sample["token_ids"] == whole["token_ids"]
    assert_idle(llm)


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [{"json_schema": {"type": "strin"}}, {"json_schema": "{"}, {"regex": "("}, {"grammar": "x"}],
)
def test_bad_specification_is_refused_before_anything_runs(spec, llms, monkeypatch):
    llm = llms["overlap"]
    params = [SamplingParams(), SamplingParams(structured_outputs=spec)]
    with monkeypatch.context() as m:
        m.setattr(llm._runner, "launch", None)
        for call in (llm.generate, llm.stream):
            with pytest.raises(ValueError, match=r"^sampling_params\[1\]\.structured_outputs"):
                call(["a", "b"], params)
        with pytest.raises(ValueError, match="^structured_outputs"):
            llm.add_request("a", params[1])
    assert_idle(llm)


def test_grammar_with_nothing_left_to_draw_ends_in_an_error(llms):
    """min_tokens forbids the only tokens that the grammar allows after its last character."""
    params = [make_params("choice", ["a"], min_tokens=5), make_params("choice", ["a"])]
    bad, good = llms["overlap"].generate(["a", "a"], params, use_tqdm=False)
    assert bad["finish_reason"] == "error" and bad["error"] and bad["text"] == "a"
    assert good["finish_reason"] == "stop" and good["error"] is None and good["text"] == "a"
    assert_idle(llms["overlap"])


def test_without_the_extra_it_is_named_in_one_sentence(llms, monkeypatch):
    llm = llms["no_overlap"]
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    params = make_params("regex", "never compiled before")
    with pytest.raises(ValueError, match=r"nano-vllm\[structured\]") as error:
        llm.generate(["a"], params, use_tqdm=False)
    assert "\n" not in str(error.value)
    outputs = llm.generate(["a", "b"], [SamplingParams(max_tokens=2), params], on_error="return")
    assert [o["finish_reason"] for o in outputs] == ["length", "error"]
    assert "nano-vllm[structured]" in outputs[1]["error"]
    assert_idle(llm)
