"""DecodeGraphs: static buffers, capture and replay of the decode forward, one graph per bucket.

A graph replays fixed kernels on fixed addresses, so a step copies its inputs into the buffers and
replays the smallest bucket that holds it. Rows past the batch are padding: slot -1, which the
store skips, and context length 0, which attention skips.

    batch of 3 in the bucket of 4:   input_ids [9 4 7 .]   slots [12 40 8 -1]   lens [13 9 1 0]
"""

from collections.abc import Callable

import torch

from nanovllm.engine.input_batch import InputBatch
from nanovllm.utils.context import Context, use_context

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Ascending batch sizes to capture; the last one is max_num_seqs, whatever that is."""
    sizes = [1, 2, 4, *range(8, min(max_num_seqs, 256), 8), *range(256, max_num_seqs, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    def __init__(
        self,
        forward: Forward,
        max_num_seqs: int,
        max_num_blocks: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        """Capture every bucket, the largest first, so that the others fit into its memory pool.

        forward: (input_ids, positions) -> hidden states, run inside a Context.
        max_num_blocks: width of the widest block table.
        """
        self.sizes = bucket_sizes(max_num_seqs)
        self.input_ids = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.positions = torch.zeros_like(self.input_ids)
        self.slot_mapping = torch.full_like(self.input_ids, -1)
        self.context_lens = torch.zeros_like(self.input_ids)
        self.block_tables = torch.zeros(
            max_num_seqs, max_num_blocks, dtype=torch.int32, device=device
        )
        self._max_model_len = max_model_len
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):
            graph = torch.cuda.CUDAGraph()
            with use_context(self._context(size)):
                # Once outside: kernels are compiled and libraries initialised where that is legal.
                forward(self.input_ids[:size], self.positions[:size])
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, pool=pool):
                    self._outputs[size] = forward(self.input_ids[:size], self.positions[:size])
            self._graphs[size] = graph

    def _context(self, size: int) -> Context:
        return Context(
            is_prefill=False,
            slot_mapping=self.slot_mapping[:size],
            block_tables=self.block_tables[:size],
            context_lens=self.context_lens[:size],
            max_context_len=self._max_model_len,
        )

    def replay(self, inputs: InputBatch) -> torch.Tensor:
        """Hidden states [num_seqs, hidden] of a decode batch; valid until the next replay."""
        ctx = inputs.context
        n = len(inputs.input_ids)
        assert ctx.block_tables is not None and ctx.context_lens is not None
        size = next(size for size in self.sizes if size >= n)
        self.input_ids[:n] = inputs.input_ids
        self.positions[:n] = inputs.positions
        self.slot_mapping[:n] = ctx.slot_mapping
        self.context_lens[:n] = ctx.context_lens
        self.block_tables[:n, : ctx.block_tables.size(1)] = ctx.block_tables
        self.slot_mapping[n:size] = -1
        self.context_lens[n:size] = 0
        self._graphs[size].replay()
        return self._outputs[size][:n]
