"""One bad request, an interrupt or a broken step disturbs nothing but itself."""

import random
import re
import time

import numpy as np
import pytest
import torch
from _pytest._io.saferepr import saferepr

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
from tests.test_fuzz_sampling_params import NUMBERS, OTHERS
from tests.test_streaming import assert_idle, visible

NUM_INTERRUPTS = 200
NUM_FAULTS = 100
NUM_FUZZED = 6_000
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


# -- any argument at all ---------------------------------------------------------------------------

# Without classes that lie about themselves: SamplingParams alone is tested against those.
JUNK = [
    value
    for value in [*NUMBERS, *OTHERS]
    if not (type(value) is int and value.bit_length() > 1000)
    and not re.search("Odd|Raises|Liar|timedelta|100000000", saferepr(value))
    and "test_fuzz" not in type(value).__module__
]
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
    "structured_outputs|bad_words"
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
    ]
    return rng.choice(kinds)()


def random_call(llm, rng):
    """A method of the engine and its arguments, most of them bad."""
    kind, params = rng.randrange(8), random_params(rng)
    if kind < 2:
        return llm.add_request, (random_prompt(rng), params), {}
    kwargs = {"use_tqdm": False}
    if rng.random() < 0.2:
        kwargs["on_error"] = rng.choice([None, True, 5, "", "x", ["return"], "raise", "return"])
    if kind < 5:
        return llm.generate, (random_prompt(rng), params), kwargs
    if kind == 5:
        return llm.stream, (random_prompt(rng), params), {}
    if rng.random() < 0.3:
        name = rng.choice(["tools", "chat_template", "chat_template_kwargs"])
        kwargs[name] = rng.choice([*JUNK, [], {}, "{{", "{{ 1 / 0 }}"])
    messages = rng.choice([*MESSAGES, *JUNK, MESSAGES, [MESSAGES[0]] * 2])
    return llm.chat, (messages, params), kwargs


def test_any_call_succeeds_or_names_what_is_wrong_at_once(llm, canary):
    """reliability.md R3, the part that needs an engine: 12,000 calls over two of them."""
    rng = random.Random(1)
    seconds, num_good = [], 0
    for i in range(NUM_FUZZED):
        call, args, kwargs = random_call(llm, rng)
        start = time.thread_time()
        try:
            result = call(*args, **kwargs)
        except (ValueError, TypeError) as error:
            seconds.append(time.thread_time() - start)
            assert re.match(rf"({NAMES})s?\b", str(error)), (i, call, args, kwargs, error)
            assert len(str(error)) < 1500, (i, str(error)[:200])
        else:
            num_good += 1
            if call == llm.stream and not rng.randrange(3):
                list(result)
            for _ in range(100):
                if llm.is_finished():
                    break
                llm.step()
        assert llm.is_finished(), (i, call)
        if i % 1000 == 999:
            assert_unharmed(llm, canary)
    print(f"{len(seconds)} refused, {num_good} done")
    assert len(seconds) > NUM_FUZZED / 2 and num_good > NUM_FUZZED / 20
    assert sorted(seconds)[len(seconds) * 99 // 100] < MAX_P99_SECONDS
