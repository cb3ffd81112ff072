"""ScheduledBatch -> device tensors: input ids, positions, attention metadata, temperatures.

A prefill is built on the host, from the batch alone: its integer arrays are laid end to end in one
buffer that goes to the device in a single copy, and the tensors are views of it. A decode step is
gathered on the device from DecodeState.
"""

from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.engine.decode_state import DecodeState
from nanovllm.engine.sequence import IntArray, ScheduledBatch
from nanovllm.kernels.decode_step import DecodeInputs
from nanovllm.utils.context import Context


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


def build_prefill(batch: ScheduledBatch, state: DecodeState) -> InputBatch:
    """The tensors of a prefill step; also enters its rows into the device's state."""
    block_size = state.block_size
    starts, counts = batch.num_cached_tokens, batch.num_scheduled_tokens
    ends, is_sampled = starts + counts, batch.is_sampled
    seq_index, positions = _token_positions(starts, counts)
    blocks = batch.block_tables[seq_index, positions // block_size]
    arrays = {
        # int64 first, so that the views stay aligned.
        "seeds": batch.seeds.view(np.int32),
        "sampled_seeds": batch.seeds[is_sampled].view(np.int32),
        "input_ids": batch.input_ids,
        "positions": positions,
        "slot_mapping": blocks * np.int32(block_size) + positions % block_size,
        "cu_seqlens_q": _cumulative(counts),
        "cu_seqlens_k": _cumulative(ends),
        "logits_indices": (np.cumsum(counts, dtype=np.int32) - 1)[is_sampled],
        "block_tables": batch.block_tables,
        "ends": ends,
        "rows": batch.rows,
        "temperatures": batch.temperatures.view(np.int32),
        "sampled_rows": batch.rows[is_sampled],
        "sampled_ends": ends[is_sampled],
        "sampled_temperatures": batch.temperatures[is_sampled].view(np.int32),
    }
    t = _to_device(arrays, state.num_tokens.device)
    state.admit(
        t["rows"],
        t["ends"],
        t["block_tables"],
        t["temperatures"].view(torch.float32),
        t["seeds"].view(torch.int64),
    )
    context = Context(
        is_prefill=True,
        slot_mapping=t["slot_mapping"],
        block_tables=t["block_tables"] if starts.any() else None,
        cu_seqlens_q=t["cu_seqlens_q"],
        cu_seqlens_k=t["cu_seqlens_k"],
        max_seqlen_q=int(counts.max()),
        max_seqlen_k=int(ends.max()),
        seqlens_q=counts.tolist(),
        seqlens_k=ends.tolist(),
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


def build_decode(
    rows: torch.Tensor,
    new_blocks: torch.Tensor,
    state: DecodeState,
    max_context_len: int,
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


def decode_rows(batch: ScheduledBatch, num_rows: int, device: torch.device) -> torch.Tensor:
    """int32 [2, num_rows]: the batch's rows and new blocks, padded with -1, in one copy."""
    host = np.full((2, num_rows), -1, np.int32)
    host[0, : batch.num_seqs] = batch.rows
    host[1, : batch.num_seqs] = batch.new_blocks
    return _to_device({"": host}, device)[""]


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


def _to_device(arrays: dict[str, IntArray], device: torch.device) -> dict[str, torch.Tensor]:
    """int32 arrays as tensors of the same shapes, in one copy."""
    sizes = [a.size for a in arrays.values()]
    # A fresh buffer each step: torch's caching host allocator reuses a pinned one only after the
    # copy that reads it has finished, so no step overwrites what is still being sent.
    host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    np.concatenate([a.ravel() for a in arrays.values()], out=host.numpy())
    parts = host.to(device, non_blocking=True).split(sizes)
    return {
        name: part.view(a.shape) for (name, a), part in zip(arrays.items(), parts, strict=True)
    }
