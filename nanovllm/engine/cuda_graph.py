"""Capture and replay of whole steps: decodes by batch size, short prefills by tokens and sequences.

A decode graph holds everything from the gathering of the inputs to the sampled tokens and their
way back into DecodeState. A step writes two short rows of integers (kernels/decode_step.py) and
replays the smallest bucket that holds it; the rows past the batch are padding.

    batch of 3 in the bucket of 4:   rows [5 0 2 -1]   new blocks [-1 7 -1 -1]
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.decode_state import DecodeState
from nanovllm.engine.input_batch import (
    InputBatch,
    PrefillShape,
    build_decode,
    decode_arrays,
    packed_size,
    prefill_arrays,
    prefill_inputs,
    to_device,
)
from nanovllm.engine.prefix_groups import NO_GROUPS
from nanovllm.engine.sequence import IntArray, ScheduledBatch
from nanovllm.utils.context import SharedPrefixes


class StepResult(NamedTuple):
    tokens: torch.Tensor  # int64 [num_sampled], -1 where the logits were not finite
    logits: torch.Tensor  # [num_sampled, this rank's part of the vocabulary]


# The model and sampling on given inputs, without a wait for the device.
Step = Callable[[InputBatch], StepResult]


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Ascending batch sizes to capture; the last one is max_num_seqs, whatever that is."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def capture(step: Callable[[], StepResult], pool: Any) -> tuple[torch.cuda.CUDAGraph, StepResult]:
    # Once outside: kernels are compiled and libraries initialised where that is legal.
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = step()
    return graph, result


class DecodeGraphs:
    def __init__(
        self,
        step: Step,
        state: DecodeState,
        work_list: Callable[[IntArray, int], dict[str, IntArray]],
        max_num_seqs: int,
        pool: Any,
    ) -> None:
        """Capture every bucket, the largest first, so that the others fit into its memory.

        work_list: from groups of rows and a bucket's size to the arrays of a SharedPrefixes, or
            none where a bucket of this size does without.
        """
        self.sizes = bucket_sizes(max_num_seqs)
        self._device, self._work_list = state.num_tokens.device, work_list
        # Lengths are read on the device: the bound only has to hold for every replay.
        max_context_len = state.block_tables.size(1) * state.block_size
        # What each bucket's inputs hold: a step like the last one sends nothing.
        self._sent: dict[int, dict[str, IntArray]] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        # Likewise of what rows share, which changes when one comes or goes.
        self._sent_groups: dict[int, IntArray] = {}
        self._lists: dict[int, torch.Tensor] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._results: dict[int, StepResult] = {}
        for size in reversed(self.sizes):
            self._sent[size] = arrays = decode_arrays(_empty_batch(is_prefill=False), size)
            self._inputs[size], tensors = self._make_inputs(arrays)
            shared = None
            if lists := work_list(NO_GROUPS, size):
                self._sent_groups[size] = NO_GROUPS
                self._lists[size], sent = self._make_inputs(lists)
                shared = SharedPrefixes(**sent)

            def captured(
                tensors: dict[str, torch.Tensor] = tensors, shared: SharedPrefixes | None = shared
            ) -> StepResult:
                rows, new_blocks = tensors["rows"], tensors["new_blocks"]
                return step(build_decode(rows, new_blocks, state, max_context_len, shared))

            self._graphs[size], self._results[size] = capture(captured, pool)

    def _make_inputs(
        self, arrays: dict[str, IntArray]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A buffer that holds these, and the tensors that are views of it."""
        buffer = torch.empty(packed_size(arrays), dtype=torch.int32, device=self._device)
        return buffer, to_device(arrays, self._device, buffer)

    def replay(self, batch: ScheduledBatch) -> StepResult | None:
        """Launch a decode batch, or None where no bucket holds it.

        The result is overwritten by the next replay.
        """
        n = batch.num_seqs
        size = next((size for size in self.sizes if size >= n), None)
        if size is None:
            return None
        arrays, sent = decode_arrays(batch, size), self._sent[size]
        if any(not np.array_equal(a, sent[name]) for name, a in arrays.items()):
            to_device(arrays, self._device, self._inputs[size])
            self._sent[size] = arrays
        groups = self._sent_groups.get(size)
        if groups is not None and not np.array_equal(groups, batch.groups):
            lists = self._work_list(batch.groups, size)
            to_device(lists, self._device, self._lists[size])
            self._sent_groups[size] = batch.groups
        self._graphs[size].replay()
        tokens, logits = self._results[size]
        return StepResult(tokens[:n], logits[:n])


# (tokens, sequences) of a captured prefill. Launching the kernels of a prefill one by one takes the
# host longer than the device needs for some thousand tokens.
# Padding costs as much as tokens do: the steps are small where prefills of short prompts gather
# (an eighth of 512 rows with some 40 tokens each).
_PREFILL_BUCKETS = (
    (64, 4), (128, 8), (256, 16), (512, 32), (1024, 64), (1536, 64), (2048, 64), (2304, 96),
    (2560, 96), (2816, 96), (3072, 96), (3584, 128), (4096, 128),
)  # fmt: skip


class PrefillGraphs:
    def __init__(
        self,
        step: Step,
        state: DecodeState,
        max_num_tokens: int,
        pool: Any,
    ) -> None:
        """Capture short prefills without cached context, the largest first.

        max_num_tokens: of one step.
        """
        self._device, self._block_size = state.num_tokens.device, state.block_size
        num_rows, max_num_blocks = len(state.num_tokens) - 1, state.block_tables.size(1)
        self._shapes = [
            PrefillShape(num_tokens, min(num_seqs, num_rows), max_num_blocks, True)
            for num_tokens, num_seqs in _PREFILL_BUCKETS
            if num_tokens <= max_num_tokens
        ]
        self._graphs: dict[PrefillShape, torch.cuda.CUDAGraph] = {}
        self._results: dict[PrefillShape, StepResult] = {}
        self._inputs: dict[PrefillShape, torch.Tensor] = {}
        for shape in reversed(self._shapes):
            arrays = prefill_arrays(_empty_batch(is_prefill=True), shape, self._block_size)
            buffer = torch.empty(packed_size(arrays), dtype=torch.int32, device=self._device)
            tensors = to_device(arrays, self._device, buffer)
            lens = [shape.num_tokens]  # an upper bound: the lengths are read on the device

            def captured(
                tensors: dict[str, torch.Tensor] = tensors, lens: list[int] = lens
            ) -> StepResult:
                return step(prefill_inputs(tensors, state, lens, lens, has_cached_context=False))

            self._inputs[shape] = buffer
            self._graphs[shape], self._results[shape] = capture(captured, pool)

    def replay(self, batch: ScheduledBatch) -> StepResult | None:
        """Launch a prefill batch, or None where no bucket holds it."""
        if batch.num_cached_tokens.any() or len(batch.prompt_logprobs):
            return None
        num_tokens, num_seqs = batch.num_tokens, batch.num_seqs
        for shape in self._shapes:
            if shape.num_tokens >= num_tokens and shape.num_seqs >= num_seqs:
                break
        else:
            return None
        arrays = prefill_arrays(batch, shape, self._block_size)
        to_device(arrays, self._device, self._inputs[shape])
        self._graphs[shape].replay()
        tokens, logits = self._results[shape]
        n = int(batch.is_sampled.sum())
        return StepResult(tokens[:n], logits[:n])


def _empty_batch(is_prefill: bool) -> ScheduledBatch:
    """A step of nothing: padded, it is all padding."""
    ints, flags = np.zeros(0, np.int32), np.zeros(0, np.bool_)
    return ScheduledBatch(
        is_prefill=is_prefill,
        rows=ints,
        seq_ids=ints.astype(np.int64),
        num_cached_tokens=ints,
        num_scheduled_tokens=ints,
        is_sampled=flags,
        all_greedy=False,
        new_blocks=ints,
        input_ids=ints,
        block_tables=ints.reshape(0, 1),
        temperatures=ints.astype(np.float32),
        seeds=ints.astype(np.int64),
    )
