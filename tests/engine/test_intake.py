"""What callers pass -> requests: seeds, what params mean to this model, errors and their names."""

from dataclasses import replace

import numpy as np
import pytest

from nanovllm.engine import intake as module
from nanovllm.engine.intake import Intake, known_prompt_ids
from nanovllm.engine.prompts import load_tokenizer
from nanovllm.sampling_params import SamplingParams
from tests.test_bundled import BUNDLED

MAX_LEN = 32
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BUNDLED)


@pytest.fixture
def make_intake(tokenizer):
    def make(seed=0, eos=(2, 0)):
        return Intake(seed, tokenizer, len(tokenizer), MAX_LEN, sorted(eos))

    return make


@pytest.fixture
def intake(make_intake):
    return make_intake()


def make_requests(intake, prompts, params=None):
    return [intake.make(prepared) for prepared in intake.read(prompts, params)]


def seeds(intake, num, params=None):
    return [
        [sample.seq.seed for sample in request.samples]
        for request in make_requests(intake, [PROMPT] * num, params)
    ]


# -- seeds -----------------------------------------------------------------------------------------


def test_seed_of_the_engine_gives_each_request_and_sample_its_own(make_intake):
    params = SamplingParams(n=3)
    first, again, other = (seeds(make_intake(seed), 4, params) for seed in (1, 1, 2))
    assert first == again
    flat = [seed for found in (first, other) for group in found for seed in group]
    assert len(set(flat)) == 24 and all(0 <= seed < 2**63 for seed in flat)


def test_seed_of_a_request_names_its_draws_whatever_engine_and_turn(make_intake):
    params = SamplingParams(seed=7)
    found = seeds(make_intake(1), 3, params) + seeds(make_intake(2), 1, params)
    assert len({group[0] for group in found}) == 1
    assert seeds(make_intake(1), 1, replace(params, seed=8)) != found[:1]
    assert seeds(make_intake(1), 1, replace(params, seed=-7)) != found[:1]


@pytest.mark.parametrize("seed", [None, 7])
def test_samples_of_a_request_are_the_same_for_any_n(seed, make_intake):
    groups = [seeds(make_intake(), 1, SamplingParams(n=n, seed=seed))[0] for n in (1, 2, 5)]
    assert groups[0] == groups[2][:1] and groups[1] == groups[2][:2]
    assert len(set(groups[2])) == 5


def test_turn_is_that_of_requests_made(make_intake):
    """So a refused one does not change the tokens of those that follow."""
    a, b = make_intake(), make_intake()
    bad = a.read([[], PROMPT], None, "return")
    assert a.make(bad[1]).samples[0].seq.seed == seeds(b, 1)[0][0]


def test_seeded_sample_shares_no_numbers_with_an_unseeded_request(make_intake):
    """Engine seed 0, request 1 was packed like request seed 0, sample 1."""
    unseeded = seeds(make_intake(0), 4)
    (seeded,) = seeds(make_intake(0), 1, SamplingParams(seed=0, n=4))
    assert not {group[0] for group in unseeded[1:]} & set(seeded[1:])


# -- requests --------------------------------------------------------------------------------------


def test_samples_have_the_prompt_and_an_id_each(intake):
    (request,) = make_requests(intake, [PROMPT], SamplingParams(n=3))
    seqs = [sample.seq for sample in request.samples]
    assert all(seq.token_ids.tolist() == PROMPT for seq in seqs)
    assert len({seq.seq_id for seq in seqs}) == 3


def test_prompt_logprobs_are_asked_of_the_first_sample_alone(intake):
    (request,) = make_requests(intake, [PROMPT], SamplingParams(n=2, prompt_logprobs=0))
    assert [sample.seq.num_prompt_logprobs for sample in request.samples] == [0, -1]


def test_plain_params_ask_nothing_of_their_rows(intake):
    plain, special = make_requests(
        intake,
        [PROMPT] * 2,
        [SamplingParams(stop="x", stop_token_ids=[3]), SamplingParams(top_k=3)],
    )
    assert plain.samples[0].seq.ask is None
    seq = special.samples[0].seq
    ask = seq.ask
    assert (ask.seq_id, ask.seed, ask.num_prompt_tokens) == (seq.seq_id, seq.seed, 3)
    assert ask.params is seq.sampling_params and ask.grammar is None and ask.bad_words == ()


@pytest.mark.parametrize("ignore_eos, expected", [(False, (0, 2, 9)), (True, (9,))])
def test_what_min_tokens_bans_is_what_would_end_the_request(ignore_eos, expected, intake):
    params = SamplingParams(min_tokens=2, stop_token_ids=[9], ignore_eos=ignore_eos)
    assert make_requests(intake, [PROMPT], params)[0].samples[0].seq.ask.stop_ids == expected


def test_bad_words_become_token_sequences(intake, tokenizer):
    (request,) = make_requests(intake, [PROMPT], SamplingParams(bad_words=["prime"]))
    words = request.samples[0].seq.ask.bad_words
    assert [tokenizer.decode(list(word)).strip() for word in words] == ["prime"] * len(words)


def test_samples_of_a_grammar_go_their_own_ways(intake):
    pytest.importorskip("xgrammar")
    params = SamplingParams(n=2, structured_outputs={"choice": ["a", "b"]})
    first, second = make_requests(intake, [PROMPT] * 2, params)
    states = [s.seq.ask.grammar for r in (first, second) for s in r.samples]
    assert len(set(map(id, states))) == 4 and len({id(state._grammar) for state in states}) == 1


# -- what params mean ------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """The words that bad_word_ids was asked for."""
    found = []
    original = module.bad_word_ids

    def counting(tokenizer, words, vocab_size=None):
        found.append(tuple(words))
        return original(tokenizer, words, vocab_size)

    monkeypatch.setattr(module, "bad_word_ids", counting)
    return found


def test_one_object_for_all_prompts_is_worked_out_once(calls, intake):
    params = SamplingParams(bad_words=["x"])
    prepared = intake.read([PROMPT] * 100, params)
    assert calls == [("x",)] and len({id(p.means) for p in prepared}) == 1
    assert all(p.params is params for p in prepared)


def test_each_object_of_a_list_is_worked_out_once(calls, intake):
    a, b = SamplingParams(bad_words=["x"]), SamplingParams(bad_words=["y"])
    prepared = intake.read([PROMPT] * 5, [a, b, a, b, a])
    assert calls == [("x",), ("y",)]
    assert [p.means is prepared[0].means for p in prepared] == [True, False, True, False, True]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_usual_params_mean_what_is_found_the_long_way(ignore_eos, intake):
    params = SamplingParams(ignore_eos=ignore_eos)
    (prepared,) = intake.read([PROMPT], params)
    assert prepared.means == intake._mean("", params)


def test_params_of_a_class_of_their_own_are_looked_at_with_care(intake):
    class Odd(SamplingParams):
        pass

    def fail(self):
        raise OSError("gone")

    odd = Odd()
    Odd.bad_words = property(fail)
    with pytest.raises(TypeError, match=r"^sampling_params\[1\]: cannot be read, OSError: gone"):
        intake.read([PROMPT] * 2, [SamplingParams(), odd])


def test_no_params_are_the_defaults(intake):
    assert [p.params for p in intake.read([PROMPT, "hi"], None)] == [SamplingParams()] * 2


# -- errors ----------------------------------------------------------------------------------------

BAD_PROMPTS = {
    "empty": ([], ValueError, "empty prompt"),
    "beyond the vocabulary": ([10**6], ValueError, "vocabulary"),
    "too long": ([5] * MAX_LEN, ValueError, "fewer than"),
    "no prompt": (None, TypeError, "NoneType"),
    "unknown key": ({"text": "hi"}, ValueError, "'text'"),
}
BAD_PARAMS = {
    "no params": ({"temperature": 1}, TypeError, "needs a SamplingParams"),
    "stop id": (SamplingParams(stop_token_ids=[10**6]), ValueError, "stop_token_ids"),
    "bias": (SamplingParams(logit_bias={10**6: 1}), ValueError, "logit_bias"),
}


@pytest.mark.parametrize("kind", BAD_PROMPTS)
def test_bad_prompt_is_named_or_kept_in_its_place(kind, intake):
    bad, error, words = BAD_PROMPTS[kind]
    prompts = [PROMPT, bad, "hello"]
    with pytest.raises(error, match=rf"^prompts\[1\].*{words}"):
        intake.read(prompts, None)
    good, broken, last = intake.read(prompts, None, "return")
    assert good.error is last.error is None
    assert type(broken.error) is error and str(broken.error).startswith("prompts[1]")
    assert [p.index for p in (good, broken, last)] == [0, 1, 2]
    assert known_prompt_ids(broken) == [] and known_prompt_ids(good) == PROMPT
    assert isinstance(good.prompt_ids, np.ndarray)


@pytest.mark.parametrize("kind", BAD_PARAMS)
def test_bad_params_are_named_or_kept_in_their_place(kind, intake):
    bad, error, words = BAD_PARAMS[kind]
    params = [SamplingParams(), SamplingParams(), bad]
    with pytest.raises(error, match=rf"^sampling_params\[2\].*{words}"):
        intake.read([PROMPT] * 3, params)
    *good, broken = intake.read([PROMPT] * 3, params, "return")
    assert [p.error for p in good] == [None, None] and type(broken.error) is error
    assert known_prompt_ids(broken) == PROMPT


def test_bad_params_for_all_are_everyone_s_error(intake):
    params = SamplingParams(stop_token_ids=[10**6])
    with pytest.raises(ValueError, match=r"^sampling_params\.stop_token_ids"):
        intake.read([PROMPT] * 3, params)
    prepared = intake.read([PROMPT] * 3, params, "return")
    assert all("stop_token_ids" in str(p.error) for p in prepared)


BAD_SPECS = {"json_schema": {"type": "nonsense"}, "regex": "(("}


@pytest.mark.parametrize("kind", BAD_SPECS)
def test_params_without_a_meaning_are_named_or_kept(kind, intake):
    pytest.importorskip("xgrammar")
    bad = SamplingParams(structured_outputs={kind: BAD_SPECS[kind]})
    with pytest.raises(ValueError, match=r"^sampling_params\[1\]\.structured_outputs"):
        intake.read([PROMPT] * 3, [SamplingParams(), bad, SamplingParams()])
    with pytest.raises(ValueError, match="^structured_outputs"):
        intake.read([PROMPT] * 3, bad)
    first, broken, last = intake.read(
        [PROMPT] * 3, [SamplingParams(), bad, SamplingParams()], "return"
    )
    assert first.error is last.error is None and "structured_outputs" in str(broken.error)


def test_error_of_the_prompt_comes_before_that_of_its_params(intake):
    params = [SamplingParams(), SamplingParams(stop_token_ids=[10**6])]
    _, broken = intake.read([PROMPT, []], params, "return")
    assert "prompts[1]" in str(broken.error)
    with pytest.raises(ValueError, match=r"prompts\[1\]"):
        intake.read([PROMPT, []], params)


def test_number_of_params_is_checked_in_any_mode(intake):
    for on_error in ("raise", "return"):
        with pytest.raises(ValueError, match="got 1 for 2 prompts"):
            intake.read([PROMPT] * 2, [SamplingParams()], on_error)


@pytest.mark.parametrize("prompts", [[PROMPT], []])
def test_unknown_mode_is_refused(prompts, intake):
    with pytest.raises(ValueError, match="on_error: got 'ignore'"):
        intake.read(prompts, None, "ignore")


def test_read_makes_nothing(make_intake):
    """A call that raises leaves the turns of later requests as they were."""
    a, b = make_intake(), make_intake()
    a.read([PROMPT] * 5, None)
    assert seeds(a, 2) == seeds(b, 2)
