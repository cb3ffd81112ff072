"""Reported log-probabilities: those of the raw distribution, however the rows are cut."""

import pytest
import torch

from nanovllm.layers import logprobs as op
from nanovllm.layers.logprobs import gather_logprobs, prompt_logprobs


def check(result, logits, token_ids, k):
    """Against log_softmax in float64 and a sort of (log-probability, token id)."""
    exact = logits.double().log_softmax(-1)
    single = logits.float().log_softmax(-1)
    rows = range(len(logits))
    torch.testing.assert_close(
        result.token_logprobs.double(), exact[rows, token_ids.long()], rtol=1e-6, atol=2e-6
    )
    ranks = [int((row >= row[token]).sum()) for row, token in zip(single, token_ids, strict=True)]
    assert result.ranks.tolist() == ranks
    for i, row in enumerate(single.tolist()):
        best = sorted(range(len(row)), key=lambda token: (-row[token], token))[:k]
        assert result.top_ids[i].tolist() == best
        assert result.top_logprobs[i].tolist() == [row[token] for token in best]
    assert [t.dtype for t in result] == [torch.float32, torch.int32, torch.int32, torch.float32]


@pytest.mark.parametrize("vocab", [1, 31, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [0, 1, 20])
def test_equal_to_log_softmax(vocab, dtype, k):
    """bf16 brings the ties that real logits have."""
    logits = (4 * torch.randn(30, vocab)).to(dtype)
    token_ids = torch.randint(0, vocab, (30,), dtype=torch.int32)
    result = gather_logprobs(logits, token_ids, k)
    assert result.top_ids.shape == result.top_logprobs.shape == (30, min(k, vocab))
    check(result, logits, token_ids, k)


def test_best_token_has_rank_1_and_the_greedy_one_leads_among_equals():
    logits = torch.randn(50, 400).round()
    greedy = logits.argmax(-1)
    result = gather_logprobs(logits, greedy, 3)
    assert torch.equal(result.top_ids[:, 0].long(), greedy)
    assert torch.equal(result.token_logprobs, result.top_logprobs[:, 0])
    assert torch.equal(result.ranks, (logits == logits.amax(-1, keepdim=True)).sum(-1).int())
    assert gather_logprobs(torch.eye(4), torch.arange(4)).ranks.tolist() == [1] * 4


@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_no_more_than_a_chunk_is_expanded_and_chunks_do_not_show(num_rows, monkeypatch):
    logits, token_ids = torch.randn(num_rows, 100), torch.arange(num_rows)
    whole = gather_logprobs(logits, token_ids, 4)
    sizes = []
    gather = op._gather
    monkeypatch.setattr(op, "_gather", lambda x, *args: sizes.append(x.shape) or gather(x, *args))
    monkeypatch.setattr(op, "MAX_CHUNK", 399)
    parts = gather_logprobs(logits, token_ids, 4)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert all(shape[0] <= 3 for shape in sizes) and sum(s[0] for s in sizes) == num_rows


def test_broken_rows_and_rows_without_a_token_are_nan():
    logits = torch.randn(4, 50)
    logits[1, 3], logits[2, 3] = torch.nan, torch.inf
    result = gather_logprobs(logits, torch.tensor([5, -1, 6, -1]), 2)
    assert result.token_logprobs.isnan().tolist() == [False, True, True, True]
    assert result.top_logprobs[3].isfinite().all() and result.top_logprobs[1].isnan().all()


def test_masked_tokens_come_last():
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    result = gather_logprobs(logits, torch.tensor([1]), 5)
    assert result.top_ids.tolist() == [[2, 0, 1]] and result.ranks.tolist() == [3]
    assert result.token_logprobs.tolist() == [-torch.inf]


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 700])
def test_prompt_runs_the_head_in_pieces(length):
    head = torch.randn(60, 16)
    states, token_ids = torch.randn(length, 16), torch.randint(0, 60, (length,))
    sizes = []

    def compute_logits(part):
        sizes.append(len(part))
        return part @ head.T

    result = prompt_logprobs(states, compute_logits, token_ids, 5)
    assert max(sizes) <= op.PROMPT_CHUNK and sum(sizes) == length
    logits = torch.cat([part @ head.T for part in states.split(op.PROMPT_CHUNK)])
    check(result, logits, token_ids, 5)


def test_rank_without_logits_gets_none():
    states, token_ids = torch.randn(300, 4), torch.zeros(300, dtype=torch.int64)
    assert prompt_logprobs(states, lambda part: None, token_ids, 5) is None
