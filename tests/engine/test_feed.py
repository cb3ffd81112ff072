"""generate_each: any number of requests, of which only a window is taken at a time."""

import numpy as np
import pytest

from nanovllm import LLM, SamplingParams
from tests.test_bundled import BUNDLED
from tests.test_streaming import assert_idle

PARAMS = SamplingParams(temperature=1, max_tokens=6)


@pytest.fixture
def llm():
    with LLM(str(BUNDLED), device="cpu", max_num_seqs=4) as llm:
        yield llm


def test_same_results_as_generate_whatever_the_order(llm):
    """Drawn at random: what is drawn depends on the key."""
    prompts = [f"Once upon a time there were {n} animals" for n in range(100)]
    expected = llm.generate(prompts, PARAMS, use_tqdm=False)
    items = [(key, prompt, PARAMS) for key, prompt in enumerate(prompts)]
    found = dict(llm.generate_each(reversed(items)))
    assert [found[key]["text"] for key in range(100)] == [output["text"] for output in expected]


def test_takes_no_more_than_it_has_room_for(llm):
    num_taken = num_ended = most = 0

    def endless():
        nonlocal num_taken
        while True:
            num_taken += 1
            yield num_taken, "Hello", PARAMS

    outputs = llm.generate_each(endless())
    for num_ended, _ in enumerate(outputs, 1):
        most = max(most, num_taken - num_ended)
        if num_ended == 300:
            break
    outputs.close()
    assert most <= 64 + 3 * 4  # a chunk, those that run or wait, those of the last step
    assert_idle(llm)


@pytest.mark.parametrize("policy, num_first", [("fcfs", 128), ("prefix", 201)])
def test_idle_device_waits_for_a_first_step_and_no_more(policy, num_first, monkeypatch):
    """All are made before they are brought into order, and never more than may run, and one."""
    num_made, at_launch = 0, []
    with LLM(str(BUNDLED), device="cpu", max_num_seqs=200, schedule_policy=policy) as llm:
        make, launch = llm._intake.make, llm._runner.launch

        def counting(*args):
            nonlocal num_made
            num_made += 1
            return make(*args)

        def noting(batch):
            at_launch.append(num_made)
            return launch(batch)

        monkeypatch.setattr(llm._intake, "make", counting)
        monkeypatch.setattr(llm._runner, "launch", noting)
        llm.generate([[5, 6]] * 500, SamplingParams(max_tokens=1), use_tqdm=False)
        assert at_launch[:2] == [num_first, num_first + 201 - (policy == "prefix")]


def test_none_is_nothing_for_now(llm):
    """Also when nothing runs, and after bad requests only."""
    told = []

    def items():
        yield None
        yield 1, "", PARAMS
        yield None
        assert told == [1]
        yield 2, "Hello", None
        yield 3, [10**9], PARAMS
        while 2 not in told or 3 not in told:
            yield None
        yield 4, "Hello", SamplingParams(allowed_token_ids=[10**9])

    errors = {}
    for key, output in llm.generate_each(items()):
        told.append(key)
        errors[key] = output["error"]
    assert sorted(told) == [1, 2, 3, 4] and errors[2] is None
    assert errors[1] == "prompt: got an empty prompt, needs at least one token"
    assert errors[3].startswith("prompt: got token id 1000000000")
    assert errors[4].startswith("allowed_token_ids: got token id 1000000000")
    assert_idle(llm)


@pytest.mark.parametrize(
    "item, got",
    [
        (("row-1", "Hello", None), "str as key"),
        ((-1, "Hello", None), "an integer out of range as key"),
        ((2**63, "Hello", None), "an integer out of range as key"),
        ((3, "a"), "tuple of 2"),
        ("abc", "str"),
        (5, "int"),
    ],
)
def test_item_that_is_no_request_is_named(llm, item, got):
    need = (
        r"needs \(key, prompt, SamplingParams or None\), the key an integer from 0, below 2\*\*63"
    )
    with pytest.raises(TypeError, match=rf"^requests\[2\]: got {got}, {need}, try"):
        list(llm.generate_each([(2**63 - 1, "Hello", PARAMS), None, item]))
    assert_idle(llm)


@pytest.mark.parametrize("order", [1, -1])
def test_number_as_prompt_spoils_no_other_request(llm, order):
    """A list that begins with one is a prompt of token ids elsewhere."""
    items = [(0, 5, PARAMS), (1, "Hello", PARAMS), (2, [5], PARAMS), (3, np.int64(5), PARAMS)]
    found = dict(llm.generate_each(items[::order]))
    assert [found[key]["finish_reason"] == "error" for key in range(4)] == [1, 0, 0, 1]
    assert found[0]["error"] == "prompt: got int 5, needs a string or a list of integer token ids"
    assert found[0]["prompt_token_ids"] == []


def test_error_of_the_iterator_comes_through_and_leaves_nothing(llm):
    def items():
        yield 0, "Hello", PARAMS
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        list(llm.generate_each(items()))
    assert_idle(llm)
    assert list(llm.generate_each([])) == []


def test_engine_that_is_busy_refuses(llm):
    outputs = llm.generate_each([(i, "Hello", PARAMS) for i in range(9)])
    next(outputs)
    with pytest.raises(RuntimeError, match="generate_each: requests"):
        llm.generate_each([])
    outputs.close()
    early = llm.generate_each([(0, "Hello", PARAMS)])
    llm.add_request("Hello", PARAMS)
    with pytest.raises(RuntimeError, match="generate_each: requests"):
        next(early)
