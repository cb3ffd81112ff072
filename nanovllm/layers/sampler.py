"""Choose each sequence's next token from its logits.

Owns the draw. Knows rows, temperatures and a generator; not what a row belongs to.
"""

import torch
from torch import nn

# Rows are drawn in slices so that the fp32 copies stay this small next to a full K/V pool.
MAX_SCRATCH_BYTES = 64 * 2**20


class Sampler(nn.Module):
    """Greedy at temperature 0; elsewhere the exponential race argmax(softmax(x / T) / Exp(1))."""

    def forward(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        generator: torch.Generator | None = None,
        all_greedy: bool = False,
    ) -> torch.Tensor:
        """One token per row, without waiting for the device.

        logits: float [num_rows, vocab_size], not changed
        temperatures: float32 [num_rows], 0 for greedy
        generator: on the logits' device; None: its default one
        all_greedy: the caller knows that all temperatures are 0
        returns: int64 [num_rows], -1 for a row that broken numerics left without a finite maximum
        """
        max_logits, token_ids = logits.max(-1)
        if not all_greedy:
            drawn = self._draw(logits, max_logits, temperatures, generator)
            token_ids = torch.where(temperatures == 0, token_ids, drawn)
        return token_ids.masked_fill(~max_logits.isfinite(), -1)

    def _draw(
        self,
        logits: torch.Tensor,
        max_logits: torch.Tensor,
        temperatures: torch.Tensor,
        generator: torch.Generator | None,
    ) -> torch.Tensor:
        """int64 [num_rows], drawn from softmax(logits / temperatures)."""
        # Greedy rows are drawn too and thrown away: no row can be picked without a device wait.
        divisors = temperatures.masked_fill(temperatures == 0, 1.0)
        # Two fp32 copies of a slice are alive at once.
        slice_size = max(1, MAX_SCRATCH_BYTES // (8 * logits.size(-1)))
        drawn = []
        for start in range(0, logits.size(0), slice_size):
            rows = slice(start, start + slice_size)
            # Below the maximum, all scores are at most 0, and the smallest temperature is greedy.
            scores = logits[rows] - max_logits[rows, None].float()
            scores.div_(divisors[rows, None])
            # The race in logarithms: p / e is largest where log p - log e is, and softmax's
            # denominator is the same for the whole row. 0 is not drawn from Exp(1) but by rounding.
            noise = torch.empty_like(scores).exponential_(generator=generator)
            drawn.append(scores.sub_(noise.clamp_min_(1e-10).log_()).argmax(-1))
        return torch.cat(drawn)
