"""Requests from sequences that the test ends as the scheduler would: text, reasons, numbers."""

import pytest
import torch

from nanovllm.engine.prompts import load_tokenizer
from nanovllm.engine.request import Request, refused, token_logprobs
from nanovllm.engine.sequence import RowAsk, Sequence, SequenceTable
from nanovllm.layers.logprobs import Logprobs
from nanovllm.outputs import RequestOutput, SampleOutput
from nanovllm.sampling_params import SamplingParams
from tests.test_bundled import BUNDLED

KEYS = set(RequestOutput.__annotations__) | set(SampleOutput.__annotations__)
MAX_LEN = 64


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BUNDLED)


@pytest.fixture
def make(tokenizer):
    """make(n=2, is_streamed=False, grammar=None, **params) -> Request of n admitted sequences."""

    def make_request(n=1, is_streamed=False, grammar=None, **params):
        table = SequenceTable(n, MAX_LEN, 4)
        seqs = []
        for _ in range(n):
            seq = Sequence([5, 6, 7], SamplingParams(**params), MAX_LEN)
            if grammar is not None:
                seq.ask = RowAsk(seq.seq_id, seq.sampling_params, 3, 0, (), (), grammar)
            seqs.append(seq)
        request = Request(9, seqs, tokenizer, is_streamed, 1.0)
        for seq in seqs:
            seq.enter(table)
        return request

    return make_request


def store(seq, token):
    """What the scheduler does with a token before anyone else sees it."""
    table, row = seq._table, seq.row
    table.token_ids[row, table.num_tokens[row]] = token
    table.num_tokens[row] += 1


def feed(sample, tokens):
    """Stored tokens, seen by the sample if it looks; the number after which it ended."""
    for i, token in enumerate(tokens):
        store(sample.seq, token)
        if sample.is_watched and sample.append(token):
            return i + 1
    return None


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


# -- results ---------------------------------------------------------------------------------------


def test_result_has_every_key_and_the_sequence_s_values(make, tokenizer):
    request = make()
    seq = request.samples[0].seq
    ids = encode(tokenizer, "hello there")
    feed(request.samples[0], ids)
    seq.finish_reason, seq.num_hit_tokens = "length", 2
    output = request.output()
    assert output.keys() == KEYS
    assert output["text"] == tokenizer.decode(ids) and output["token_ids"] == ids
    assert output["prompt_token_ids"] == [5, 6, 7] and output["num_cached_tokens"] == 2
    assert (output["finish_reason"], output["stop_reason"]) == ("length", None)
    assert output["logprobs"] is output["prompt_logprobs"] is output["error"] is None
    assert output["outputs"] == [{k: output[k] for k in SampleOutput.__annotations__}]
    assert request.request_id == seq.seq_id and request.index == 9


def test_result_of_many_samples_is_that_of_the_first_with_all_listed(make, tokenizer):
    request = make(n=3)
    texts = ["one", "and two", "then three"]
    for sample, text in zip(request.samples, texts, strict=True):
        feed(sample, encode(tokenizer, text))
        sample.seq.finish_reason = "length"
    output = request.output()
    assert [sample["text"] for sample in output["outputs"]] == texts
    assert output["text"] == "one" and output["outputs"][0]["token_ids"] == output["token_ids"]
    assert [sample.number for sample in request.samples] == [0, 1, 2]
    assert request.num_running == 3


def test_result_shares_nothing_with_the_engine(make):
    request = make()
    feed(request.samples[0], [5])
    output = request.output()
    store(request.samples[0].seq, 6)
    assert output["token_ids"] == [5] and all(type(i) is int for i in output["prompt_token_ids"])


def test_unfinished_sample_of_an_aborted_request_has_reason_abort(make):
    assert make().output()["finish_reason"] == "abort"


def test_error_of_any_sample_is_the_request_s(make):
    request = make(n=2)
    request.samples[0].seq.finish_reason = "length"
    request.samples[1].seq.finish_reason = "error"
    output = request.output()
    assert "not finite" in output["error"] and output["finish_reason"] == "length"


def test_without_detokenizing_there_is_no_text(make):
    request = make(detokenize=False)
    feed(request.samples[0], [5, 6])
    assert request.output()["text"] == "" and request.output()["token_ids"] == [5, 6]


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_shown_on_demand(skip, make, tokenizer):
    request = make(skip_special_tokens=skip)
    feed(request.samples[0], [*encode(tokenizer, "hi"), tokenizer.eos_token_id])
    request.samples[0].seq.finish_reason = "stop"
    assert request.output()["text"] == "hi"  # as in vLLM: what ends it is no text
    request = make(skip_special_tokens=skip, include_stop_str_in_output=True)
    feed(request.samples[0], [*encode(tokenizer, "hi"), tokenizer.eos_token_id])
    request.samples[0].seq.finish_reason = "stop"
    assert request.output()["text"] == "hi" + tokenizer.eos_token * (not skip)


def test_refused_request_has_the_keys_of_a_result():
    output = refused([1, 2], ValueError("prompts[0]: too long"))
    assert output.keys() == KEYS
    assert output["finish_reason"] == "error" and output["error"] == "prompts[0]: too long"
    assert output["prompt_token_ids"] == [1, 2] and output["metrics"] is None
    assert output["text"] == "" and output["token_ids"] == output["outputs"] == []


# -- metrics ---------------------------------------------------------------------------------------


def test_metrics_are_the_differences_of_the_clocks(make):
    request = make(n=2)
    first, second = (sample.seq for sample in request.samples)
    for sample in request.samples:
        feed(sample, [5, 6, 7])
    start = request._called_at
    first.admitted_at, first.first_token_at, first.finished_at = start + 1, start + 3, start + 4
    second.admitted_at, second.first_token_at, second.finished_at = start + 3, start + 4, start + 9
    metrics = request.output()["metrics"]
    expected = {"queue": 1, "prefill": 2, "decode": 6, "tokens_per_second": 6 / 8}
    assert metrics == pytest.approx(expected)


@pytest.mark.parametrize("admitted_at", [0, 1.0])
def test_no_metrics_before_the_first_token(admitted_at, make):
    request = make()
    request.samples[0].seq.admitted_at = admitted_at
    assert request.output()["metrics"] is None


# -- ends ------------------------------------------------------------------------------------------


def test_only_samples_that_need_each_token_are_watched(make):
    assert not make().samples[0].is_watched and not make(stop_token_ids=[7]).samples[0].is_watched
    for params in (dict(stop="x"), dict(logprobs=0), dict(prompt_logprobs=0)):
        assert make(**params).samples[0].is_watched
    assert make(is_streamed=True).samples[0].is_watched
    assert make(grammar=Grammar([])).samples[0].is_watched


@pytest.mark.parametrize("keep", [False, True])
def test_stop_string_cuts_the_text_and_ends(keep, make, tokenizer):
    request = make(stop=["three", "two"], include_stop_str_in_output=keep)
    sample = request.samples[0]
    ids = encode(tokenizer, "one two three")
    num = feed(sample, ids)
    assert num is not None and num < len(ids) and sample.seq.stop_reason == "two"
    sample.seq.finish_reason = "stop"
    output = request.output()
    assert output["text"] == ("one two" if keep else "one ")
    assert output["token_ids"] == ids[:num] and output["stop_reason"] == "two"


@pytest.mark.parametrize("keep", [False, True])
def test_stop_token_s_own_text_is_left_out_unless_kept(keep, make, tokenizer):
    ids = encode(tokenizer, "one two")
    request = make(stop_token_ids=[ids[-1]], include_stop_str_in_output=keep)
    feed(request.samples[0], ids)
    request.samples[0].seq.finish_reason, request.samples[0].seq.stop_reason = "stop", ids[-1]
    output = request.output()
    assert output["text"] == tokenizer.decode(ids if keep else ids[:-1])
    assert output["token_ids"] == ids and output["stop_reason"] == ids[-1]


@pytest.mark.parametrize("keep", [False, True])
def test_stop_token_beside_stop_strings(keep, make, tokenizer):
    """The token that the scheduler stopped at is no text, so no stop string can end in it."""
    ids, tail = encode(tokenizer, "one") + encode(tokenizer, "7"), "7"
    assert tokenizer.decode(ids[-1:]) == tail
    request = make(stop=tail, stop_token_ids=[ids[-1]], include_stop_str_in_output=keep)
    sample = request.samples[0]
    assert feed(sample, ids[:-1]) is None
    store(sample.seq, ids[-1])
    sample.seq.finish_reason, sample.seq.stop_reason = "stop", ids[-1]
    assert sample.append(ids[-1]) == ("stop" if keep else None)
    assert sample.seq.stop_reason == (tail if keep else ids[-1])
    assert request.output()["text"] == tokenizer.decode(ids if keep else ids[:-1])


def test_stop_string_wins_over_a_length_reached_with_the_same_token(make, tokenizer):
    eos, text = tokenizer.eos_token_id, tokenizer.eos_token
    request = make(stop=text, skip_special_tokens=False)
    sample = request.samples[0]
    assert feed(sample, encode(tokenizer, "hi")) is None
    store(sample.seq, eos)
    sample.seq.finish_reason = "length"
    assert sample.append(eos) and sample.seq.stop_reason == text
    assert request.output()["text"] == "hi"


def test_eos_is_no_part_of_a_hidden_stop_string(make, tokenizer):
    request = make(stop=tokenizer.eos_token)
    assert feed(request.samples[0], [*encode(tokenizer, "hi"), tokenizer.eos_token_id]) is None
    request.samples[0].seq.finish_reason = "stop"
    assert request.output()["text"] == "hi" and request.output()["stop_reason"] is None


class Grammar:
    """Ends with the last of the tokens it expects."""

    def __init__(self, tokens):
        self.tokens, self.is_terminated = list(tokens), False

    def accept(self, token):
        assert token == self.tokens.pop(0)
        self.is_terminated = not self.tokens
        return True


def test_grammar_sees_each_token_and_ends_with_the_last(make, tokenizer):
    ids = encode(tokenizer, "one two three")
    request = make(grammar=Grammar(ids))
    assert feed(request.samples[0], ids) == len(ids)
    request.samples[0].seq.finish_reason = "stop"
    assert request.output()["text"] == "one two three"
    assert request.output()["stop_reason"] is None


def test_grammar_and_stop_string_are_both_followed(make, tokenizer):
    ids = encode(tokenizer, "one two three")
    request = make(grammar=Grammar(ids), stop="two")
    num = feed(request.samples[0], ids)
    assert num < len(ids) and request.samples[0].grammar.tokens == ids[num:]


# -- pieces of a stream ----------------------------------------------------------------------------


def test_pieces_join_to_text_and_tokens_and_end_once(make, tokenizer):
    ids = encode(tokenizer, "naïve 中文 😀 with a tail")
    request = make(is_streamed=True)
    sample, deltas = request.samples[0], []
    for i, token in enumerate(ids):
        store(sample.seq, token)
        sample.append(token)
        if i + 1 == len(ids):
            sample.seq.finish_reason = "length"
        deltas.append(sample.take_delta())
    deltas = [delta for delta in deltas if delta is not None]
    assert sample.take_delta() is None
    assert "".join(d["text"] for d in deltas) == request.output()["text"] == tokenizer.decode(ids)
    assert [i for d in deltas for i in d["token_ids"]] == ids
    assert [d["finish_reason"] for d in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert all(d["text"] for d in deltas[:-1])
    assert {(d["request_id"], d["index"], d["sample"]) for d in deltas} == {
        (request.request_id, 9, 0)
    }


def test_text_that_may_begin_a_stop_string_is_held_back(make, tokenizer):
    request = make(is_streamed=True, stop="zq")
    sample, pieces = request.samples[0], []
    for token in encode(tokenizer, "az") + encode(tokenizer, "b"):
        feed(sample, [token])
        delta = sample.take_delta()
        pieces.append("" if delta is None else delta["text"])
    assert "".join(pieces) == "azb" and not any(piece.endswith("z") for piece in pieces)


def test_pieces_without_text_carry_their_tokens(make):
    request = make(is_streamed=True, detokenize=False)
    sample = request.samples[0]
    feed(sample, [5, 6])
    delta = sample.take_delta()
    assert (delta["text"], delta["token_ids"]) == ("", [5, 6])
    feed(sample, [7])
    sample.seq.finish_reason = "length"
    delta = sample.take_delta()
    assert (delta["token_ids"], delta["finish_reason"]) == ([7], "length")


# -- log-probabilities -----------------------------------------------------------------------------


def test_drawn_token_comes_first_with_its_rank_and_is_not_repeated(tokenizer):
    found = token_logprobs(tokenizer, 6, -1.5, 2, [5, 6, 7], [-0.5, -1.5, -2.5])
    assert list(found) == [6, 5, 7]
    assert [(x.logprob, x.rank) for x in found.values()] == [(-1.5, 2), (-0.5, 1), (-2.5, 3)]
    assert found[5].decoded_token == tokenizer.decode([5])


def test_drawn_token_outside_the_top_is_one_more(tokenizer):
    found = token_logprobs(tokenizer, 80, -9.0, 41, [5, 6], [-0.5, -1.5])
    assert list(found) == [80, 5, 6] and found[80].rank == 41


def test_no_top_tokens_leave_the_drawn_one(tokenizer):
    assert list(token_logprobs(tokenizer, 80, -9.0, 41, [], [])) == [80]


def test_sample_takes_as_many_as_it_asked_for_of_what_the_batch_has(make):
    request = make(logprobs=1)
    sample = request.samples[0]
    sample.add_logprobs(6, -1.5, 2, [5, 6, 7], [-0.5, -1.5, -2.5])
    sample.add_logprobs(5, -0.5, 1, [5, 6, 7], [-0.5, -1.5, -2.5])
    assert [list(x) for x in request.output()["logprobs"]] == [[6, 5], [5]]


def test_prompt_logprobs_stand_at_the_tokens_they_are_of(make):
    """In pieces; the first token has none; what follows the prompt is not part of it."""
    request = make(prompt_logprobs=1)
    assert request.output()["prompt_logprobs"] == [None] * 3

    def piece(*rows):
        values, ranks, ids, top = zip(*rows, strict=True)
        return Logprobs(*map(torch.tensor, (values, ranks, ids, top)))

    request.add_prompt_logprobs(0, piece((-1.0, 3, [8, 9], [-0.25, -0.5])))
    request.add_prompt_logprobs(
        1, piece((-2.0, 1, [7, 9], [-2.0, -3.0]), (-5.0, 1, [4, 5], [-5.0, -6.0]))
    )
    found = request.output()["prompt_logprobs"]
    assert found[0] is None and [list(x) for x in found[1:]] == [[6, 8], [7]]
    assert (found[1][6].rank, found[1][6].logprob) == (3, -1.0)


def test_prompt_logprobs_name_the_prompt_s_tokens_after_the_sequence_has_moved_on(make):
    """The table's row belongs to another by then."""
    request = make(prompt_logprobs=0)
    seq = request.samples[0].seq
    table, row = seq._table, seq.row
    seq.leave()
    table.token_ids[row] = 60
    one = Logprobs(torch.zeros(2), torch.ones(2), torch.zeros(2, 0), torch.zeros(2, 0))
    request.add_prompt_logprobs(0, one)
    assert [list(x) for x in request.output()["prompt_logprobs"][1:]] == [[6], [7]]
