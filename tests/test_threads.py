"""Several threads, one engine: calls take turns or are refused, and keep their own tokens."""

import threading
from functools import partial

import pytest

from nanovllm import LLM, SamplingParams
from tests.test_bundled import BUNDLED
from tests.test_llm import random_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
PROMPTS = random_prompts(48, 400)


@pytest.fixture(scope="module")
def llm():
    with LLM(str(BUNDLED), device="cpu", max_model_len=256, num_kvcache_blocks=32) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm):
    return [o["token_ids"] for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def run_each(*calls):
    """Each in a thread of its own, all begun at once; what they raised."""
    barrier, errors = threading.Barrier(len(calls)), []

    def run(call):
        barrier.wait()
        try:
            call()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def check_idle(llm, expected):
    assert llm.is_finished() and llm.scheduler.block_manager.num_free_blocks == 32
    assert [o["token_ids"] for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == expected


def tokens_of(llm, prompts, call):
    if call == "generate":
        return [o["token_ids"] for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    tokens = [[] for _ in prompts]
    for delta in llm.stream(prompts, GREEDY):
        tokens[delta["index"]] += delta["token_ids"]
    return tokens


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_a_call_beside_another_is_refused_and_does_it_no_harm(llm, expected, call):
    num_answered, refusals = [], []

    def ask(begin):
        for first in range(begin, len(PROMPTS), 12):
            try:
                assert tokens_of(llm, PROMPTS[first:][:4], call) == expected[first:][:4]
                num_answered.append(4)
            except RuntimeError as error:
                refusals.append(str(error))

    for _ in range(5):
        assert run_each(*(partial(ask, 4 * i) for i in range(3))) == []
    assert num_answered  # of those that meet, the first one is served
    assert all("unfinished" in said or "another call" in said for said in refusals), set(refusals)
    check_idle(llm, expected)


def test_threads_add_requests_to_an_engine_that_one_steps(llm, expected):
    ids, tokens, done = {}, {}, threading.Event()

    def add(first):
        for i in range(first, len(PROMPTS), 3):
            ids[llm.add_request(PROMPTS[i], GREEDY)] = i
            if i % 7 == 0:
                llm.abort(llm.add_request(PROMPTS[i], SamplingParams(ignore_eos=True)))

    def step():
        while not done.is_set() or not llm.is_finished():
            for request_id, output in llm.step():
                tokens[request_id] = output

    stepping = threading.Thread(target=step)
    stepping.start()
    errors = run_each(*(partial(add, i) for i in range(3)))
    done.set()
    stepping.join()
    assert errors == []
    for request_id, i in ids.items():
        assert tokens.pop(request_id)["token_ids"] == expected[i]
    assert len(tokens) == 7 and all(o["finish_reason"] != "stop" for o in tokens.values())
    check_idle(llm, expected)


def test_what_makes_requests_may_wait_for_a_thread_that_aborts(llm, expected):
    def items():
        for i, prompt in enumerate(PROMPTS):
            assert run_each(partial(llm.abort, 10**9)) == []  # which it waits for
            yield i, prompt, GREEDY

    outputs = dict(llm.generate_each(items()))
    assert [outputs[i]["token_ids"] for i in range(len(PROMPTS))] == expected
    check_idle(llm, expected)


def test_step_leaves_the_requests_of_generate_alone(llm, expected):
    refusals = []

    def look(index, output):
        refusals.extend(run_each(llm.step, lambda: llm.add_request([1], GREEDY)))

    outputs = llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False, on_result=look)
    assert [o["token_ids"] for o in outputs] == expected[:3]
    assert {str(error).partition(":")[0] for error in refusals} == {"step", "add_request"}
    check_idle(llm, expected)
