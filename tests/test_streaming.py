"""stream() is generate() in pieces; leaving it, callbacks and abort() disturb nobody else."""

import gc
import random
from collections import defaultdict

import pytest

from nanovllm import LLM, SamplingParams
from tests.test_bundled import BUNDLED

SETTINGS = dict(device="cpu", max_model_len=256, kvcache_block_size=16)
ENGINES = {
    "overlap": {},
    "no_overlap": dict(overlap=False),
    "chunked": dict(max_num_batched_tokens=16),
    "preempting": dict(num_kvcache_blocks=24),
}
PROMPTS = ["count from 1 to 6", "hello", "x y z " * 9, "né 中 😀", [5, 9, 300]]
CANARY = ["list all prime numbers within 20", [7] * 20]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llms():
    """One engine of each kind."""
    made = {name: LLM(str(BUNDLED), **{**SETTINGS, **kwargs}) for name, kwargs in ENGINES.items()}
    yield made
    for llm in made.values():
        llm.close()


@pytest.fixture(params=["overlap", "preempting"])
def llm(llms, request):
    return llms[request.param]


@pytest.fixture(scope="module")
def canary(llms):
    return token_ids(llms["overlap"].generate(CANARY, GREEDY, use_tqdm=False))


def token_ids(outputs):
    return [[sample["token_ids"] for sample in output["outputs"]] for output in outputs]


def visible(output):
    """What does not depend on the clock or on what was cached before."""
    return {k: v for k, v in output.items() if k not in ("metrics", "num_cached_tokens")}


def assert_idle(llm):
    scheduler = llm.scheduler
    assert llm.is_finished() and scheduler.num_waiting == scheduler.num_running == 0
    assert scheduler.block_manager.num_free_blocks == scheduler.num_blocks
    assert len(scheduler.table.free_rows) == scheduler.max_num_running
    loop = llm._loop
    assert not (loop._requests or loop._watched or loop._inflight or loop._ended)


def assert_unharmed(llm, canary):
    assert_idle(llm)
    assert token_ids(llm.generate(CANARY, GREEDY, use_tqdm=False)) == canary
    assert_idle(llm)


def join(deltas):
    """(index, sample) -> text, token ids, and the finish and stop reason of its last delta."""
    texts, ids, ends = defaultdict(str), defaultdict(list), {}
    for delta in deltas:
        key = delta["index"], delta["sample"]
        assert key not in ends, "a delta after the last one"
        texts[key] += delta["text"]
        ids[key] += delta["token_ids"]
        if delta["finish_reason"] is not None:
            ends[key] = delta["finish_reason"], delta["stop_reason"]
        else:
            assert delta["token_ids"] and delta["stop_reason"] is None
    assert ends.keys() == texts.keys()
    return {key: (texts[key], ids[key], *end) for key, end in ends.items()}


def split(outputs):
    """The same of generate's results."""
    return {
        (i, j): (s["text"], s["token_ids"], s["finish_reason"], s["stop_reason"])
        for i, output in enumerate(outputs)
        for j, s in enumerate(output["outputs"])
    }


def byte_ids(llm, text):
    """Ids of the tokens that are one byte of this text."""
    tokenizer = llm.tokenizer
    single = {token: i for token, i in tokenizer.get_vocab().items() if len(token) == 1}
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return sorted({single[c] for piece, _ in pieces for c in piece if c in single})


# -- equal to generate -----------------------------------------------------------------------------

KINDS = {
    "greedy": dict(temperature=0),
    "random tokens": dict(temperature=5.0),
    "pieces of characters": dict(temperature=1.0, allowed_token_ids="é中😀🌙\xa0"),
    "pieces among text": dict(temperature=1.0, logit_bias="é中😀🌙\xa0"),
    "several": dict(temperature=1.0, n=3),
    "several of pieces": dict(temperature=1.0, n=2, allowed_token_ids="中😀 "),
    "special shown": dict(temperature=4.0, skip_special_tokens=False),
    "ids only": dict(temperature=1.0, detokenize=False),
    "stop ids": dict(temperature=2.0, stop_token_ids=list(range(0, 2048, 16))),
    "stop ids shown": dict(
        temperature=2.0,
        stop_token_ids=list(range(0, 2048, 16)),
        include_stop_str_in_output=True,
    ),
    "short stops": dict(temperature=1.0, stop=["e", " s", "a b"], n=2),
    "EOS": dict(temperature=0.6, ignore_eos=False, n=2),
    "logprobs": dict(temperature=1.0, logprobs=2, prompt_logprobs=1),
    "one token": dict(temperature=5.0, max_tokens=1),
}


def make_params(llm, kind, seed=1):
    kwargs = dict(max_tokens=24, ignore_eos=True, seed=seed) | KINDS[kind]
    if "allowed_token_ids" in kwargs:
        kwargs["allowed_token_ids"] = byte_ids(llm, kwargs["allowed_token_ids"])
    if "logit_bias" in kwargs:
        kwargs["logit_bias"] = dict.fromkeys(byte_ids(llm, kwargs["logit_bias"]), 8.0)
    return SamplingParams(**kwargs)


@pytest.fixture(scope="module")
def expected(llms):
    """What generate gives for all kinds of params and all prompts, in an engine of ample size."""
    llm = llms["overlap"]
    return llm.generate(*everything(llm), use_tqdm=False)


def everything(llm):
    params = [make_params(llm, kind, 20 + k) for kind in KINDS for k in range(len(PROMPTS))]
    return PROMPTS * len(KINDS), params


def test_prompts_give_what_is_hard_to_stream(expected):
    """Else equality would show little: halves of characters, whole ones, stops of all kinds."""
    texts = [output["text"] for output in expected]
    assert sum("\ufffd" in text for text in texts) > 10
    assert any(any(c in text for c in "é中😀🌙") for text in texts)
    assert {output["finish_reason"] for output in expected} == {"stop", "length"}
    assert {type(output["stop_reason"]) for output in expected} == {str, int, type(None)}


@pytest.mark.parametrize("engine", ENGINES)
def test_joined_pieces_equal_generate(engine, llms, expected):
    llm = llms[engine]
    prompts, params = everything(llm)
    assert join(llm.stream(prompts, params)) == split(expected)
    assert_idle(llm)
    assert (llm.scheduler.num_preemptions > 0) == (llm.scheduler.num_blocks < 100)


@pytest.mark.parametrize(
    "engine, kind",
    [
        ("overlap", "greedy"),
        ("overlap", "random tokens"),
        ("no_overlap", "pieces among text"),
        ("preempting", "random tokens"),
    ],
)
def test_stop_string_at_any_split_cuts_the_text_there(llms, engine, kind):
    """Stop strings cut out of a free run's text at random; the text is the free run's up to it."""
    llm, rng = llms[engine], random.Random(0)
    free = llm.generate(PROMPTS, make_params(llm, kind), use_tqdm=False)
    prompts, params, texts = [], [], []
    while len(prompts) < 30:
        i = rng.randrange(len(PROMPTS))
        text = free[i]["text"]
        start, length = rng.randrange(len(text)), rng.randint(1, 12)
        stop = text[start : start + length]
        if "\ufffd" in stop:
            continue
        is_included = rng.random() < 0.5
        end = text.index(stop)
        prompts.append(PROMPTS[i])
        texts.append((text[: end + len(stop) * is_included], stop))
        kwargs = KINDS[kind] | dict(stop=[stop, "never\0"], include_stop_str_in_output=is_included)
        if "logit_bias" in kwargs:
            kwargs["logit_bias"] = dict.fromkeys(byte_ids(llm, kwargs["logit_bias"]), 8.0)
        params.append(SamplingParams(max_tokens=24, ignore_eos=True, seed=1, **kwargs))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [(o["text"], o["stop_reason"]) for o in outputs] == texts
    assert all(o["finish_reason"] == "stop" for o in outputs)
    assert join(llm.stream(prompts, params)) == split(outputs)
    assert_idle(llm)


def test_text_comes_while_it_is_made(llms):
    """Not all at the end: a token of plain text is a piece of its own."""
    deltas = list(llms["no_overlap"].stream("hello", GREEDY))
    assert len(deltas) > 8 and all(delta["text"] for delta in deltas[:-1])
    assert {type(delta["request_id"]) for delta in deltas} == {int}


# -- errors and leaving early ----------------------------------------------------------------------


def test_errors_are_raised_by_the_call(llms):
    llm = llms["overlap"]
    with pytest.raises(ValueError, match=r"prompts\[1\]"):
        llm.stream(["a", []], GREEDY)
    with pytest.raises(TypeError, match="sampling_params"):
        llm.stream(["a"], {"temperature": 0})
    with pytest.raises(ValueError, match="structured_outputs"):
        llm.stream(["a"], SamplingParams(structured_outputs={"regex": "("}))
    assert list(llm.stream([], GREEDY)) == []
    assert_idle(llm)


def test_other_calls_are_refused_while_a_stream_is_read(llms, canary):
    llm = llms["overlap"]
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    for call in (llm.generate, llm.stream, lambda p: llm.chat([{"role": "user", "content": p}])):
        with pytest.raises(RuntimeError, match="unfinished"):
            call("a")
    assert len(join(stream)) + 1 >= len(PROMPTS)
    assert_unharmed(llm, canary)


def leave_by_break(stream, num):
    for i, _ in enumerate(stream):
        if i == num:
            break


def leave_by_close(stream, num):
    for _ in range(num):
        next(stream)
    stream.close()
    assert list(stream) == []


def leave_by_exception(stream, num):
    with pytest.raises(ZeroDivisionError):
        for i, _ in enumerate(stream):
            if i == num:
                raise ZeroDivisionError


def leave_unread(stream, num):
    pass


def leave_by_throw(stream, num):
    for _ in range(num + 1):
        next(stream)
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt)


@pytest.mark.parametrize("num", [0, 9])
@pytest.mark.parametrize(
    "leave", [leave_by_break, leave_by_close, leave_by_exception, leave_unread, leave_by_throw]
)
def test_leaving_early_leaves_an_idle_engine(leave, num, llm, canary):
    params = SamplingParams(max_tokens=16, ignore_eos=True, n=2, stop=["never\0"], seed=0)
    stream = llm.stream(PROMPTS, params)
    leave(stream, num)
    del stream
    gc.collect()
    assert_unharmed(llm, canary)


def test_half_read_stream_is_aborted_when_collected(llm, canary):
    cycle = [llm.stream(PROMPTS, GREEDY)]
    cycle.append(cycle)
    next(cycle[0])
    assert not llm.is_finished()
    del cycle
    gc.collect()
    assert_unharmed(llm, canary)


# -- on_result -------------------------------------------------------------------------------------


def test_callback_gets_each_result_once_and_as_it_is_returned(llm):
    calls = []
    prompts = [*PROMPTS, [], "again"]
    params = [
        SamplingParams(temperature=0, max_tokens=1 + 3 * (len(prompts) - i), ignore_eos=True)
        for i in range(len(prompts))
    ]
    outputs = llm.generate(
        prompts,
        params,
        use_tqdm=False,
        on_error="return",
        on_result=lambda i, o: calls.append((i, o)),
    )
    assert sorted(i for i, _ in calls) == list(range(len(prompts)))
    assert all(output is outputs[i] for i, output in calls)
    assert calls[0][0] == len(PROMPTS) and calls[0][1]["finish_reason"] == "error"
    assert [i for i, _ in calls] != sorted(i for i, _ in calls)  # as they finish


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("num", [0, 4])
def test_callback_that_raises_leaves_nothing_behind(num, kind, llm, canary):
    calls = []

    def fail(index, output):
        calls.append(index)
        if len(calls) == num + 1:
            raise kind("of the callback")

    params = [
        SamplingParams(max_tokens=1 + 2 * i, ignore_eos=True, n=2) for i in range(len(PROMPTS))
    ]
    with pytest.raises(kind, match="of the callback"):
        llm.generate(PROMPTS, params, use_tqdm=False, on_result=fail)
    assert len(calls) == num + 1
    assert_unharmed(llm, canary)


# -- abort -----------------------------------------------------------------------------------------

LONG = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, seed=5)


def run(llm, results=None):
    results = {} if results is None else results
    while not llm.is_finished():
        results.update(llm.step())
    return results


@pytest.mark.parametrize("num_steps", [0, 1, 9])
@pytest.mark.parametrize("n", [1, 3])
def test_aborted_request_keeps_its_tokens_and_others_theirs(n, num_steps, llm):
    params = SamplingParams(max_tokens=24, ignore_eos=True, seed=5, n=n)
    whole = llm.generate(PROMPTS, params, use_tqdm=False)
    ids = [llm.add_request(prompt, params) for prompt in PROMPTS]
    results = {}
    for _ in range(num_steps):
        results.update(llm.step())
    gone = {ids[0], ids[3]}
    for request_id in gone:
        llm.abort(request_id)
    run(llm, results)
    assert results.keys() == set(ids)
    for i, request_id in enumerate(ids):
        output = results[request_id]
        if request_id not in gone:
            assert visible(output) == visible(whole[i])
            continue
        assert [s["finish_reason"] for s in output["outputs"]] == ["abort"] * n
        for sample, of_whole in zip(output["outputs"], whole[i]["outputs"], strict=True):
            num = len(sample["token_ids"])
            assert num <= num_steps and sample["token_ids"] == of_whole["token_ids"][:num]
            assert sample["text"] == llm.tokenizer.decode(
                sample["token_ids"], skip_special_tokens=True
            )
    assert_idle(llm)


def test_abort_of_no_request_does_nothing(llm, canary):
    for request_id in (-1, 10**9):
        llm.abort(request_id)
    done = llm.add_request("hello", GREEDY)
    other = llm.add_request("hello", LONG)
    results = {}
    while done not in results:
        results.update(llm.step())
    llm.abort(done)
    llm.abort(-1)
    run(llm, results)
    assert results.keys() == {done, other}
    assert [results[i]["finish_reason"] for i in (done, other)] == ["length"] * 2
    llm.abort(other)
    assert_unharmed(llm, canary)


def test_abort_twice_gives_one_result(llm, canary):
    request_id = llm.add_request("hello", LONG)
    llm.step()
    llm.abort(request_id)
    llm.abort(request_id)
    assert [(i, output["finish_reason"]) for i, output in llm.step()] == [(request_id, "abort")]
    assert_unharmed(llm, canary)


def test_abort_of_a_request_that_waits(canary):
    """It has no row and no blocks, and the one behind it moves up."""
    with LLM(str(BUNDLED), **SETTINGS, max_num_seqs=1) as llm:
        ids = [llm.add_request(prompt, GREEDY) for prompt in ("a", "b", "c")]
        llm.step()
        llm.abort(ids[1])
        results = run(llm)
        assert [results[i]["finish_reason"] for i in ids] == ["length", "abort", "length"]
        assert results[ids[1]]["token_ids"] == [] and results[ids[1]]["metrics"] is None
        assert results[ids[2]]["token_ids"] == llm.generate("c", GREEDY)[0]["token_ids"]
        assert_unharmed(llm, canary)


@pytest.mark.parametrize("detokenize", [True, False])
def test_aborted_before_its_prompt_is_computed_each_sample_gets_a_last_delta(detokenize, canary):
    """The samples after the first wait for the prompt, and are in no queue meanwhile."""
    params = SamplingParams(max_tokens=4, ignore_eos=True, n=3, seed=1, detokenize=detokenize)
    with LLM(str(BUNDLED), **SETTINGS, max_num_batched_tokens=16) as llm:
        whole = llm.generate("a", params, use_tqdm=False)
        deltas = []
        for delta in llm.stream(["a", [9] * 200], params):
            deltas.append(delta)
            for request in list(llm._loop._requests.values()):
                if request.index == 1:
                    llm.abort(request.request_id)
        found = join(deltas)
        assert {k: v for k, v in found.items() if k[0] == 0} == split(whole)
        assert {k: v for k, v in found.items() if k[0] == 1} == {
            (1, j): ("", [], "abort", None) for j in range(3)
        }
        assert_unharmed(llm, canary)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num", [0, 20])
def test_abort_while_a_stream_is_read(num, n, llm, canary):
    params = SamplingParams(max_tokens=24, ignore_eos=True, seed=5, n=n)
    whole = split(llm.generate(PROMPTS, params, use_tqdm=False))
    deltas, gone = [], None
    for i, delta in enumerate(llm.stream(PROMPTS, params)):
        deltas.append(delta)
        if i == num:
            gone = delta["index"]
            llm.abort(delta["request_id"])
    found = join(deltas)
    assert found.keys() == whole.keys()
    for key, (text, ids, reason, _) in found.items():
        if key[0] != gone or reason == "length":
            assert found[key] == whole[key]
        else:
            assert reason == "abort" and ids == whole[key][1][: len(ids)]
            assert text == llm.tokenizer.decode(ids, skip_special_tokens=True)
    if n == 1:
        assert found[gone, 0][2] == "abort"
    assert_unharmed(llm, canary)
