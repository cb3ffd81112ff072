"""transformers' side of the request parameters, for tests: its generate with its own processors,
its warpers in the engine's order, and its log-probabilities."""

from collections import defaultdict

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanovllm import SamplingParams
from tests.parity import PLAIN_ARGMAX


@torch.inference_mode()
def hf_generate(
    model, prompts, num_tokens, eos_token_ids=(), make_processor=None, **kwargs
) -> list[list[int]]:
    """Greedy tokens of each prompt, up to and with its first EOS; kwargs are generate's.

    Prompts of one length share a call: padding would count in the penalties.
    """
    by_len = defaultdict(list)
    for i, prompt in enumerate(prompts):
        by_len[len(prompt)].append(i)
    found: dict[int, list[int]] = {}
    for indices in by_len.values():
        ids = torch.tensor([prompts[i] for i in indices])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            eos_token_id=list(eos_token_ids) or None,
            logits_processor=LogitsProcessorList([make_processor()] if make_processor else []),
            **PLAIN_ARGMAX,
            **kwargs,
        )
        for i, row in zip(indices, out[:, ids.size(1) :].tolist(), strict=True):
            ends = [at for at, token in enumerate(row) if token in eos_token_ids]
            found[i] = row[: ends[0] + 1] if ends else row
    return [found[i] for i in range(len(prompts))]


class OutputPenalties(LogitsProcessor):
    """presence and frequency penalty as their definition says, token by token; for one call."""

    def __init__(self, presence: float, frequency: float) -> None:
        self.presence, self.frequency = presence, frequency
        self.prompt_len: int | None = None

    def __call__(self, input_ids, scores):
        if self.prompt_len is None:
            self.prompt_len = input_ids.size(1)
        scores = scores.clone()
        for row, ids in zip(scores, input_ids[:, self.prompt_len :].tolist(), strict=True):
            for token in set(ids):
                row[token] -= self.frequency * ids.count(token) + self.presence
        return scores


def warp(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """float32 [n, vocab] -> what transformers' warpers leave of it, in the engine's order."""
    warpers = [TemperatureLogitsWarper(params.temperature)]
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    for warper in warpers:
        logits = warper(None, logits)
    return logits


@torch.inference_mode()
def hf_logprobs(model, token_ids: list[int]) -> torch.Tensor:
    """float32 [len(token_ids), vocab]: row i is the distribution of the token after token i."""
    return model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)


def assert_logprobs_equal(listed, token_ids, expected, k, tokenizer) -> None:
    """One dict a token, as Logprobs of the engine: value, rank, decoded text, and the top k.

    expected: float32 [len(token_ids), vocab]
    """
    assert len(listed) == len(token_ids) == len(expected)
    order = expected.sort(dim=1, descending=True, stable=True).indices
    ranks = (order.argsort(1) + 1).numpy()
    order, expected = order.numpy(), expected.numpy()
    for i, (entries, token) in enumerate(zip(listed, token_ids, strict=True)):
        assert list(entries) == list(dict.fromkeys([token, *order[i, :k].tolist()]))
        for token_id, entry in entries.items():
            assert abs(entry.logprob - expected[i, token_id]) < 1e-4
            assert entry.rank == ranks[i, token_id]
            assert entry.decoded_token == tokenizer.decode([token_id])
