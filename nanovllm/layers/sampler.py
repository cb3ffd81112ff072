"""Choose each sequence's next token from its logits.

Owns the choice of the cheaper way for a batch of greedy rows; the draw itself is kernels/sample.py.
"""

import torch
from torch import nn

from nanovllm.kernels.sample import sample


class Sampler(nn.Module):
    """Greedy where the temperature is 0, elsewhere one draw from softmax(logits / temperature)."""

    def forward(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        all_greedy: bool = False,
    ) -> torch.Tensor:
        """One token per row, without waiting for the device.

        logits: float [num_rows, vocab_size], not changed
        temperatures: float32 [num_rows], 0 for greedy
        seeds: int64 [num_rows], positions: int32 [num_rows]; together they name the row's draw, so
            that it depends neither on the batch nor on how the sequence came to this point
        all_greedy: the caller knows that all temperatures are 0
        returns: int64 [num_rows], -1 for a row that broken numerics left without a finite maximum
        """
        if all_greedy and not logits.is_cuda:
            max_logits, token_ids = logits.max(-1)
            return token_ids.masked_fill(~max_logits.isfinite(), -1)
        return sample(logits, temperatures, seeds, positions)
