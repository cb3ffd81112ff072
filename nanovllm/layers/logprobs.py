"""Log-probabilities to report: of a token, its rank, and of the k most probable tokens.

They are those of the model's own distribution, before temperature, penalties and filters, as vLLM's
default. Owns how many rows are expanded to float32 at a time.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

MAX_CHUNK = 1 << 22  # logits whose float32 and int64 copies live at a time: 27 rows of 151,936
PROMPT_CHUNK = 256  # prompt tokens whose logits live at a time


class Logprobs(NamedTuple):
    token_logprobs: torch.Tensor  # float32 [n]; NaN where the row is broken or has no token
    ranks: torch.Tensor  # int32 [n] number of tokens at least as probable as it: 1 is the best
    top_ids: torch.Tensor  # int32 [n, k] from the most probable on, of equal ones the lowest first
    top_logprobs: torch.Tensor  # float32 [n, k]


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int = 0
) -> Logprobs:
    """log_softmax(logits) of one token a row and of the k = num_logprobs best, at most vocab.

    logits: float [n, vocab], as the model gave them
    token_ids: int [n], -1 where the draw found the row broken
    """
    num_rows = max(MAX_CHUNK // logits.size(1), 1)
    pairs = zip(logits.split(num_rows), token_ids.split(num_rows), strict=True)
    return _concatenate([_gather(x, ids, num_logprobs) for x, ids in pairs])


def prompt_logprobs(
    hidden_states: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor | None],
    next_token_ids: torch.Tensor,
    num_logprobs: int = 0,
) -> Logprobs | None:
    """`gather_logprobs` of the prompt's tokens without ever holding [t, vocab] logits.

    hidden_states: float [t, hidden], the last layer's, of t tokens of a prompt
    compute_logits: the LM head, float [rows, hidden] -> float [rows, vocab]; it may give None, as
        on all ranks but the first of a tensor-parallel group, and then so does this function
    next_token_ids: int [t], the token that follows each of the t
    """
    pairs = zip(hidden_states.split(PROMPT_CHUNK), next_token_ids.split(PROMPT_CHUNK), strict=True)
    chunks = ((compute_logits(states), ids) for states, ids in pairs)
    parts = [gather_logprobs(x, ids, num_logprobs) for x, ids in chunks if x is not None]
    return _concatenate(parts) if parts else None


def prompt_logprobs_of_pieces(
    hidden_states: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor | None],
    next_token_ids: torch.Tensor,
    lens: list[int],
    nums_logprobs: list[int],
) -> list[Logprobs]:
    """`prompt_logprobs` of the pieces, back to back, of so many tokens each, whose number is not
    negative; none on the ranks where it gives None."""
    pieces = zip(hidden_states.split(lens), next_token_ids.split(lens), nums_logprobs, strict=True)
    found = [prompt_logprobs(x, compute_logits, ids, num) for x, ids, num in pieces if num >= 0]
    return [part for part in found if part is not None]


def _gather(logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int) -> Logprobs:
    logprobs = logits.float().log_softmax(1)
    ids = token_ids.long()[:, None]
    token_logprobs = logprobs.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, torch.nan)
    ranks = (logprobs >= token_logprobs).sum(1, dtype=torch.int32)
    best = ids[:, :0]
    if num_logprobs:
        # The bits of a float32 without a sign ascend with it, and the token id below them settles
        # ties: torch.topk alone leaves them to the device and to the size of the batch.
        columns = torch.arange(logits.size(1), device=logits.device)
        keys = (logprobs.abs().view(torch.int32).long() << 32) + columns
        best = keys.topk(min(num_logprobs, logits.size(1)), largest=False).values & 0xFFFFFFFF
    return Logprobs(token_logprobs[:, 0], ranks, best.int(), logprobs.gather(1, best))


def _concatenate(parts: list[Logprobs]) -> Logprobs:
    return Logprobs(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
