"""Capture and replay of whole steps: decodes by batch size, short prefills by tokens and sequences.

A decode graph holds everything from the gathering of the inputs to the sampled tokens and their
way back into DecodeState. A step writes two short rows of integers (kernels/decode_step.py) and
replays the smallest bucket that holds it; the rows past the batch are padding.

    batch of 3 in the bucket of 4:   rows [5 0 2 -1]   new blocks [-1 7 -1 -1]
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.decode_state import DecodeState
from nanovllm.engine.input_batch import (
    InputBatch,
    PrefillShape,
    WorkList,
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
Capture = Callable[[Callable[[], StepResult]], tuple[Any, StepResult]]  # a CUDAGraph, or None

# Below, reading shared keys once takes longer than reading them again: 32 MiB in a layer of 8 K/V
# heads of 128, some 8 us, against a launch, its partial results and a larger bucket.
_MIN_SAVED_KEYS = 8192


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Ascending batch sizes to capture; the last one is max_num_seqs, whatever that is."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def rehearse(
    step: Callable[[], StepResult], rehearsal: Callable[[], AbstractContextManager[None]]
) -> tuple[None, StepResult]:
    """Run a step once, so that its kernels are compiled; None stands for the graph.

    rehearsal: what it is run within, which may leave out layers but no kernel.
    """
    with rehearsal():
        return None, step()


def capture(
    step: Callable[[], StepResult], rehearsal: Callable[[], AbstractContextManager[None]], pool: Any
) -> tuple[torch.cuda.CUDAGraph, StepResult]:
    """A step's graph and what its replays leave their results in; see rehearse."""
    # Kernels are compiled and libraries initialised where that is legal.
    rehearse(step, rehearsal)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = step()
    return graph, result


class _DecodeBucket:
    """The graph of a decode of up to `size` rows, and what its inputs hold: a step like the last
    one sends nothing."""

    def __init__(
        self,
        size: int,
        step: Step,
        state: DecodeState,
        lists: dict[str, IntArray],
        capture: Capture,
    ) -> None:
        """lists: a work list as large as any may get; none where rows are read one by one."""
        self._size, self._device = size, state.num_tokens.device
        # Lengths are read on the device: the bound only has to hold for every replay.
        max_context_len = state.block_tables.size(1) * state.block_size
        self._sent = decode_arrays(_empty_batch(is_prefill=False), size)
        self._inputs, tensors = self._make_inputs(self._sent)
        shared = None
        if lists:
            self._sent_groups = NO_GROUPS
            self._lists, sent_lists = self._make_inputs(lists)
            shared = SharedPrefixes(**sent_lists)

        def captured() -> StepResult:
            rows, new_blocks = tensors["rows"], tensors["new_blocks"]
            return step(build_decode(rows, new_blocks, state, max_context_len, shared))

        self._graph, self._result = capture(captured)

    def _make_inputs(
        self, arrays: dict[str, IntArray]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A buffer that holds these, and the tensors that are views of it."""
        buffer = torch.empty(packed_size(arrays), dtype=torch.int32, device=self._device)
        return buffer, to_device(arrays, self._device, buffer)

    def send_groups(self, groups: IntArray, work_list: WorkList) -> None:
        if not np.array_equal(groups, self._sent_groups):
            to_device(work_list(groups, self._size), self._device, self._lists)
            self._sent_groups = groups

    def replay(self, batch: ScheduledBatch) -> StepResult:
        arrays = decode_arrays(batch, self._size)
        if any(not np.array_equal(a, self._sent[name]) for name, a in arrays.items()):
            to_device(arrays, self._device, self._inputs)
            self._sent = arrays
        self._graph.replay()
        tokens, logits = self._result
        return StepResult(tokens[: batch.num_seqs], logits[: batch.num_seqs])


class DecodeGraphs:
    def __init__(
        self,
        step: Step,
        state: DecodeState,
        work_list: WorkList,
        max_num_seqs: int,
        capture: Capture,
    ) -> None:
        """Capture every bucket, the largest first, so that the others fit into its memory.

        work_list: gives none where a bucket of this size does without.
        """
        self.sizes = bucket_sizes(max_num_seqs)
        self._work_list = work_list
        self._plain: dict[int, _DecodeBucket] = {}
        self._shared: dict[int, _DecodeBucket] = {}
        for size in reversed(self.sizes):
            # A launch for what rows share is not free, so that steps without it do without. There
            # are fewer of these graphs, for a start that is no longer than need be.
            is_kept = size == 32 or size % (64 if size < 256 else 128) == 0
            lists = work_list(NO_GROUPS, size) if is_kept or size == max_num_seqs else {}
            if lists:
                self._shared[size] = _DecodeBucket(size, step, state, lists, capture)
            self._plain[size] = _DecodeBucket(size, step, state, {}, capture)

    def replay(self, batch: ScheduledBatch) -> StepResult | None:
        """Launch a decode batch, or None where no bucket holds it.

        The result is overwritten by the next replay.
        """
        buckets = self._shared if self._saves_enough(batch.groups) else self._plain
        size = min((size for size in buckets if size >= batch.num_seqs), default=None)
        if size is None:
            return None
        if buckets is self._shared:
            buckets[size].send_groups(batch.groups, self._work_list)
        return buckets[size].replay(batch)

    def _saves_enough(self, groups: IntArray) -> bool:
        if not len(groups) or not self._shared:
            return False
        rows, keys = groups[:, 1] - groups[:, 0], groups[:, 3] - groups[:, 2]
        return int(((rows - 1) * keys).sum()) >= _MIN_SAVED_KEYS


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
        self, step: Step, state: DecodeState, max_num_tokens: int, capture: Capture
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
            self._graphs[shape], self._results[shape] = capture(captured)

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
