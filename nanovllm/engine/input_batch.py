"""ScheduledBatch -> device tensors: input ids, positions, attention metadata, temperatures.

Pure functions of the batch. The integer arrays are laid end to end in one host buffer, which goes
to the device in a single copy; the tensors are views of it.
"""

from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.engine.sequence import IntArray, ScheduledBatch
from nanovllm.utils.context import Context


@dataclass(frozen=True, slots=True)
class InputBatch:
    input_ids: torch.Tensor  # int32 [num_tokens]
    positions: torch.Tensor  # int32 [num_tokens]
    context: Context
    temperatures: torch.Tensor  # float32 [num_sampled]
    all_greedy: bool  # every sampled sequence has temperature 0


def build(batch: ScheduledBatch, block_size: int, device: torch.device) -> InputBatch:
    """The tensors of one step on the given device.

    block_size: tokens per block, to turn a position into a slot: block id * block_size + offset.
    """
    starts, counts = batch.num_cached_tokens, batch.num_scheduled_tokens
    if batch.is_prefill:
        seq_index, positions = _token_positions(starts, counts)
    else:
        seq_index, positions = np.arange(batch.num_seqs, dtype=np.int32), starts
    blocks = batch.block_tables[seq_index, positions // block_size]
    arrays = {
        "input_ids": batch.input_ids,
        "positions": positions,
        "slot_mapping": blocks * np.int32(block_size) + positions % block_size,
    }
    ends = starts + counts
    has_cached_context = bool(starts.any())
    if batch.is_prefill:
        arrays["cu_seqlens_q"] = _cumulative(counts)
        arrays["cu_seqlens_k"] = _cumulative(ends)
        arrays["logits_indices"] = (np.cumsum(counts, dtype=np.int32) - 1)[batch.is_sampled]
    else:
        arrays["context_lens"] = ends
    if has_cached_context or not batch.is_prefill:
        arrays["block_tables"] = batch.block_tables
    arrays["temperatures"] = batch.temperatures.view(np.int32)
    t = _to_device(arrays, device)
    if batch.is_prefill:
        context = Context(
            is_prefill=True,
            slot_mapping=t["slot_mapping"],
            block_tables=t.get("block_tables"),
            cu_seqlens_q=t["cu_seqlens_q"],
            cu_seqlens_k=t["cu_seqlens_k"],
            max_seqlen_q=int(counts.max()),
            max_seqlen_k=int(ends.max()),
            seqlens_q=counts.tolist(),
            seqlens_k=ends.tolist(),
            logits_indices=t["logits_indices"],
        )
    else:
        context = Context(
            is_prefill=False,
            slot_mapping=t["slot_mapping"],
            block_tables=t["block_tables"],
            context_lens=t["context_lens"],
            max_context_len=int(ends.max()),
        )
    return InputBatch(
        input_ids=t["input_ids"],
        positions=t["positions"],
        context=context,
        temperatures=t["temperatures"].view(torch.float32),
        all_greedy=not batch.temperatures.any(),
    )


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
    if device.type == "cpu":
        # A table of the scheduler's may be a view that the next step rewrites: copy, as CUDA does.
        return {name: torch.from_numpy(np.array(a, np.int32)) for name, a in arrays.items()}
    sizes = [a.size for a in arrays.values()]
    # A fresh pinned buffer each step: torch's caching host allocator reuses one only after the
    # copy that reads it has finished, so no step overwrites what is still being sent.
    host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=True)
    np.concatenate([a.ravel() for a in arrays.values()], out=host.numpy())
    parts = host.to(device, non_blocking=True).split(sizes)
    return {name: part.view(a.shape) for (name, a), part in zip(arrays.items(), parts, strict=True)}
