"""DecodeGraphs: capture and replay of whole decode steps, one graph per batch bucket.

A graph holds everything from the gathering of the inputs to the sampled tokens and their way back
into DecodeState. A step writes two short rows of integers (kernels/decode_step.py) and replays the
smallest bucket that holds it; the rows past the batch are padding.

    batch of 3 in the bucket of 4:   rows [5 0 2 -1]   new blocks [-1 7 -1 -1]
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from nanovllm.engine.input_batch import decode_rows
from nanovllm.engine.sequence import ScheduledBatch


class StepResult(NamedTuple):
    tokens: torch.Tensor  # int64 [num_sampled], -1 where the logits were not finite
    logits: torch.Tensor | None  # [num_sampled, vocab_size]; None on ranks that do not sample


# (rows, new_blocks), int32 [num_seqs] each -> the step's result.
DecodeStep = Callable[[torch.Tensor, torch.Tensor], StepResult]


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Ascending batch sizes to capture; the last one is max_num_seqs, whatever that is."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    def __init__(
        self, step: DecodeStep, max_num_seqs: int, keep_logits: bool, device: torch.device
    ) -> None:
        """Capture every bucket, the largest first, so that the others fit into its memory pool.

        step: a whole decode step on the device, without a wait for it.
        keep_logits: hold on to each graph's logits, which then do not share memory.
        """
        self.sizes = bucket_sizes(max_num_seqs)
        self._device = device
        self._inputs = {
            size: torch.full((2, size), -1, dtype=torch.int32, device=device)
            for size in self.sizes
        }
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._results: dict[int, StepResult] = {}
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):
            rows, new_blocks = self._inputs[size].unbind()
            # Once outside: kernels are compiled and libraries initialised where that is legal.
            step(rows, new_blocks)
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                result = step(rows, new_blocks)
            self._graphs[size] = graph
            self._results[size] = result if keep_logits else StepResult(result.tokens, None)

    def replay(self, batch: ScheduledBatch) -> StepResult:
        """Launch a decode batch; the result is overwritten by the next replay of its bucket."""
        n = batch.num_seqs
        size = next(size for size in self.sizes if size >= n)
        self._inputs[size].copy_(decode_rows(batch, size, self._device), non_blocking=True)
        self._graphs[size].replay()
        tokens, logits = self._results[size]
        return StepResult(tokens[:n], None if logits is None else logits[:n])
