"""ScheduledBatch -> tensors, value by value."""

import numpy as np
import pytest
import torch

from nanovllm.engine import input_batch
from nanovllm.engine.input_batch import InputBatch
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import ScheduledBatch, Sequence
from nanovllm.sampling_params import SamplingParams

CPU = torch.device("cpu")


def make_batch(is_prefill, input_ids, cached, scheduled, tables, sampled=None, temperatures=None):
    """tables: the block ids of each sequence, padded here with a block that is nobody's."""
    width = max(map(len, tables))
    sampled = [True] * len(tables) if sampled is None else sampled
    temperatures = [1.0] * sum(sampled) if temperatures is None else temperatures
    return ScheduledBatch(
        is_prefill=is_prefill,
        rows=np.arange(len(tables), dtype=np.int32),
        input_ids=np.array(input_ids, np.int32),
        num_cached_tokens=np.array(cached, np.int32),
        num_scheduled_tokens=np.array(scheduled, np.int32),
        block_tables=np.array([t + [99] * (width - len(t)) for t in tables], np.int32),
        is_sampled=np.array(sampled),
        temperatures=np.array(temperatures, np.float32),
    )


def mixed_prefill() -> ScheduledBatch:
    """A cached prefix of one block, a whole prompt, and a chunk that does not reach the end."""
    return make_batch(
        True,
        input_ids=[40, 41, 7, 8, 9, 30, 31],
        cached=[4, 0, 4],
        scheduled=[2, 3, 2],
        tables=[[5, 0], [3], [2, 6, 7]],
        sampled=[True, True, False],
        temperatures=[0.5, 0.0],
    )


def decode() -> ScheduledBatch:
    return make_batch(False, [9, 4, 7], [12, 4, 0], [1, 1, 1], [[5, 0, 9, 2], [3, 10], [8]])


def test_prefill_without_cached_context_needs_no_block_tables():
    batch = make_batch(True, [1, 2, 3, 4, 5, 6], [0, 0], [5, 1], [[2, 0], [1]])
    inputs = input_batch.build(batch, 4, CPU)
    ctx = inputs.context
    assert ctx.is_prefill
    assert inputs.input_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert inputs.positions.tolist() == [0, 1, 2, 3, 4, 0]
    assert ctx.slot_mapping.tolist() == [8, 9, 10, 11, 0, 4]
    assert ctx.block_tables is None and ctx.context_lens is None
    assert ctx.cu_seqlens_q.tolist() == ctx.cu_seqlens_k.tolist() == [0, 5, 6]
    assert (ctx.max_seqlen_q, ctx.max_seqlen_k) == (5, 5)
    assert ctx.logits_indices.tolist() == [4, 5]


def test_prefill_with_cached_context_counts_keys_to_the_end_of_the_chunk():
    """Keys counted to the end of the prompt read slots that nobody has written yet."""
    inputs = input_batch.build(mixed_prefill(), 4, CPU)
    ctx = inputs.context
    assert inputs.positions.tolist() == [4, 5, 0, 1, 2, 4, 5]
    assert ctx.slot_mapping.tolist() == [0, 1, 12, 13, 14, 24, 25]
    assert ctx.cu_seqlens_q.tolist() == [0, 2, 5, 7]
    assert ctx.cu_seqlens_k.tolist() == [0, 6, 9, 15]
    assert (ctx.max_seqlen_q, ctx.max_seqlen_k) == (3, 6)
    assert (ctx.seqlens_q, ctx.seqlens_k) == ([2, 3, 2], [6, 3, 6])
    assert ctx.block_tables.tolist() == [[5, 0, 99], [3, 99, 99], [2, 6, 7]]
    assert ctx.logits_indices.tolist() == [1, 4]  # no logits of the chunk
    assert inputs.temperatures.tolist() == [0.5, 0.0]
    assert not inputs.all_greedy


def test_chunk_without_any_sampled_sequence_needs_no_logits():
    batch = make_batch(True, [1, 2], [0], [2], [[0, 1]], sampled=[False])
    inputs = input_batch.build(batch, 4, CPU)
    assert inputs.context.logits_indices.tolist() == inputs.temperatures.tolist() == []


def test_decode_takes_one_slot_for_each_sequence_and_counts_the_new_token():
    inputs = input_batch.build(decode(), 4, CPU)
    ctx = inputs.context
    assert not ctx.is_prefill
    assert inputs.input_ids.tolist() == [9, 4, 7]
    assert inputs.positions.tolist() == [12, 4, 0]
    assert ctx.slot_mapping.tolist() == [8, 40, 32]
    assert ctx.context_lens.tolist() == [13, 5, 1]
    assert ctx.max_context_len == 13
    assert ctx.block_tables.shape == (3, 4)
    assert ctx.cu_seqlens_q is None and ctx.cu_seqlens_k is None


@pytest.mark.parametrize(("temperatures", "expected"), [([0, 0], True), ([0, 0.1], False)])
def test_all_greedy_means_every_temperature_is_zero(temperatures, expected):
    batch = make_batch(False, [1, 2], [1, 1], [1, 1], [[0], [1]], temperatures=temperatures)
    assert input_batch.build(batch, 4, CPU).all_greedy is expected


@pytest.mark.parametrize("batch", [mixed_prefill(), decode()], ids=["prefill", "decode"])
def test_dtypes_are_those_of_the_contract(batch):
    inputs = input_batch.build(batch, 4, CPU)
    assert inputs.temperatures.dtype == torch.float32
    names = ["slot_mapping", "block_tables", "cu_seqlens_q", "cu_seqlens_k", "context_lens"]
    tensors = [inputs.input_ids, inputs.positions, *(getattr(inputs.context, n) for n in names)]
    assert {t.dtype for t in tensors if t is not None} == {torch.int32}


@pytest.mark.parametrize("block_size", [1, 3, 256])
def test_slots_follow_the_block_table_at_any_block_size(block_size):
    num_tokens = 2 * block_size + 1
    tables = [[7, 2, 5], [0, 1, 6]]
    batch = make_batch(True, [0] * 2 * num_tokens, [0, 0], [num_tokens] * 2, tables)
    expected = [
        table[p // block_size] * block_size + p % block_size
        for table in tables
        for p in range(num_tokens)
    ]
    slots = input_batch.build(batch, block_size, CPU).context.slot_mapping
    assert slots.tolist() == expected


def test_tensors_do_not_change_when_the_scheduler_goes_on():
    """On the CPU a tensor can be a view of an array, and the next step rewrites the tables."""
    scheduler = Scheduler(4, 64, 64, 4, 16, [0])
    scheduler.add(Sequence([1, 2, 3, 4], SamplingParams(), scheduler.max_len))
    scheduler.update(scheduler.schedule(), np.array([5]))
    batch = scheduler.schedule()
    inputs = input_batch.build(batch, 4, CPU)
    before = snapshot(inputs)
    scheduler.update(batch, np.array([6]))
    for array in vars(scheduler.table).values():
        if isinstance(array, np.ndarray):
            array.fill(0)
    assert snapshot(inputs) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("batch", [mixed_prefill(), decode()], ids=["prefill", "decode"])
def test_gpu_tensors_equal_the_cpu_ones(batch):
    on_gpu = input_batch.build(batch, 4, torch.device("cuda"))
    assert on_gpu.input_ids.is_cuda
    assert snapshot(on_gpu) == snapshot(input_batch.build(batch, 4, CPU))


def snapshot(inputs: InputBatch) -> dict:
    ctx = inputs.context
    values = {name: getattr(ctx, name) for name in ctx.__slots__}
    values |= {name: getattr(inputs, name) for name in ("input_ids", "positions", "temperatures")}
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
