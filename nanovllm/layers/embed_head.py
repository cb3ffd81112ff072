"""Token embedding and LM head, split over the ranks by vocabulary.

Owns the vocabulary's padding: each of several ranks holds the same number of rows, a multiple of
the sampler's tile, so that a draw does not depend on the number of ranks. 300 tokens on 2 ranks are
256 and 44, and 212 rows of padding. Padding has no token id, so it is never looked up, and its
logits are cut off, so it is never sampled.
"""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels import sample
from nanovllm.layers.collectives import gather_columns, sum_rows
from nanovllm.layers.linear import ShardId, make_parameter
from nanovllm.utils import distributed


class VocabParallelEmbedding(nn.Module):
    """Each rank looks up the tokens it holds; the sum over ranks is the embedding."""

    def __init__(
        self, vocab_size: int, hidden_size: int, tied_weight: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        # As it is now: another engine of this process may form a group later.
        self.tp_size = distributed.tp_size()
        self.num_rows = vocab_size
        if self.tp_size > 1:
            self.num_rows = -(-vocab_size // (self.tp_size * sample.TILE)) * sample.TILE
        self.first_row = distributed.tp_rank() * self.num_rows
        if tied_weight is None:
            tied_weight = make_parameter(
                (self.num_rows, hidden_size), {None: (vocab_size, hidden_size)}, self.load_shard
            )
        self.weight = tied_weight

    def load_shard(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copy this rank's rows and clear the padding after them.

        loaded: float [vocab_size, hidden_size] the checkpoint's tensor
        """
        rows = loaded[self.first_row : self.first_row + self.num_rows]
        param.data[: rows.size(0)].copy_(rows)
        param.data[rows.size(0) :].zero_()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: int64 [num_tokens]; returns float [num_tokens, hidden_size]."""
        if self.tp_size == 1:
            return F.embedding(input_ids, self.weight)
        local_ids = input_ids - self.first_row
        is_elsewhere = (local_ids < 0) | (local_ids >= self.num_rows)
        embeddings = F.embedding(local_ids.masked_fill(is_elsewhere, 0), self.weight)
        embeddings = embeddings.masked_fill_(is_elsewhere.unsqueeze(-1), 0.0)
        return sum_rows(lambda rows, out: out.copy_(embeddings[rows]), embeddings)


class ParallelLMHead(VocabParallelEmbedding):
    """The same rows read as output weights; `tied_weight` is the embedding's parameter."""

    @property
    def num_tokens(self) -> int:
        """How many of this rank's rows are tokens; the rest is padding."""
        return max(0, min(self.num_rows, self.vocab_size - self.first_row))

    def forward(self, hidden_states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden_states: float [n, hidden_size]; returns this rank's logits, [n, num_rows]."""
        if out is None:
            return F.linear(hidden_states, self.weight)
        return torch.mm(hidden_states, self.weight.t(), out=out)

    def gather(self, logits: torch.Tensor) -> torch.Tensor | None:
        """All logits, float [n, vocab_size], on rank 0 from each rank's; None on the others."""
        if self.tp_size == 1:
            return logits
        joined = gather_columns(logits)
        return None if joined is None else joined[:, : self.vocab_size]
