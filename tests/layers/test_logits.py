"""Logits processing: transformers' own processors on CPU in fp32, ties and edges included, and rows
that know nothing of their batch."""

import itertools

import pytest
import torch
from transformers.generation import logits_process as hf

from nanovllm.kernels.sample import sample
from nanovllm.layers import logits as op
from nanovllm.layers.logits import Biases, History, LogitsParams, Penalties

VOCABS = [1, 31, 33, 1000]
TOP_K = [0, 1, 2, 7, 40, 999, 1000, 5000]
TOP_P = [1.0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999999]
MIN_P = [0.0, 1e-6, 0.05, 0.3, 1.0]
NONE = torch.zeros((1, 0), dtype=torch.int64)  # the warpers ignore the history


def make_logits(num_rows, vocab, ties=False):
    """Random rows, of all shapes from flat to peaked; with ties only some ten values each."""
    x = torch.randn(num_rows, vocab) * torch.linspace(0.1, 6, num_rows)[:, None]
    return x.round() if ties else x


def hf_filters(row, min_p=0.0, top_k=0, top_p=1.0):
    """float32 [vocab] through transformers' warpers, in our order."""
    x = row[None].clone()
    if min_p:
        x = hf.MinPLogitsWarper(min_p)(NONE, x)
    if top_k:
        x = hf.TopKLogitsWarper(top_k)(NONE, x)
    if top_p < 1:
        x = hf.TopPLogitsWarper(top_p)(NONE, x)
    return x[0]


def top_params(top_k, top_p, vocab):
    return {
        "top_k": torch.tensor(top_k),
        "top_p": torch.tensor(top_p, dtype=torch.float64) if min(top_p) < 1 else None,
        "top_plan": op.plan_top(top_k, top_p, vocab),
    }


def apply_top(x, top_k, top_p):
    params = top_params(top_k, top_p, x.size(1))
    y = x.clone()
    op.apply_top_k_top_p(y, params["top_k"], params["top_p"], params["top_plan"])
    return y


def assert_same_filter(ours, theirs, before):
    """The same tokens stay, with their bits; of equal tokens as many, and those of the lowest ids
    among them."""
    assert torch.equal(ours.isfinite().sum(-1), theirs.isfinite().sum(-1))
    assert torch.equal(ours.sort(-1).values, theirs.sort(-1).values)
    kept = ours.isfinite()
    assert torch.equal(ours[kept], before[kept])
    for row, x in zip(kept, before, strict=True):
        if row.any():
            is_edge = x == x[row].min()
            assert row[is_edge].int().diff().le(0).all()


# -- filters against transformers ------------------------------------------------------------------


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("ties", [False, True])
def test_min_p_equals_transformers(vocab, ties):
    rows = make_logits(40, vocab, ties).repeat_interleave(len(MIN_P), 0)
    ours = rows.clone()
    op.apply_min_p(ours, torch.tensor(MIN_P * 40))
    theirs = [hf_filters(r, min_p=p) for r, p in zip(rows, MIN_P * 40, strict=True)]
    assert torch.equal(ours, torch.stack(theirs))


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("ties", [False, True])
def test_top_k_and_top_p_in_any_mix_equal_transformers(vocab, ties):
    pairs = list(itertools.product(TOP_K, TOP_P)) * 5
    rows = make_logits(len(pairs), vocab, ties)
    top_k, top_p = map(list, zip(*pairs, strict=True))
    theirs = [hf_filters(r, top_k=k, top_p=p) for r, (k, p) in zip(rows, pairs, strict=True)]
    assert_same_filter(apply_top(rows, top_k, top_p), torch.stack(theirs), rows)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 8, 10, 16, 20])
def test_top_p_within_equal_tokens_keeps_as_many_as_transformers(count):
    """The sum reaches 1 - top_p exactly at a token, or not, by the last bit of float32."""
    row = torch.full((64,), -torch.inf)
    row[torch.randperm(64)[:count]] = 1.5
    top_p = [i / 20 for i in range(1, 20)] + [i / count for i in range(1, count)]
    for k in (0, 1, 2, count, 50):
        rows = row.expand(len(top_p), -1)
        ours = apply_top(rows, [k] * len(top_p), top_p)
        theirs = torch.stack([hf_filters(row, top_k=k, top_p=p) for p in top_p])
        assert_same_filter(ours, theirs, rows)


def test_tokens_equal_to_the_kth_all_stay_and_count_in_top_p():
    """Only two candidates are looked at, and top_p 0.75 must still see all five."""
    row = torch.tensor([2.0, 1.0, 3.0, 2.0, 2.0, 0.0, 2.0]).log()
    (by_k, by_both) = apply_top(row.expand(2, -1), [2, 2], [1.0, 0.75])
    assert by_k.isfinite().tolist() == [True, False, True, True, True, False, True]
    # Ascending 2 2 2 2 3 of 11: the first is dropped at 2/11, the second would be at 4/11 > 0.25.
    assert by_both.isfinite().tolist() == [True, False, True, True, True, False, False]


def test_large_top_k_is_sorted_and_equals_transformers():
    rows = make_logits(6, 5000, ties=True)
    top_k, top_p = [2000, 1025, 1024, 3, 4999, 0], [1.0, 0.9, 0.9, 0.9, 0.5, 1.0]
    plan = op.plan_top(top_k, top_p, 5000)
    assert plan.num_candidates == 1024 and plan.sorted_rows.tolist() == [0, 1, 4]
    settings = zip(rows, top_k, top_p, strict=True)
    theirs = torch.stack([hf_filters(r, top_k=k, top_p=p) for r, k, p in settings])
    assert_same_filter(apply_top(rows, top_k, top_p), theirs, rows)


def test_filters_over_qwen3s_vocabulary_equal_transformers():
    rows = make_logits(4, 151_936)
    settings = [(0.0, 20, 0.95), (0.05, 0, 0.9), (0.0, 0, 1e-9), (1e-4, 500, 1.0)]
    min_p, top_k, top_p = zip(*settings, strict=True)
    ours = rows.clone()
    params = LogitsParams(
        torch.ones(4), min_p=torch.tensor(min_p), **top_params(top_k, top_p, 151_936)
    )
    op.process_logits(ours, params)
    theirs = torch.stack([hf_filters(r, *s) for r, s in zip(rows, settings, strict=True)])
    assert_same_filter(ours, theirs, rows)


def test_no_row_is_sorted_that_does_not_need_it(monkeypatch):
    sorted_shapes = []
    sort = torch.Tensor.sort

    def record(x, *args, **kwargs):
        sorted_shapes.append(tuple(x.shape))
        return sort(x, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "sort", record)
    rows = make_logits(5, 3000)
    apply_top(rows, [5, 0, 50, 0, 1024], [0.5, 1.0, 1.0, 1.0, 0.9])
    assert not sorted_shapes
    apply_top(rows, [5, 0, 50, 0, 1024], [0.5, 0.5, 1.0, 1.0, 0.9])
    assert sorted_shapes == [(1, 3000)]
    monkeypatch.setattr(torch.Tensor, "topk", None)
    apply_top(rows, [0] * 5, [1.0] * 5)


# -- temperature, penalties ------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e-5, 0.3, 1.0, 7.0])
def test_temperature_equals_transformers(temperature):
    rows = make_logits(9, 33)
    ours = rows.clone()
    op.scale_by_temperature(ours, torch.full((9,), temperature))
    assert torch.equal(ours, hf.TemperatureLogitsWarper(temperature)(NONE, rows))


def make_history(num_rows, vocab, width=50):
    """Rows of all lengths, 1 to width, and tokens that no vocabulary has after them."""
    lens = torch.linspace(1, width, num_rows).int()
    prompt_lens = (lens * torch.rand(num_rows)).int()
    token_ids = torch.randint(0, vocab, (num_rows, width), dtype=torch.int32)
    is_garbage = torch.arange(width) >= lens[:, None]
    return History(token_ids.masked_fill(is_garbage, 2**31 - 1), prompt_lens, lens)


def make_penalties(num_rows):
    return Penalties(
        torch.empty(num_rows).uniform_(-2, 2),
        torch.empty(num_rows).uniform_(-2, 2),
        torch.empty(num_rows).uniform_(0.3, 3),
    )


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("penalty", [0.4, 1.0, 1.3])
def test_repetition_penalty_equals_transformers(vocab, penalty):
    rows, history = make_logits(12, vocab), make_history(12, vocab)
    ours = rows.clone()
    zeros = torch.zeros(12)
    op.apply_penalties(ours, history, Penalties(zeros, zeros, torch.full((12,), penalty)))
    for row, x, ids, length in zip(rows, ours, history.token_ids, history.lens, strict=True):
        theirs = hf.RepetitionPenaltyLogitsProcessor(penalty)(ids[None, :length].long(), row[None])
        assert torch.equal(x, theirs[0])


@pytest.mark.parametrize("vocab", VOCABS)
def test_penalties_follow_their_definition(vocab):
    rows, history, penalties = make_logits(12, vocab), make_history(12, vocab), make_penalties(12)
    ours = rows.clone()
    op.apply_penalties(ours, history, penalties)
    for i, x in enumerate(rows.clone()):
        prompt_len, length = int(history.prompt_lens[i]), int(history.lens[i])
        ids = history.token_ids[i, :length].tolist()
        presence, frequency, repetition = (values[i] for values in penalties)
        for token in set(ids):
            x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        for token in set(ids[prompt_len:]):
            x[token] -= frequency * ids[prompt_len:].count(token)
            x[token] -= presence
        torch.testing.assert_close(ours[i], x, rtol=0, atol=0)


def test_long_history_counts_exactly():
    history = History(torch.full((1, 70_000), 3), torch.tensor([100]), torch.tensor([70_000]))
    x = torch.zeros(1, 5)
    penalties = Penalties(torch.zeros(1), torch.full((1,), 2.0**-10), torch.ones(1))
    op.apply_penalties(x, history, penalties)
    assert x.tolist() == [[0, 0, 0, -69_900 / 1024, 0]]


# -- biases and bans -------------------------------------------------------------------------------


def test_bias_equals_transformers_and_entries_for_a_token_add_up():
    rows = make_logits(3, 33)
    entries = [(0, 5, 2.5), (0, 32, -4.0), (2, 5, 1.0)]
    ours = rows.clone()
    op.add_biases(ours, Biases(*map(torch.tensor, zip(*entries, strict=True))))
    for i in range(3):
        bias = {(token,): value for row, token, value in entries if row == i}
        theirs = hf.SequenceBiasLogitsProcessor(bias)(NONE, rows[i : i + 1])[0] if bias else rows[i]
        assert torch.equal(ours[i], theirs)
    twice = torch.tensor([1, 1, 1]), torch.tensor([4, 4, 6]), torch.tensor([1.0, -torch.inf, 2.0])
    op.add_biases(ours, Biases(*twice))
    assert ours[1, 4] == -torch.inf and ours[1, 6] == rows[1, 6] + 2


def reference_bad_words(output, sequences):
    """vLLM's scope: a sequence counts if the output ends with all but its last token."""
    return {s[-1] for s in sequences if len(s) == 1 or output[-(len(s) - 1) :] == s[:-1]}


def apply_bad_words(x, history, sequences):
    y = x.clone()
    op.add_biases(y, op.find_bad_words(history, op.pack_bad_words(sequences)))
    return y


def test_bad_words_ban_the_last_token_of_what_the_output_would_complete():
    vocab, rows = 3, make_logits(200, 3)
    history = make_history(200, vocab, width=12)
    sequences = [
        [torch.randint(0, vocab, (1 + i % 4,)).tolist() for i in range(row % 7)]
        for row in range(200)
    ]
    ours = apply_bad_words(rows, history, sequences)
    num_bans = num_longer = 0
    for i, (token_ids, prompt_len, length) in enumerate(zip(*history, strict=True)):
        output = token_ids[prompt_len:length].tolist()
        banned = reference_bad_words(output, sequences[i])
        num_bans += len(banned)
        num_longer += len(banned - {s[0] for s in sequences[i] if len(s) == 1})
        assert set((ours[i] == -torch.inf).nonzero().flatten().tolist()) == banned
        kept = ours[i] > -torch.inf
        assert torch.equal(ours[i][kept], rows[i][kept])
    assert num_bans > 200 and num_longer > 20


def test_bad_words_equal_transformers_where_there_is_no_prompt():
    """Both scopes are then one."""
    rows, history = make_logits(60, 3), make_history(60, 3, width=12)
    history = history._replace(prompt_lens=torch.zeros_like(history.lens))
    sequences = [[torch.randint(0, 3, (1 + i,)).tolist() for i in range(4)] for _ in range(60)]
    ours = apply_bad_words(rows, history, sequences)
    num_compared = 0
    for i, (token_ids, length) in enumerate(zip(history.token_ids, history.lens, strict=True)):
        if length >= 4:  # some versions ignore a sequence that is as long as the text would be
            processor = hf.NoBadWordsLogitsProcessor(sequences[i])
            theirs = processor(token_ids[None, :length].long(), rows[None, i])
            assert torch.equal(ours[i], theirs[0])
            num_compared += 1
    assert num_compared > 30


def test_bad_word_that_begins_in_the_prompt_is_allowed():
    history = History(torch.tensor([[1, 2, 3]] * 2), torch.tensor([2, 1]), torch.tensor([3, 3]))
    ours = apply_bad_words(torch.zeros(2, 6), history, [[[2, 3, 4]], [[2, 3, 4]]])
    assert ours[0].isfinite().all() and ours[1].isfinite().tolist() == [True] * 4 + [False, True]


def test_no_bad_words_and_single_tokens():
    history = make_history(2, 9)
    x = make_logits(2, 9)
    assert torch.equal(apply_bad_words(x, history, [[], []]), x)
    banned = apply_bad_words(x, history, [[], [[4], [4], [0]]])
    assert (~banned.isfinite()).nonzero().tolist() == [[1, 0], [1, 4]]


@pytest.mark.parametrize("vocab", VOCABS)
def test_allowed_tokens_and_bitmask_leave_the_same(vocab):
    x = make_logits(5, vocab)
    allowed = torch.rand(5, vocab) < 0.3
    allowed[2], allowed[3, vocab - 1] = True, True
    rows, token_ids = allowed.nonzero().T
    is_other = rows != 2  # without entries
    by_ids = x.clone()
    op.keep_allowed(by_ids, rows[is_other].repeat(2), token_ids[is_other].repeat(2))
    has_entries = allowed.any(1) & (torch.arange(5) != 2)
    expected = x.masked_fill(~allowed & has_entries[:, None], -torch.inf)
    assert torch.equal(by_ids, expected)
    padded = torch.nn.functional.pad(allowed, (0, -vocab % 32), value=False)
    words = (padded.view(5, -1, 32).long() << torch.arange(32)).sum(-1)
    by_bits = x.clone()
    op.apply_bitmask(by_bits, words.int())
    assert torch.equal(by_bits, x.masked_fill(~allowed, -torch.inf))


# -- all of it -------------------------------------------------------------------------------------


def make_params(num_rows, vocab, rows=None, device="cpu"):
    """Everything at once, in every row another mix; or the same for some of these rows."""
    generator = torch.Generator().manual_seed(4)
    picks = torch.randint(0, 1 << 20, (num_rows, 5), generator=generator).tolist()
    index = list(range(num_rows)) if rows is None else rows
    top_k, top_p, min_p, temperatures = (
        [values[picks[i][column] % len(values)] for i in index]
        for column, values in enumerate((TOP_K, TOP_P, MIN_P, [0.0, 0.5, 1.0, 1.7]))
    )
    history = make_history(num_rows, vocab)
    plan = op.plan_top(top_k, top_p, vocab)
    if plan.sorted_rows is not None:
        plan = plan._replace(sorted_rows=plan.sorted_rows.to(device))
    entries = [(n, picks[i][4] % vocab, 3.0) for n, i in enumerate(index) if i % 3]
    columns = [torch.tensor(c) for c in zip(*entries, strict=True)]
    words = [[[picks[i][3] % vocab], [1 % vocab, 2 % vocab]] if i % 4 == 1 else [] for i in index]
    bits = torch.randint(-(2**31), 2**31, (num_rows, -(-vocab // 32)), generator=generator)
    bits[::2] = -1

    def to(values):
        return type(values)(*(tensor.to(device) for tensor in values))

    return LogitsParams(
        torch.tensor(temperatures).to(device),
        to(History(*(tensor[index] for tensor in history))),
        to(Biases(*columns)) if entries else None,
        to(op.pack_bad_words(words)),
        bitmask=bits.int()[index].to(device),
        penalties=to(Penalties(*(values[index] for values in make_penalties(num_rows)))),
        min_p=torch.tensor(min_p).to(device),
        top_k=torch.tensor(top_k).to(device),
        top_p=torch.tensor(top_p, dtype=torch.float64).to(device),
        top_plan=plan,
    )


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("ties", [False, True])
def test_a_row_does_not_depend_on_its_batch(vocab, ties, monkeypatch):
    """Bit by bit, alone and beside others, in one chunk or in many."""
    x = make_logits(60, vocab, ties)
    together = x.clone()
    torch.manual_seed(1)
    draw_at = op.process_logits(together, make_params(60, vocab))
    monkeypatch.setattr(op, "MAX_CHUNK", 7 * vocab)
    for rows in [[i] for i in range(60)] + [list(range(60)), list(range(59, 20, -1))]:
        some = x[rows]
        torch.manual_seed(1)
        assert torch.equal(op.process_logits(some, make_params(60, vocab, rows)), draw_at[rows])
        assert torch.equal(some, together[rows])


@pytest.mark.parametrize("vocab", VOCABS)
def test_everything_off_leaves_every_bit(vocab):
    x = make_logits(6, vocab)
    x[0, 0], x[1] = -0.0, -torch.inf
    ones, zeros = torch.ones(6), torch.zeros(6)
    params = LogitsParams(
        torch.tensor([0.0, 1.0] * 3),
        make_history(6, vocab),
        bitmask=torch.full((6, -(-vocab // 32)), -1, dtype=torch.int32),
        penalties=Penalties(zeros, zeros, ones),
        min_p=zeros,
        top_k=torch.tensor([0, vocab, 10**9, 0, 0, 0]),
        top_p=ones.double(),
        top_plan=op.plan_top([0, vocab, 10**9, 0, 0, 0], [1.0] * 6, vocab),
    )
    y = x.clone()
    assert op.process_logits(y, params).tolist() == [0, 1] * 3
    assert torch.equal(y.view(torch.int32), x.view(torch.int32))


def test_steps_come_in_the_documented_order():
    """A composition of transformers' processors, in the order of the module's docstring."""
    vocab, settings = 300, (0.02, 30, 0.8)
    rows, history = make_logits(20, vocab), make_history(20, vocab)
    zeros = torch.zeros(20)
    params = LogitsParams(
        torch.full((20,), 1.5),
        history,
        Biases(torch.arange(20), torch.arange(20), torch.full((20,), 5.0)),
        penalties=Penalties(zeros, zeros, torch.full((20,), 1.4)),
        min_p=torch.full((20,), settings[0]),
        **top_params([settings[1]] * 20, [settings[2]] * 20, vocab),
    )
    ours = rows.clone()
    op.process_logits(ours, params)
    theirs, before = [], []
    for i, x in enumerate(rows):
        ids = history.token_ids[None, i, : history.lens[i]].long()
        x = hf.SequenceBiasLogitsProcessor({(i,): 5.0})(ids, x[None])
        x = hf.RepetitionPenaltyLogitsProcessor(1.4)(ids, x)
        before.append(hf.TemperatureLogitsWarper(1.5)(ids, x)[0])
        theirs.append(hf_filters(before[-1], *settings))
    assert_same_filter(ours, torch.stack(theirs), torch.stack(before))


def test_broken_rows_stay_broken_whatever_hides_their_numbers():
    """Never token 0: the draw sees a NaN, or no finite logit at all."""
    x = make_logits(12, 300)
    x[1, 7], x[3, 7], x[5], x[7, 7] = torch.nan, torch.inf, torch.nan, torch.nan
    x[7, 8] = torch.inf
    bitmask = torch.full((12, 10), -1, dtype=torch.int32)
    bitmask[1, 0] = bitmask[3, 0] = ~(1 << 7)  # the very token that is broken
    bitmask[9] = 0  # nothing is left
    bans = [(11, token, -torch.inf) for token in range(300)]
    top_k, top_p = [0, 0, 5, 5] * 3, [0.9, 0.9, 0.9, 1.0] * 3
    params = LogitsParams(
        torch.tensor([1.0, 0.0, 0.7] * 4),
        make_history(12, 300),
        Biases(*map(torch.tensor, zip(*bans, strict=True))),
        bitmask=bitmask,
        penalties=make_penalties(12),
        min_p=torch.full((12,), 0.1),
        **top_params(top_k, top_p, 300),
    )
    draw_at = op.process_logits(x, params)
    tokens = sample(x, draw_at, torch.arange(12), torch.arange(12))
    assert (tokens == -1).tolist() == [False, True] * 6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draw_skips_tiles_without_a_token(temperature):
    """The draw works in tiles of 128 logits, most of which a filter empties."""
    x = torch.full((300, 1000), -torch.inf)
    x[:, 777] = -3.0
    x[:, 130] = torch.linspace(-40, 0, 300)
    tokens = sample(x, torch.full((300,), temperature), torch.arange(300), torch.arange(300))
    assert set(tokens.tolist()) == {130, 777}


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [33, 1000, 151_936])
def test_gpu_equals_cpu_without_waiting_for_the_device(vocab):
    """Up to rounding: at most one token at an edge of a filter may differ in a row."""
    x = make_logits(40, vocab)
    on_gpu = x.cuda()
    torch.manual_seed(1)
    on_cpu_params = make_params(40, vocab)
    torch.manual_seed(1)
    params = make_params(40, vocab, device="cuda")
    allowed = torch.arange(40, device="cuda"), torch.arange(40, device="cuda") % vocab
    op.process_logits(x, on_cpu_params)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        op.process_logits(on_gpu, params)
        op.keep_allowed(on_gpu.clone(), *allowed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    kept, kept_gpu = x.isfinite(), on_gpu.isfinite().cpu()
    assert int((kept != kept_gpu).sum(1).max()) <= 1 and int((kept != kept_gpu).sum()) <= 4
    both = kept & kept_gpu
    torch.testing.assert_close(on_gpu.cpu()[both], x[both])
