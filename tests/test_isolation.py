"""One bad request, an interrupt or a broken step disturbs nothing but itself."""

import os
import random
import re
import time
from collections import Counter

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.intake import Intake
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.progress import Progress
from nanovllm.engine.redraw import Redrawer
from nanovllm.engine.request import Request, Sample
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step_handle import StepHandle
from tests.test_bundled import BUNDLED
from tests.test_fuzz_sampling_params import FIELDS, NUMBERS, OTHERS, random_kwargs
from tests.test_streaming import assert_idle, visible

NUM_INTERRUPTS = 200
NUM_FAULTS = 100
NUM_FUZZED = int(os.environ.get("FUZZ_CALLS", 12_000)) // 2  # on each of two engines
MAX_P99_SECONDS = 0.010
MAX_LEN = 96

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
CANARY = [[3, 1, 4, 1, 5, 9, 2, 6], "hello there"]
CANARY_PARAMS = [
    GREEDY,
    SamplingParams(max_tokens=4, ignore_eos=True, seed=3, top_k=40, repetition_penalty=1.1),
]


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no_overlap"])
def llm(request):
    with LLM(
        str(BUNDLED),
        device="cpu",
        max_model_len=MAX_LEN,
        kvcache_block_size=8,
        num_kvcache_blocks=32,
        max_num_batched_tokens=48,
        max_num_seqs=6,
        overlap=request.param,
    ) as llm:
        yield llm


def run_canary(llm):
    return list(map(visible, llm.generate(CANARY, CANARY_PARAMS, use_tqdm=False)))


@pytest.fixture(scope="module")
def canary(llm):
    """What the canary prompts give in a fresh engine."""
    llm.scheduler.reset()
    return run_canary(llm)


def assert_unharmed(llm, canary):
    try:
        assert_idle(llm)
    finally:
        llm._loop.reset()  # so that one failure is not that of all tests after it
    assert run_canary(llm) == canary


# -- bad requests among good ones ------------------------------------------------------------------

GOOD = ["a good prompt", [1, 2, 3], {"prompt": "another"}, {"prompt_token_ids": [7] * 20}]
BAD_PROMPTS = {
    "bad type": (None, "NoneType"),
    "empty": ("", "empty"),
    "empty ids": ([], "empty"),
    "too long": ([5] * MAX_LEN, f"{MAX_LEN}"),
    "id out of range": ([1, 2048], "2048"),
    "negative id": ([-1], "-1"),
    "float ids": ([0.5], "float"),
    "lone surrogate": ("\ud800", "surrogate"),
    "unknown key": ({"prompt_text": "a"}, "prompt_text"),
    "two keys": ({"prompt": "a", "prompt_token_ids": [1]}, "both"),
}
BAD_PARAMS = {
    "wrong type": ({"temperature": 0}, ""),
    "bad schema": (
        SamplingParams(structured_outputs={"json_schema": {"type": "x"}}),
        ".structured",
    ),
    "bad regex": (SamplingParams(structured_outputs={"regex": "("}), ".structured_outputs"),
    "bias out of range": (SamplingParams(logit_bias={5000: 1.0}), ".logit_bias"),
    "allowed out of range": (SamplingParams(allowed_token_ids=[5000]), ".allowed_token_ids"),
    "stop id out of range": (SamplingParams(stop_token_ids=[5000]), ".stop_token_ids"),
}


@pytest.fixture(scope="module")
def clean(llm):
    return list(map(visible, llm.generate(GOOD, GREEDY, use_tqdm=False)))


@pytest.mark.parametrize("at", [0, 2, 4])
@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompt_is_an_entry_of_its_own(name, at, llm, clean):
    bad, part = BAD_PROMPTS[name]
    prompts = [*GOOD[:at], bad, *GOOD[at:]]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, on_error="return")
    error = outputs.pop(at)
    assert error["finish_reason"] == "error" and error["token_ids"] == error["outputs"] == []
    assert error["error"].startswith(f"prompts[{at}]") and part in error["error"]
    assert list(map(visible, outputs)) == clean
    assert_idle(llm)


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("name", BAD_PARAMS)
def test_bad_params_are_an_entry_of_their_own(name, at, llm, clean):
    bad, part = BAD_PARAMS[name]
    prompts = [*GOOD[:at], "with bad params", *GOOD[at:]]
    params = [GREEDY] * len(prompts)
    params[at] = bad
    outputs = llm.generate(prompts, params, use_tqdm=False, on_error="return")
    error = outputs.pop(at)
    assert error["finish_reason"] == "error" and error["prompt_token_ids"]
    assert error["error"].startswith(f"sampling_params[{at}]{part}")
    assert list(map(visible, outputs)) == clean
    assert_idle(llm)


@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("name", [*BAD_PROMPTS, *BAD_PARAMS])
def test_by_default_the_first_bad_request_raises_before_anything_runs(name, at, llm, monkeypatch):
    prompts, params = [*GOOD, "last"], [GREEDY] * 5
    if name in BAD_PROMPTS:
        prompts[at], field = BAD_PROMPTS[name][0], "prompts"
    else:
        params[at], field = BAD_PARAMS[name][0], "sampling_params"
    monkeypatch.setattr(llm._runner, "launch", None)
    with pytest.raises((ValueError, TypeError), match=rf"^{field}\[{at}\]"):
        llm.generate(prompts, params, use_tqdm=False)
    assert_idle(llm)


def test_all_bad_and_many_bad(llm, clean):
    outputs = llm.generate([[], None, ""], GREEDY, use_tqdm=False, on_error="return")
    assert [o["finish_reason"] for o in outputs] == ["error"] * 3
    prompts = [p for good in GOOD for p in (good, [])]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, on_error="return")
    assert list(map(visible, outputs[::2])) == clean
    assert all(o["error"] for o in outputs[1::2])
    assert_idle(llm)


# -- faults ----------------------------------------------------------------------------------------

PROMPTS = ["one two three", [9] * 30, "né 😀", [4, 5], [9] * 25, "xy", [8] * 9]
PARAMS = [
    SamplingParams(max_tokens=7, ignore_eos=True, seed=1),
    SamplingParams(max_tokens=7, ignore_eos=True, seed=2, n=2, stop=["never\0"]),
    SamplingParams(max_tokens=7, ignore_eos=True, seed=3, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=7, ignore_eos=True, temperature=0, presence_penalty=0.5),
    SamplingParams(max_tokens=7, seed=5, structured_outputs={"regex": "[a-z]{5,30}"}),
    SamplingParams(max_tokens=7, ignore_eos=True, seed=6, allowed_token_ids=list(range(256))),
    SamplingParams(max_tokens=7, ignore_eos=True, temperature=0, detokenize=False),
]


def by_generate(llm):
    return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def by_stream(llm):
    return list(llm.stream(PROMPTS, PARAMS))


def by_step(llm):
    ids = [llm.add_request(*pair) for pair in zip(PROMPTS, PARAMS, strict=True)]
    results = {}
    while not llm.is_finished():
        results.update(llm.step())
    return [results[i] for i in ids]


POINTS = [
    (Scheduler, "schedule"),
    (Scheduler, "update"),
    (Scheduler, "add"),
    (Scheduler, "end"),
    (BlockManager, "allocate"),
    (BlockManager, "free"),
    (BlockManager, "publish"),
    (ModelRunner, "launch"),
    (ModelRunner, "_finish_step"),
    (Redrawer, "redraw"),
    (StepHandle, "token_ids"),
    (StepHandle, "logprobs"),
    (Intake, "make"),
    (Detokenizer, "append"),
    (Sample, "append"),
    (Sample, "add_logprobs"),
    (Sample, "take_delta"),
    (Request, "output"),
    (Progress, "update"),
]


class Trap:
    """Counts the calls of a method, and raises at one of them, before or after it has run."""

    def __init__(self, monkeypatch, owner, name):
        self.num_calls, self.at, self.error, self.is_after = 0, None, None, False
        method = getattr(owner, name)

        def call(*args, **kwargs):
            self.num_calls += 1
            is_due = self.num_calls == self.at
            if is_due and not self.is_after:
                raise self.error
            result = method(*args, **kwargs)
            if is_due:
                raise self.error
            return result

        monkeypatch.setattr(owner, name, call)

    def set(self, at, error, is_after):
        self.num_calls, self.at, self.error, self.is_after = 0, at, error, is_after


@pytest.mark.parametrize("way", [by_generate, by_stream])
def test_interrupts_at_random_points_leave_nothing_behind(way, llm, canary, monkeypatch):
    """200 of 200 over the two engines and the two ways, each followed by a canary (R10)."""
    rng = random.Random(way.__name__)
    num_left = NUM_INTERRUPTS // 4
    while num_left:
        point = rng.choice(POINTS)
        with monkeypatch.context() as m:
            trap = Trap(m, *point)
            llm.scheduler.reset()
            way(llm)
            num_calls = trap.num_calls
            for _ in range(5):
                if not (num_calls and num_left):
                    break
                at, is_after = rng.randint(1, num_calls), rng.random() < 0.5
                kind = rng.choice([KeyboardInterrupt, RuntimeError])
                llm.scheduler.reset()
                trap.set(at, kind("injected"), is_after)
                with pytest.raises(kind, match="injected"):
                    way(llm)
                assert_unharmed(llm, canary), (point, at, is_after)
                num_left -= 1


@pytest.mark.parametrize("point", [(Scheduler, "update"), (ModelRunner, "launch")], ids=str)
def test_interrupt_of_a_step_by_hand_leaves_nothing_behind(point, llm, canary, monkeypatch):
    for at in (1, 4, 7):
        with monkeypatch.context() as m:
            trap = Trap(m, *point)
            trap.set(at, KeyboardInterrupt("injected"), False)
            with pytest.raises(KeyboardInterrupt):
                by_step(llm)
        assert_unharmed(llm, canary)


@pytest.mark.parametrize("point", [(Scheduler, "add"), (Intake, "make")], ids=str)
def test_interrupted_add_request_leaves_nothing_behind(point, llm, canary, monkeypatch):
    with monkeypatch.context() as m:
        trap = Trap(m, *point)
        trap.set(1, KeyboardInterrupt("injected"), False)
        with pytest.raises(KeyboardInterrupt):
            llm.add_request(PROMPTS[1], PARAMS[1])
    assert_unharmed(llm, canary)


def test_interrupt_while_a_step_makes_its_results_leaves_nothing_behind(llm, canary, monkeypatch):
    with monkeypatch.context() as m:
        trap = Trap(m, Request, "output")
        trap.set(1, KeyboardInterrupt("injected"), False)
        with pytest.raises(KeyboardInterrupt):
            by_step(llm)
    assert_unharmed(llm, canary)


@pytest.mark.parametrize("way", [by_generate, by_stream])
def test_out_of_memory_at_a_random_step_reaches_the_caller(way, llm, canary, monkeypatch):
    """In the forward, the sampler or the second draw; half of R12."""
    rng = random.Random(way.__name__)
    model = type(llm._runner.model)
    points = [(model, "forward"), (model, "compute_logits"), (Redrawer, "redraw")]
    for point in points:
        with monkeypatch.context() as m:
            trap = Trap(m, *point)
            llm.scheduler.reset()
            way(llm)
            num_calls = trap.num_calls
            for _ in range(NUM_FAULTS // 2 // 4 // len(points) + 1):
                llm.scheduler.reset()
                at = rng.randint(1, num_calls)
                trap.set(at, torch.OutOfMemoryError("injected"), rng.random() < 0.5)
                with pytest.raises(torch.OutOfMemoryError, match="injected"):
                    way(llm)
                assert_unharmed(llm, canary)


def is_prefix(sample, whole):
    num = len(sample["token_ids"])
    return sample["token_ids"] == whole["token_ids"][:num] and num < len(whole["token_ids"])


def test_nan_at_a_random_step_ends_that_request_only(llm, canary, monkeypatch):
    """In plain rows and in those that are drawn again; the other half of R12."""
    rng = random.Random(0)
    llm.scheduler.reset()
    expected = by_generate(llm)
    launch, compute_logits = ModelRunner.launch, type(llm._runner.model).compute_logits
    state = {}

    def launch_noting_rows(self, batch):
        state["seq_ids"] = batch.seq_ids[batch.is_sampled].tolist()
        return launch(self, batch)

    def compute_broken_logits(self, hidden_states, *args):
        logits = compute_logits(self, hidden_states, *args)
        seq_ids = state["seq_ids"]
        if logits is not None and seq_ids and len(logits) == len(seq_ids):
            state["left"] -= 1
            if state["left"] == 0:
                row = rng.randrange(len(logits))
                state["hit"] = seq_ids[row]
                logits = logits.clone()
                logits[row] = state["value"]
        return logits

    monkeypatch.setattr(ModelRunner, "launch", launch_noting_rows)
    monkeypatch.setattr(type(llm._runner.model), "compute_logits", compute_broken_logits)
    num_errors = 0
    for _ in range(NUM_FAULTS // 2 // 2):
        llm.scheduler.reset()
        state |= {
            "left": rng.randint(1, 9),
            "hit": None,
            "value": rng.choice([float("nan"), float("-inf")]),
        }
        made = []
        with monkeypatch.context() as m:
            make = Intake.make
            m.setattr(Intake, "make", lambda *a, _m=make, _l=made: _l.append(_m(*a)) or _l[-1])
            outputs = by_generate(llm)
        is_hit = False
        for output, whole, request in zip(outputs, expected, made, strict=True):
            for sample, other, seq in zip(
                output["outputs"], whole["outputs"], request.samples, strict=True
            ):
                if sample["finish_reason"] == "error":
                    assert seq.seq.seq_id == state["hit"]
                    assert is_prefix(sample, other) and output["error"]
                    is_hit = True
                else:
                    assert sample == other
        num_errors += is_hit
        assert_unharmed(llm, canary)
    assert num_errors > NUM_FAULTS // 2 // 2 * 0.8  # an unread step's surplus row may be hit


def test_masks_that_leave_nothing_end_the_request(llm, canary):
    """An EOS as the only allowed token, which min_tokens forbids; others are not disturbed."""
    eos = llm.scheduler.eos_token_ids
    empty = SamplingParams(allowed_token_ids=eos, min_tokens=3, max_tokens=6)
    none = SamplingParams(allowed_token_ids=[65, 66], bad_words=["b", "c"], max_tokens=6, seed=1)
    outputs = llm.generate([CANARY[0], "a", "a"], [GREEDY, empty, none], use_tqdm=False)
    assert visible(outputs[0]) == canary[0]
    for output in outputs[1:]:
        assert output["finish_reason"] == "error" and output["error"]
        assert output["token_ids"] == [] and output["text"] == ""
    assert_unharmed(llm, canary)


# -- a tokenizer that fails ------------------------------------------------------------------------


class PanicException(BaseException):
    """As the tokenizers library, written in Rust, has it: no Exception."""


EVIL_TEXT, EVIL_TOKEN = "BOOM", 1234


@pytest.fixture
def fail(llm, monkeypatch):
    """fail(error): from now on the tokenizer raises it at the evil text, and at the evil token."""

    def use(error):
        # What the engine uses, and transformers' own, which chat uses.
        for kind in {type(llm._intake._tokenizer), type(llm.tokenizer)}:
            use_in(kind, error)

    def use_in(kind, error):
        call, encode, decode = kind.__call__, kind.encode, kind.decode

        def check(is_evil):
            if is_evil:
                raise error

        def call_or_fail(self, texts, *args, **kwargs):
            check(any(EVIL_TEXT in text for text in texts))
            return call(self, texts, *args, **kwargs)

        def encode_or_fail(self, text, *args, **kwargs):
            check(EVIL_TEXT in text)
            return encode(self, text, *args, **kwargs)

        def decode_or_fail(self, token_ids, *args, **kwargs):
            check(EVIL_TOKEN in token_ids)
            return decode(self, token_ids, *args, **kwargs)

        monkeypatch.setattr(kind, "__call__", call_or_fail)
        monkeypatch.setattr(kind, "encode", encode_or_fail)
        monkeypatch.setattr(kind, "decode", decode_or_fail)

    return use


FAILURES = [PanicException("index out of bounds"), RuntimeError("index out of bounds")]
WAYS_TO_EVIL_TEXT = {
    "prompts[1]": lambda llm: llm.generate(["a", EVIL_TEXT], GREEDY, use_tqdm=False),
    "prompts[0]": lambda llm: llm.add_request(EVIL_TEXT, GREEDY),
    "messages": lambda llm: llm.chat([{"role": "user", "content": EVIL_TEXT}], use_tqdm=False),
    "bad_words[0]": lambda llm: llm.stream("a", SamplingParams(bad_words=[EVIL_TEXT])),
}


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", WAYS_TO_EVIL_TEXT)
def test_text_that_the_tokenizer_fails_on_is_one_named_error(name, error, fail, llm, canary):
    fail(error)
    with pytest.raises(ValueError, match=rf"^{re.escape(name)}: the tokenizer failed on .*bounds"):
        WAYS_TO_EVIL_TEXT[name](llm)
    assert_unharmed(llm, canary)


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_text_that_the_tokenizer_fails_on_spoils_no_other(error, fail, llm, clean):
    fail(error)
    outputs = llm.generate([*GOOD, EVIL_TEXT], GREEDY, use_tqdm=False, on_error="return")
    assert outputs.pop()["error"].startswith("prompts[4]: the tokenizer failed")
    assert list(map(visible, outputs)) == clean


EVIL = {"allowed_token_ids": [EVIL_TOKEN], "max_tokens": 5, "ignore_eos": True}
EVIL_PARAMS = {
    "text": SamplingParams(**EVIL),
    "stop": SamplingParams(**EVIL, stop=["never"]),
    "logprobs": SamplingParams(**EVIL, logprobs=0, detokenize=False),
    "prompt_logprobs": SamplingParams(max_tokens=5, prompt_logprobs=0, detokenize=False),
}


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", EVIL_PARAMS)
def test_output_that_the_tokenizer_fails_on_ends_that_request_only(
    name, error, fail, llm, clean, canary
):
    fail(error)
    prompts, params = [*GOOD[:2], [EVIL_TOKEN] * 3, *GOOD[2:]], [GREEDY] * 5
    params[2] = EVIL_PARAMS[name]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    bad = outputs.pop(2)
    assert bad["finish_reason"] == "error" and bad["text"] == ""
    assert bad["error"] == "the tokenizer failed on the output: index out of bounds"
    assert len(bad["token_ids"]) == (5 if name == "text" else 1)  # kept; ended at once if watched
    assert list(map(visible, outputs)) == clean
    assert_unharmed(llm, canary)


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_stream_that_the_tokenizer_fails_on_ends_with_an_error(error, fail, llm, clean, canary):
    fail(error)
    params = [GREEDY, GREEDY, GREEDY, SamplingParams(**EVIL), GREEDY]
    deltas = list(llm.stream([*GOOD[:3], "evil", GOOD[3]], params))
    ends = {d["index"]: d["finish_reason"] for d in deltas if d["finish_reason"]}
    assert ends == {0: "length", 1: "length", 2: "length", 3: "error", 4: "length"}
    texts = ["".join(d["text"] for d in deltas if d["index"] == i) for i in range(5)]
    assert texts.pop(3) == "" and texts == [output["text"] for output in clean]
    assert sum(len(d["token_ids"]) for d in deltas if d["index"] == 3) < 5
    assert_unharmed(llm, canary)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("prompt", [EVIL_TEXT, "evil"])
def test_interrupt_of_a_tokenizer_is_no_failure_of_it(prompt, kind, fail, llm, canary):
    fail(kind())
    with pytest.raises(kind):
        llm.generate([prompt], SamplingParams(**EVIL), use_tqdm=False, on_error="return")
    assert_unharmed(llm, canary)


# -- any argument at all ---------------------------------------------------------------------------

JUNK = [*NUMBERS, *OTHERS]
TEXTS = ["a", "hello", "né 中 😀", "\ud800", "", "\0", "a" * 5000, "<|im_end|>" * 3, " "]
IDS = [[1], [2047], [0] * 20, [2048], [-1], [], [1] * MAX_LEN, [1] * 5000, [True], [1.5], [2**40]]
MESSAGES = [
    [{"role": "user", "content": "hi"}],
    [{"role": "user"}],
    [{"content": "a"}],
    [],
    [{"role": 1, "content": "a"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [{"role": "user", "content": [{"type": "image"}]}],
    [{"role": "user", "content": "\ud800"}],
]
NAMES = (
    "prompt|sampling_params|on_error|on_result|use_tqdm|messages|tools|chat_template|"
    "chat_template_kwargs|continue_final_message|add_generation_prompt|"
    f"structured_outputs|bad_words|{'|'.join(FIELDS)}"
)


def random_prompt(rng):
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(TEXTS)
    if kind == 1:
        return rng.choice(IDS)
    if kind == 2:
        return rng.choice([np.array, tuple])(rng.choice(IDS[:8]))
    if kind == 3:
        key = rng.choice(["prompt", "prompt_token_ids", "cache_salt", 5])
        return {key: rng.choice([*TEXTS, *IDS, *JUNK])}
    if kind == 4:
        return [rng.choice([*TEXTS, *IDS, *JUNK]) for _ in range(rng.randint(1, 3))]
    return rng.choice(JUNK)


def random_params(rng):
    kinds = [
        lambda: rng.choice(JUNK),
        lambda: None,
        lambda: SamplingParams(max_tokens=1),
        lambda: [SamplingParams(max_tokens=1)] * rng.randint(0, 3),
        lambda: [rng.choice(JUNK), SamplingParams(max_tokens=1)],
        lambda: SamplingParams(max_tokens=1, logit_bias={rng.choice([1, 9999]): 1.0}),
        lambda: SamplingParams(max_tokens=1, structured_outputs={"regex": rng.choice("a([*")}),
        lambda: SamplingParams(max_tokens=1, bad_words=[rng.choice(["a", "\0", " "])]),
        lambda: SamplingParams(max_tokens=1, stop_token_ids=[rng.choice([0, 2048])]),
        lambda: small_params(random_kwargs(rng)),
        lambda: small_params(random_kwargs(rng)),
    ]
    return rng.choice(kinds)()


def small_params(kwargs):
    """Params of these arguments with few tokens, as many would take minutes; as they are if bad."""
    try:
        return SamplingParams(**{**kwargs, "max_tokens": 2, "min_tokens": 0, "n": 1})
    except (ValueError, TypeError):  # what these say is tested in test_fuzz_sampling_params
        return kwargs


def random_messages(rng):
    """One conversation, something at its start being whatever there is."""
    text = {"type": "text", "text": "a"}
    calls = {"role": "user", "content": None}
    shapes = [
        lambda: {"role": rng.choice(JUNK), "content": "a"},
        lambda: {"role": "user", "content": rng.choice(JUNK)},
        lambda: {"role": "user", "content": [rng.choice(JUNK), text]},
        lambda: {"role": "user", "content": [text | {rng.choice(list(text)): rng.choice(JUNK)}]},
        lambda: {"role": "user", "content": "a", "name": rng.choice(JUNK)},
        lambda: calls | {"tool_calls": rng.choice(JUNK)},
        lambda: calls | {"tool_calls": [{"function": {"arguments": rng.choice(JUNK)}}]},
    ]
    return [rng.choice(shapes)(), *MESSAGES[0]]


def random_call(llm, rng):
    """A method of the engine and its arguments, most of them bad."""
    kind, params = rng.randrange(8), random_params(rng)
    if kind < 2:
        return llm.add_request, (random_prompt(rng), params), {}
    kwargs = {"use_tqdm": False}
    if rng.random() < 0.2:
        kwargs["on_error"] = rng.choice([*JUNK, ["return"], "x", *["raise", "return"] * 30])
    if rng.random() < 0.02:
        kwargs["use_tqdm"] = rng.choice([v for v in JUNK if v is not True])
    if rng.random() < 0.02:
        kwargs["on_result"] = rng.choice([v for v in JUNK if not callable(v)])
    if kind < 5:
        return llm.generate, (random_prompt(rng), params), kwargs
    if kind == 5:
        return llm.stream, (random_prompt(rng), params), {}
    if rng.random() < 0.3:
        name = rng.choice(["tools", "chat_template", "chat_template_kwargs"])
        kwargs[name] = rng.choice([*JUNK, [], {}, "{{", "{{ 1 / 0 }}"])
    if rng.random() < 0.1:
        kwargs[rng.choice(["add_generation_prompt", "continue_final_message"])] = rng.choice(JUNK)
    good = rng.choice([*MESSAGES, MESSAGES, [MESSAGES[0]] * 2])
    messages = rng.choice([good, rng.choice(JUNK), random_messages(rng)])
    return llm.chat, (messages, params), kwargs


def test_any_call_succeeds_or_names_what_is_wrong_at_once(llm, canary):
    """reliability.md R3, the part that needs an engine: 12,000 calls over two of them in CI, about
    a minute; FUZZ_CALLS=100000 in the environment makes it that many.

    Timed is what is refused, and what is only queued.
    """
    rng = random.Random(f"overlap: {llm.config.overlap}")
    seconds, counts = [], Counter()
    for i in range(NUM_FUZZED):
        call, args, kwargs = random_call(llm, rng)
        name, start = call.__name__, time.thread_time()
        try:
            result = call(*args, **kwargs)
        except (ValueError, TypeError) as error:
            seconds.append(time.thread_time() - start)
            counts[f"{name} refused: {type(error).__name__}"] += 1
            assert re.match(rf"({NAMES})s?\b", str(error)), (i, name, error)
            assert len(str(error)) < 1500, (i, str(error)[:200])
        else:
            if call in (llm.add_request, llm.stream):
                seconds.append(time.thread_time() - start)
            counts[f"{name} done"] += 1
            if call == llm.stream and not rng.randrange(3):
                list(result)
            for _ in range(100):
                if llm.is_finished():
                    break
                llm.step()
        assert llm.is_finished(), (i, name)
        if i % 1000 == 999:
            assert_unharmed(llm, canary)
            counts["canaries"] += 1
    seconds.sort()
    p50, p99 = (1000 * seconds[len(seconds) * part // 100] for part in (50, 99))
    print(f"{NUM_FUZZED} calls: {dict(sorted(counts.items()))}")
    print(
        f"{len(seconds)} timed: p50 {p50:.3f} ms, p99 {p99:.3f} ms, most {1000 * seconds[-1]:.0f}"
    )
    num_done = sum(n for what, n in counts.items() if what.endswith("done"))
    assert NUM_FUZZED / 20 < num_done < NUM_FUZZED / 2
    assert p99 < 1000 * MAX_P99_SECONDS
