"""Choose each sequence's next token from its logits.

Owns the choice of the cheaper way for a batch of greedy rows; the draw itself is kernels/sample.py.
"""

import torch
from torch import nn

from nanovllm.kernels.sample import sample
from nanovllm.layers.collectives import best_of_ranks
from nanovllm.utils import distributed


class Sampler(nn.Module):
    """Greedy where the temperature is 0, elsewhere one draw from softmax(logits / temperature).

    Each rank draws from the part of the vocabulary that it holds; the draw that won its race with
    the largest value is the draw from all of it, so that a number and a token a row are exchanged.
    """

    def __init__(self, first_token: int = 0, num_tokens: int | None = None) -> None:
        """first_token, num_tokens: of this rank's part; logits may have padding behind it."""
        super().__init__()
        self._first_token, self._num_tokens = first_token, num_tokens
        # As it is now: another engine of this process may form a group later.
        self._is_alone = distributed.tp_size() == 1

    def forward(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        all_greedy: bool = False,
    ) -> torch.Tensor:
        """One token per row, without waiting for the device.

        logits: float [num_rows, this rank's width], not changed
        temperatures: float32 [num_rows], 0 for greedy
        seeds: int64 [num_rows], positions: int32 [num_rows]; together they name the row's draw, so
            that it depends neither on the batch nor on how the sequence came to this point
        all_greedy: the caller knows that all temperatures are 0
        returns: int64 [num_rows], -1 for a row that broken numerics left without a finite maximum;
            the same on every rank
        """
        if self._is_alone:
            if all_greedy and not logits.is_cuda:
                max_logits, token_ids = logits.max(-1)
                return token_ids.masked_fill(~max_logits.isfinite(), -1)
            return sample(logits, temperatures, seeds, positions)
        logits = logits[:, : self._num_tokens]
        values = torch.full((len(logits),), -torch.inf, device=logits.device)
        if logits.numel():
            tokens = sample(
                logits, temperatures, seeds, positions, values=values, first_token=self._first_token
            )
        else:  # a vocabulary so small that none of it is here
            tokens = torch.full_like(seeds, -1)
        return best_of_ranks(values, tokens)
