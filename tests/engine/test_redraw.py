"""Redrawer: special rows are drawn again from logits processed as they ask, the others are not."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch

from nanovllm.engine import redraw
from nanovllm.engine.redraw import Redrawer
from nanovllm.engine.sequence import RowAsk, SpecialRow
from nanovllm.kernels.sample import sample
from nanovllm.sampling_params import SamplingParams

VOCAB, NUM_ROWS, MAX_LEN = 70, 6, 40
MARK = 1000  # a token that no draw gives: where it stays, nothing was drawn


def make_redrawer():
    return Redrawer(NUM_ROWS, MAX_LEN, torch.device("cpu"))


class Seq:
    """A sequence as the scheduler would name it, step after step."""

    def __init__(self, seq_id, row, prompt, stop_ids=(), bad_words=(), grammar=None, **params):
        self.row, self.tokens, self.is_new = row, list(prompt), True
        params = SamplingParams(**{"temperature": 0, "max_tokens": None, **params})
        self.ask = RowAsk(seq_id, params, len(prompt), 77 + seq_id, stop_ids, bad_words, grammar)

    def special(self, place):
        ids = np.array(self.tokens, np.int32) if self.is_new else None
        self.is_new = False
        return SpecialRow(place, self.row, len(self.tokens), ids, self.ask)

    @property
    def output(self):
        return self.tokens[self.ask.num_prompt_tokens :]


def draw(redrawer, seqs, logits, places=None):
    """One step of these sequences, which then have one token more; tokens and log-probabilities."""
    tokens = torch.full((len(logits),), MARK, dtype=torch.int64)
    places = range(len(seqs)) if places is None else places
    special = tuple(seq.special(place) for seq, place in zip(seqs, places, strict=True))
    logprobs = redrawer.redraw(special, logits, tokens)
    for seq, place in zip(seqs, places, strict=True):
        seq.tokens.append(int(tokens[place]))
    return tokens.tolist(), logprobs


def expected_logits(seq, row):
    """What a row's logits become by penalties, token by token as their definitions say."""
    params, out = seq.ask.params, row.clone()
    for token in set(seq.tokens):
        x = float(out[token])
        x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        count = seq.output.count(token)
        x -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        out[token] = x
    return out


def make_logits(num_rows, spread=1.0):
    return torch.randn(num_rows, VOCAB) * spread


# -- which rows ------------------------------------------------------------------------------------


def test_other_rows_and_the_logits_stay_as_they_are():
    logits = make_logits(5)
    before = logits.clone()
    seqs = [Seq(1, 3, [1, 2], top_k=1, temperature=1.0), Seq(2, 0, [3], logit_bias={5: 100})]
    tokens, logprobs = draw(make_redrawer(), seqs, logits, places=[3, 1])
    assert tokens == [MARK, 5, MARK, int(logits[3].argmax()), MARK]
    assert torch.equal(logits, before) and logprobs is None


def test_draws_are_those_of_seed_and_position_whatever_the_batch():
    """And the same that a step without redrawing takes from the same logits."""
    logits = make_logits(3, 0.5)
    ask = dict(temperature=0.7, min_tokens=1)
    alone, beside = Seq(4, 2, [1] * 9, **ask), Seq(4, 2, [1] * 9, **ask)
    other = Seq(5, 1, [2, 3], temperature=1.3, top_p=0.5, repetition_penalty=1.5)
    redrawer = make_redrawer()
    for _ in range(20):
        lens = torch.tensor([len(alone.tokens)], dtype=torch.int32)
        args = torch.tensor([0.7]), torch.tensor([77 + 4]), lens
        plain = sample(logits[2:], *args).tolist()
        assert draw(make_redrawer(), [alone], logits[2:])[0] == plain
        draw(redrawer, [other, beside], logits, places=[0, 2])
    assert alone.tokens == beside.tokens and len(set(alone.output)) > 5


def test_half_precision_logits_are_processed_in_float32():
    logits = torch.zeros(1, VOCAB, dtype=torch.bfloat16)
    logits[0, 7], logits[0, 8] = 100, 99.5
    # In bfloat16 neither bias would change its logit.
    assert draw(make_redrawer(), [Seq(1, 0, [1], logit_bias={7: -0.2})], logits)[0] == [7]
    assert draw(make_redrawer(), [Seq(1, 0, [1], logit_bias={8: 0.6})], logits)[0] == [8]


# -- history ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_penalties_see_the_true_tokens_of_every_sequence(seed):
    """Sequences come, go, leave their rows to others and come back, as after a preemption."""
    rng = random.Random(seed)
    redrawer, running, preempted, num_seqs, num_drawn = make_redrawer(), [], [], 0, 0
    for _ in range(60):
        free = set(range(NUM_ROWS)) - {seq.row for seq in running}
        if free and rng.random() < 0.5:
            if preempted and rng.random() < 0.5:
                seq = preempted.pop()
                seq.row, seq.is_new = rng.choice(sorted(free)), True
            else:
                num_seqs += 1
                knobs = dict(
                    presence_penalty=rng.choice([0, 0.7, -0.4]),
                    frequency_penalty=rng.choice([0, 0.9]),
                    repetition_penalty=rng.choice([1, 1.4, 0.8]),
                )
                prompt = rng.choices(range(VOCAB), k=rng.randint(1, 12))
                seq = Seq(num_seqs, rng.choice(sorted(free)), prompt, **knobs)
            running.append(seq)
        logits = make_logits(len(running), 2.0)
        expected = [
            int(expected_logits(seq, row).argmax())
            for seq, row in zip(running, logits, strict=True)
        ]
        if running:
            assert draw(redrawer, running, logits)[0] == expected
            num_drawn += len(running)
        for seq in running[:]:
            if len(seq.tokens) >= 24 or rng.random() < 0.1:
                running.remove(seq)
                preempted += [seq] if len(seq.tokens) < 24 else []
        rng.shuffle(running)
    assert num_drawn > 100 and num_seqs > 10


def test_history_holds_from_the_prefill_on_though_others_come_and_go():
    redrawer, seq = make_redrawer(), Seq(1, 4, [9, 8, 7], repetition_penalty=2.0)
    other = Seq(2, 1, [5], top_k=3, temperature=1.0)
    for i in range(12):
        logits = make_logits(2, 2.0)
        expected = int(expected_logits(seq, logits[0]).argmax())
        seqs = [seq, other] if i % 3 else [seq]
        assert draw(redrawer, seqs, logits[: len(seqs)])[0][0] == expected
        if i % 4 == 3:  # a step in which only the other one is drawn
            draw(redrawer, [other], make_logits(1))


def test_rows_without_penalties_draw_the_same_beside_one_that_has_some():
    """A row that never needed a history may find another's in its place."""
    logits = make_logits(2, 0.5)
    redrawer = make_redrawer()
    old = Seq(1, 0, [3] * 20, repetition_penalty=5.0)
    draw(redrawer, [old], logits[:1])
    plain, alone = (Seq(2, 0, [4], temperature=1.0, top_k=30) for _ in range(2))
    draw(redrawer, [plain], logits[:1])  # no history is written in this step
    draw(make_redrawer(), [alone], logits[:1])
    penalised = Seq(3, 1, [5], frequency_penalty=1.0)
    for _ in range(8):
        draw(redrawer, [plain, penalised], logits)
        draw(make_redrawer(), [alone], logits[:1])
    assert plain.tokens == alone.tokens


def test_bad_words_match_across_prefill_and_decode():
    redrawer, seq = make_redrawer(), Seq(1, 0, [4, 5], bad_words=((6, 7, 8), (9,)))
    for token, allowed in [(9, False), (6, True), (7, True), (8, False), (7, True), (8, True)]:
        logits = torch.zeros(1, VOCAB)
        logits[0, token], logits[0, 50] = 2, 1
        assert draw(redrawer, [seq], logits)[0] == [token if allowed else 50]


def test_sequence_of_the_greatest_length_fits():
    seq = Seq(1, NUM_ROWS - 1, [1] * MAX_LEN, repetition_penalty=2.0)
    assert draw(make_redrawer(), [seq], make_logits(1))[0] != [MARK]


# -- broken rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_broken_row_gives_no_token_and_the_others_theirs(value):
    logits = make_logits(3)
    logits[1] = value
    seqs = [Seq(i, i, [1, 2], frequency_penalty=0.5, logprobs=1) for i in range(3)]
    tokens, logprobs = draw(make_redrawer(), seqs, logits)
    assert tokens == [int(logits[0].argmax()), -1, int(logits[2].argmax())]
    assert logprobs.token_logprobs.isnan().tolist() == [False, True, False]


def test_surplus_row_after_a_broken_one_leaves_its_next_owner_alone():
    """The step after it is launched before the host knows, with history that has no token there."""
    redrawer, seq = make_redrawer(), Seq(1, 2, [1, 2], repetition_penalty=2.0)
    assert draw(redrawer, [seq], torch.full((1, VOCAB), math.nan))[0] == [-1]
    draw(redrawer, [seq], torch.full((1, VOCAB), math.nan))
    new = Seq(2, 2, [3], repetition_penalty=2.0)
    for _ in range(4):
        logits = make_logits(1, 2.0)
        expected = int(expected_logits(new, logits[0]).argmax())
        assert draw(redrawer, [new], logits)[0] == [expected]


def test_row_with_nothing_left_to_draw_from_is_broken():
    seq = Seq(1, 0, [1], allowed_token_ids=[3], min_tokens=2, stop_ids=(3,))
    assert draw(make_redrawer(), [seq], make_logits(1))[0] == [-1]


# -- parameters ------------------------------------------------------------------------------------


def test_stop_ids_are_banned_until_min_tokens_and_no_longer():
    redrawer = make_redrawer()
    seqs = [Seq(i, i, [1] * i, stop_ids=(7, 9), min_tokens=n) for i, n in ((1, 0), (2, 3), (3, 5))]
    logits = torch.zeros(3, VOCAB)
    logits[:, 7], logits[:, 9], logits[:, 20] = 5, 4, 1
    found = [draw(redrawer, seqs, logits)[0] for _ in range(6)]
    assert found == [[7, 20, 20]] * 3 + [[7, 7, 20]] * 2 + [[7, 7, 7]]


def test_ban_and_bias_of_one_token_add_up():
    seq = Seq(1, 0, [1], stop_ids=(7,), min_tokens=1, logit_bias={7: 100, 8: 1})
    logits = torch.zeros(1, VOCAB)
    assert [draw(make_redrawer(), [seq], logits)[0] for _ in range(2)] == [[8], [7]]


def test_params_are_made_once_for_the_same_sequences_in_a_row(monkeypatch):
    """And anew for others, also when those before come back."""
    made = []
    make = Redrawer._make_static

    def counting(self, special, seq_ids, vocab_size):
        made.append(seq_ids)
        return make(self, special, seq_ids, vocab_size)

    monkeypatch.setattr(Redrawer, "_make_static", counting)
    redrawer = make_redrawer()
    a, b = (Seq(i, i, [1], logit_bias={10 + i: 100}) for i in (1, 2))
    logits = torch.zeros(2, VOCAB)
    for seqs in ([a, b], [a, b], [b], [b], [a, b], [b, a], [b, a]):
        expected = [10 + seq.ask.seq_id for seq in seqs]
        assert draw(redrawer, seqs, logits[: len(seqs)])[0] == expected
    assert made == [[1, 2], [2], [1, 2], [2, 1]]


def test_what_changes_from_step_to_step_is_not_kept_with_the_params():
    """The same sequences at other places, with more tokens, under a new mask."""
    seq = Seq(1, 0, [1], presence_penalty=2.0, min_tokens=2, stop_ids=(9,))
    redrawer = make_redrawer()
    logits = torch.zeros(3, VOCAB)
    logits[:, 9], logits[:, 4], logits[:, 5], logits[:, 6] = 9, 1.5, 1, 0.5
    found = [draw(redrawer, [seq], logits, [place])[0][place] for place in (2, 0, 1)]
    assert found == [4, 5, 9]


@pytest.mark.parametrize("knob", [dict(top_k=2), dict(top_p=0.1), dict(min_p=0.9)])
def test_greedy_rows_ignore_filters_and_pay_for_none(knob, monkeypatch):
    seen = []
    process = redraw.process_logits
    monkeypatch.setattr(
        redraw, "process_logits", lambda x, params: seen.append(params) or process(x, params)
    )
    logits = make_logits(1)
    greedy = Seq(1, 0, [1], **knob)
    assert draw(make_redrawer(), [greedy], logits)[0] == [int(logits.argmax())]
    params = seen[0]
    assert params.top_k is params.top_p is params.min_p is params.top_plan.sorted_rows is None
    assert params.top_plan.num_candidates == 0
    sampled = Seq(2, 1, [1], temperature=1.0, **knob)
    draw(make_redrawer(), [greedy, sampled], logits.expand(2, -1))
    columns = {name: getattr(seen[1], name) for name in knob}
    off = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    assert all(column.tolist()[0] == off[name] for name, column in columns.items())


@pytest.mark.parametrize(
    "knob, unused",
    [
        (dict(top_k=3), {"biases", "bad_words", "allowed", "bitmask", "penalties", "history"}),
        (dict(logit_bias={1: 2}), {"top_k", "top_p", "min_p", "penalties", "history"}),
        (dict(presence_penalty=1), {"biases", "top_k", "top_p", "min_p", "allowed"}),
    ],
)
def test_what_no_row_asks_for_is_not_computed(knob, unused, monkeypatch):
    seen = []
    process = redraw.process_logits
    monkeypatch.setattr(
        redraw, "process_logits", lambda x, params: seen.append(params) or process(x, params)
    )
    draw(make_redrawer(), [Seq(1, 0, [1], temperature=1.0, **knob)], make_logits(1))
    assert all(getattr(seen[0], name) is None for name in unused)
    assert all(getattr(seen[0], name) is not None for name in knob if name.startswith("top"))


def test_filters_of_each_row_are_its_own():
    logits = torch.zeros(4, VOCAB)
    logits[:, :3] = torch.tensor([4.0, 3.9, 3.8])
    knobs = [dict(top_k=1), dict(top_p=0.01), dict(min_p=1.0), dict(top_k=2)]
    seqs = [Seq(i, i, [1], temperature=2.0, **knob) for i, knob in enumerate(knobs)]
    redrawer = make_redrawer()
    found = list(zip(*(draw(redrawer, seqs, logits)[0] for _ in range(30)), strict=True))
    assert [set(tokens) for tokens in found] == [{0}, {0}, {0}, {0, 1}]


def test_allowed_tokens_are_those_of_the_row_that_names_them():
    seqs = [Seq(1, 0, [1], top_k=0), Seq(2, 1, [1], allowed_token_ids=[5, 60]), Seq(3, 2, [1])]
    logits = torch.zeros(3, VOCAB)
    logits[:, 7], logits[1, 60] = 3, 1
    assert draw(make_redrawer(), seqs, logits)[0] == [7, 60, 7]


# -- log-probabilities -----------------------------------------------------------------------------


def test_logprobs_are_of_the_rows_that_ask_with_the_largest_number():
    """Raw ones, before bias and temperature, of the token that was drawn."""
    logits = make_logits(4, 2.0)
    seqs = [
        Seq(1, 0, [1], logprobs=2, logit_bias={33: 100}),
        Seq(2, 1, [1], top_k=5),
        Seq(3, 2, [1], logprobs=5, temperature=3.0),
        Seq(4, 3, [1], logprobs=0),
    ]
    places = [3, 0, 1, 2]
    tokens, found = draw(make_redrawer(), seqs, logits, places)
    raw = logits[[3, 1, 2]].log_softmax(1)
    drawn = [tokens[3], tokens[1], tokens[2]]
    assert drawn[0] == 33
    torch.testing.assert_close(found.token_logprobs, raw[range(3), drawn])
    assert found.ranks.tolist() == [
        int((row >= row[token]).sum()) for row, token in zip(raw, drawn, strict=True)
    ]
    values, ids = raw.topk(5)
    assert torch.equal(found.top_ids.long(), ids)
    torch.testing.assert_close(found.top_logprobs, values)


def test_no_logprobs_where_no_row_asks():
    assert draw(make_redrawer(), [Seq(1, 0, [1], top_k=1)], make_logits(1))[1] is None


# -- grammars --------------------------------------------------------------------------------------


class ListedTokens:
    """A grammar that allows a listed set of tokens, and another one after each token."""

    is_terminated = False

    def __init__(self, *allowed):
        self.allowed = list(allowed)


@pytest.fixture
def listed_tokens(monkeypatch):
    """fill_bitmask of ListedTokens; of other rows all bits are set, as structured's does."""

    def fill(states, bitmask):
        bitmask.fill_(-1)
        for row, state in zip(bitmask, states, strict=True):
            if state is not None:
                bits = np.zeros(32 * len(row), np.uint8)
                bits[state.allowed[0]] = 1
                words = np.packbits(bits, bitorder="little").view(np.int32)
                row.copy_(torch.from_numpy(words.copy()))

    monkeypatch.setattr(redraw, "fill_bitmask", fill)


def test_mask_is_of_the_rows_with_a_grammar_and_follows_it(listed_tokens):
    redrawer = make_redrawer()
    grammar = ListedTokens([40, 69], [3], [31, 32])
    seqs = [Seq(1, 0, [1], top_k=1), Seq(2, 1, [1], grammar=grammar), Seq(3, 2, [1], logprobs=0)]
    logits = torch.zeros(3, VOCAB)
    logits[:, 7], logits[:, 69], logits[:, 32] = 3, 2, 1
    found = []
    for _ in range(3):
        found.append(draw(redrawer, seqs, logits)[0])
        grammar.allowed.pop(0)
    assert found == [[7, 69, 7], [7, 3, 7], [7, 32, 7]]


def test_compiled_grammar_masks_its_row():
    pytest.importorskip("xgrammar")
    from nanovllm.engine.prompts import load_tokenizer
    from nanovllm.engine.structured import GrammarCompiler
    from tests.test_bundled import BUNDLED

    tokenizer = load_tokenizer(BUNDLED)
    vocab = len(tokenizer)
    grammar = GrammarCompiler(tokenizer, vocab, [tokenizer.eos_token_id])
    state = grammar.compile({"choice": ["yes", "no"]}).start()
    seqs = [Seq(1, 0, [1], top_k=1), Seq(2, 1, [1], grammar=state, temperature=1.0)]
    redrawer, logits = make_redrawer(), torch.randn(2, vocab)
    while not state.is_terminated:
        state.accept(draw(redrawer, seqs, logits)[0][1])
        assert seqs[0].tokens[-1] == int(logits[0].argmax())
    assert tokenizer.decode(seqs[1].output, skip_special_tokens=True) in ("yes", "no")
