"""ScheduledBatch -> device tensors: input ids, positions, attention metadata, temperatures.

A prefill is built on the host, from the batch alone: its integer arrays are laid end to end in one
buffer that goes to the device in a single copy, and the tensors are views of it. A decode step is
gathered on the device from DecodeState.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.engine.decode_state import DecodeState
from nanovllm.engine.sequence import IntArray, ScheduledBatch
from nanovllm.kernels.decode_step import DecodeInputs
from nanovllm.utils.context import Context, SharedPrefixes

# int32 values. Kernels are compiled for what a pointer's alignment lets them assume: with every
# array aligned, which compilation is used never depends on what else is in the batch.
_ALIGNMENT = 16

# Groups of a decode's rows and the number of rows -> the arrays of a SharedPrefixes, or none.
WorkList = Callable[[IntArray, int], dict[str, IntArray]]


@dataclass(frozen=True, slots=True)
class InputBatch:
    input_ids: torch.Tensor  # int32 [num_tokens]
    positions: torch.Tensor  # int32 [num_tokens]
    context: Context
    # Of the sampled sequences, in order:
    rows: torch.Tensor  # int32 [num_sampled], of DecodeState; -1 for padding
    temperatures: torch.Tensor  # float32 [num_sampled]
    seeds: torch.Tensor  # int64 [num_sampled]
    draw_positions: torch.Tensor  # int32 [num_sampled] where the sampled token will stand


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """The sizes that a prefill's arrays are padded to; those of the batch itself for no padding."""

    num_tokens: int
    num_seqs: int
    max_num_blocks: int  # width of the block tables
    # Whether attention sees one sequence more, of the padding tokens. Left out, what they hold
    # would be whatever lay in memory, and kernels that load whole tiles of values and then multiply
    # some by 0 would spread a NaN from there.
    attends_padding: bool = False

    @classmethod
    def of(cls, batch: ScheduledBatch) -> "PrefillShape":
        return cls(batch.num_tokens, batch.num_seqs, batch.block_tables.shape[1])


def prefill_arrays(
    batch: ScheduledBatch, shape: PrefillShape, block_size: int
) -> dict[str, IntArray]:
    """Everything a prefill sends to the device, as int32 arrays of this shape.

    Padding tokens have slot -1, padding sequences no token, and row -1.
    """
    starts, counts = batch.num_cached_tokens, batch.num_scheduled_tokens
    ends, is_sampled = starts + counts, batch.is_sampled
    seq_index, positions = _token_positions(starts, counts)
    blocks = batch.block_tables[seq_index, positions // block_size]
    slots = blocks * np.int32(block_size) + positions % block_size
    tables = np.zeros((shape.num_seqs, shape.max_num_blocks), np.int32)
    tables[: batch.num_seqs, : batch.block_tables.shape[1]] = batch.block_tables
    n, m = shape.num_tokens, shape.num_seqs
    q_lens, k_lens = _pad(counts, m, 0), _pad(ends, m, 0)
    if shape.attends_padding:
        num_padding = n - len(batch.input_ids)
        q_lens, k_lens = np.append(q_lens, num_padding), np.append(k_lens, num_padding)
    return {
        "seeds": _pad(batch.seeds, m, 0).view(np.int32),
        "sampled_seeds": _pad(batch.seeds[is_sampled], m, 0).view(np.int32),
        "input_ids": _pad(batch.input_ids, n, 0),
        "positions": _pad(positions, n, 0),
        "slot_mapping": _pad(slots, n, -1),
        "cu_seqlens_q": _cumulative(q_lens),
        "cu_seqlens_k": _cumulative(k_lens),
        "logits_indices": _pad((np.cumsum(counts, dtype=np.int32) - 1)[is_sampled], m, 0),
        "block_tables": tables,
        "ends": _pad(ends, m, 0),
        "rows": _pad(batch.rows, m, -1),
        "temperatures": _pad(batch.temperatures, m, 0).view(np.int32),
        "sampled_rows": _pad(batch.rows[is_sampled], m, -1),
        "sampled_ends": _pad(ends[is_sampled], m, 0),
        "sampled_temperatures": _pad(batch.temperatures[is_sampled], m, 0).view(np.int32),
    }


def build(batch: ScheduledBatch, state: DecodeState, work_list: WorkList) -> InputBatch:
    """The tensors of a step."""
    if batch.is_prefill:
        return build_prefill(batch, state)
    device, num_seqs = state.num_tokens.device, batch.num_seqs
    t = to_device(decode_arrays(batch, num_seqs), device)
    lists = work_list(batch.groups, num_seqs) if len(batch.groups) else {}
    shared = SharedPrefixes(**to_device(lists, device)) if lists else None
    max_context_len = int(batch.num_cached_tokens.max()) + 1
    return build_decode(t["rows"], t["new_blocks"], state, max_context_len, shared)


def build_prefill(batch: ScheduledBatch, state: DecodeState) -> InputBatch:
    """The tensors of a prefill step; also enters its rows into the device's state."""
    arrays = prefill_arrays(batch, PrefillShape.of(batch), state.block_size)
    num_sampled = int(batch.is_sampled.sum())
    for name in ("sampled_rows", "sampled_ends", "sampled_temperatures", "logits_indices"):
        arrays[name] = arrays[name][:num_sampled]
    arrays["sampled_seeds"] = arrays["sampled_seeds"][: 2 * num_sampled]
    counts = batch.num_scheduled_tokens
    return prefill_inputs(
        to_device(arrays, state.num_tokens.device),
        state,
        seqlens_q=counts.tolist(),
        seqlens_k=(batch.num_cached_tokens + counts).tolist(),
        has_cached_context=bool(batch.num_cached_tokens.any()),
    )


def enter(batch: ScheduledBatch, state: DecodeState) -> ScheduledBatch:
    """Enter the rows of a prefill into the device's state, and their last token, which is all that
    it computes: what is left is the decode returned."""
    arrays = {
        "seeds": batch.seeds.view(np.int32),
        "rows": batch.rows,
        "ends": batch.num_cached_tokens + np.int32(1),
        "block_tables": batch.block_tables,
        "temperatures": batch.temperatures.view(np.int32),
        "input_ids": batch.input_ids,
    }
    t = to_device(arrays, state.num_tokens.device)
    _admit(t, state)
    state.last_tokens[t["rows"].long()] = t["input_ids"]
    new_blocks = np.full(batch.num_seqs, -1, np.int32)
    return replace(batch, is_prefill=False, as_decode=False, new_blocks=new_blocks)


def prefill_inputs(
    t: dict[str, torch.Tensor],
    state: DecodeState,
    seqlens_q: list[int],
    seqlens_k: list[int],
    has_cached_context: bool,
) -> InputBatch:
    """A prefill's tensors by name, as the model takes them; enters its rows into the state."""
    _admit(t, state)
    context = Context(
        is_prefill=True,
        slot_mapping=t["slot_mapping"],
        block_tables=t["block_tables"] if has_cached_context else None,
        cu_seqlens_q=t["cu_seqlens_q"],
        cu_seqlens_k=t["cu_seqlens_k"],
        max_seqlen_q=max(seqlens_q),
        max_seqlen_k=max(seqlens_k),
        seqlens_q=seqlens_q,
        seqlens_k=seqlens_k,
        logits_indices=t["logits_indices"],
    )
    return InputBatch(
        input_ids=t["input_ids"],
        positions=t["positions"],
        context=context,
        rows=t["sampled_rows"],
        temperatures=t["sampled_temperatures"].view(torch.float32),
        seeds=t["sampled_seeds"].view(torch.int64),
        draw_positions=t["sampled_ends"],
    )


def _admit(t: dict[str, torch.Tensor], state: DecodeState) -> None:
    """Enter a prefill's rows, by name, into the state."""
    state.admit(
        t["rows"],
        t["ends"],
        t["block_tables"],
        t["temperatures"].view(torch.float32),
        t["seeds"].view(torch.int64),
    )


def build_decode(
    rows: torch.Tensor,
    new_blocks: torch.Tensor,
    state: DecodeState,
    max_context_len: int,
    shared: SharedPrefixes | None = None,
    out: DecodeInputs | None = None,
) -> InputBatch:
    """The tensors of a decode step, gathered on the device.

    rows, new_blocks: int32 [num_seqs], see kernels/decode_step.py.
    max_context_len: an upper bound of the context lengths that the host knows.
    """
    inputs = state.gather(rows, new_blocks, out)
    context = Context(
        is_prefill=False,
        slot_mapping=inputs.slot_mapping,
        block_tables=inputs.block_tables,
        context_lens=inputs.context_lens,
        max_context_len=max_context_len,
        shared=shared,
    )
    return InputBatch(
        input_ids=inputs.input_ids,
        positions=inputs.positions,
        context=context,
        rows=rows,
        temperatures=inputs.temperatures,
        seeds=inputs.seeds,
        draw_positions=inputs.context_lens,
    )


def decode_arrays(batch: ScheduledBatch, num_seqs: int) -> dict[str, IntArray]:
    """Everything a decode sends to the device: int32 [num_seqs] each, padded with -1."""
    return {
        "rows": _pad(batch.rows, num_seqs, -1),
        "new_blocks": _pad(batch.new_blocks, num_seqs, -1),
    }


def to_device(
    arrays: dict[str, IntArray], device: torch.device, out: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """int32 arrays as tensors of the same shapes, in one copy: into out [packed_size], or new."""
    # A fresh buffer each step: torch's caching host allocator reuses a pinned one only after the
    # copy that reads it has finished, so no step overwrites what is still being sent.
    host = torch.empty(packed_size(arrays), dtype=torch.int32, pin_memory=device.type == "cuda")
    packed, at, places = host.numpy(), 0, {}
    for name, a in arrays.items():
        packed[at : at + a.size] = a.ravel()
        places[name] = at
        at += -(-a.size // _ALIGNMENT) * _ALIGNMENT
    if out is None:
        out = host.to(device, non_blocking=True)
    else:
        out.copy_(host, non_blocking=True)
    return {
        name: out[at : at + arrays[name].size].view(arrays[name].shape)
        for name, at in places.items()
    }


def packed_size(arrays: dict[str, IntArray]) -> int:
    """Length of the buffer in which to_device packs these arrays."""
    return sum(-(-a.size // _ALIGNMENT) * _ALIGNMENT for a in arrays.values())


def _pad(a: npt.NDArray[Any], size: int, value: int) -> npt.NDArray[Any]:
    """The array, filled up at the end to this size."""
    if len(a) == size:
        return a
    out = np.full(size, value, a.dtype)
    out[: len(a)] = a
    return out


def _token_positions(starts: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """For each packed token: the sequence it belongs to and its position in that sequence.

    starts [5, 0], counts [2, 3] -> sequences [0, 0, 1, 1, 1], positions [5, 6, 0, 1, 2]
    """
    seq_index = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    first = np.cumsum(counts, dtype=np.int32) - counts  # packed index of each sequence's first
    positions = np.arange(len(seq_index), dtype=np.int32) + (starts - first)[seq_index]
    return seq_index, positions


def _cumulative(lens: IntArray) -> IntArray:
    out = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=out[1:])
    return out
