"""Token embedding and LM head, split over the ranks by vocabulary.

Owns the vocabulary's padding: when it does not divide by the number of ranks it is padded to the
next multiple, 10 tokens on 4 ranks being 3 + 3 + 3 + 1 and two rows of padding. Padding has no
token id, so it is never looked up, and its logits are cut off, so it is never sampled.
"""

import torch
import torch.nn.functional as F
from torch import nn

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
        self.num_rows = -(-vocab_size // self.tp_size)
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
        embeddings = embeddings.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        return distributed.all_reduce(embeddings)


class ParallelLMHead(VocabParallelEmbedding):
    """The same rows read as output weights; `tied_weight` is the embedding's parameter."""

    def forward(  # type: ignore[override]  # ids in for the embedding, hidden states in for this
        self, hidden_states: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """hidden_states: float [num_rows, hidden_size]; returns [num_rows, vocab_size] on rank
        0, None on the others."""
        if self.tp_size == 1:
            if out is None:
                return F.linear(hidden_states, self.weight)
            return torch.mm(hidden_states, self.weight.t(), out=out)
        logits = distributed.gather_to_rank0(F.linear(hidden_states, self.weight))
        if logits is None or out is None:
            return None if logits is None else logits[:, : self.vocab_size]
        return out.copy_(logits[:, : self.vocab_size])
