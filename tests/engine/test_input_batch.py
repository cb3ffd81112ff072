"""ScheduledBatch -> tensors, value by value."""

import numpy as np
import pytest
import torch

from nanovllm.engine import input_batch
from nanovllm.engine.decode_state import DecodeState
from nanovllm.engine.input_batch import InputBatch, PrefillShape
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import ScheduledBatch, Sequence
from nanovllm.sampling_params import SamplingParams

CPU = torch.device("cpu")


def make_state(block_size=4, device=CPU) -> DecodeState:
    """Eight rows; what nobody has written yet is -7 everywhere."""
    state = DecodeState.create(8, 4, block_size, device)
    for tensor in tensors_of(state).values():
        tensor.fill_(-7)
    return state


def tensors_of(value) -> dict[str, torch.Tensor]:
    """The tensors among the fields of a DecodeState, an InputBatch or a Context."""
    fields = {name: getattr(value, name) for name in value.__slots__}
    return {name: field for name, field in fields.items() if isinstance(field, torch.Tensor)}


def make_prefill(
    input_ids, cached, scheduled, tables, sampled=None, temperatures=None, seeds=None, rows=None
) -> ScheduledBatch:
    """tables: the block ids of each sequence, padded here with a block that is nobody's."""
    n, width = len(tables), max(map(len, tables))
    is_sampled = np.ones(n, np.bool_) if sampled is None else np.array(sampled)
    temperatures = np.array([1.0] * n if temperatures is None else temperatures, np.float32)
    return ScheduledBatch(
        is_prefill=True,
        rows=np.array(range(n) if rows is None else rows, np.int32),
        seq_ids=np.arange(n),
        num_cached_tokens=np.array(cached, np.int32),
        num_scheduled_tokens=np.array(scheduled, np.int32),
        is_sampled=is_sampled,
        all_greedy=not temperatures[is_sampled].any(),
        new_blocks=np.empty(0, np.int32),
        input_ids=np.array(input_ids, np.int32),
        block_tables=np.array([t + [99] * (width - len(t)) for t in tables], np.int32),
        temperatures=temperatures,
        seeds=np.array(range(n) if seeds is None else seeds, np.int64),
    )


def make_decode(rows, cached, new_blocks) -> ScheduledBatch:
    n = len(rows)
    return ScheduledBatch(
        is_prefill=False,
        rows=np.array(rows, np.int32),
        seq_ids=np.arange(n),
        num_cached_tokens=np.array(cached, np.int32),
        num_scheduled_tokens=np.ones(n, np.int32),
        is_sampled=np.ones(n, np.bool_),
        all_greedy=False,
        new_blocks=np.array(new_blocks, np.int32),
        input_ids=np.empty(0, np.int32),
        block_tables=np.empty((0, 0), np.int32),
        temperatures=np.empty(0, np.float32),
        seeds=np.empty(0, np.int64),
    )


def mixed_prefill() -> ScheduledBatch:
    """A cached prefix of one block, a whole prompt, and a chunk that does not reach the end."""
    return make_prefill(
        input_ids=[40, 41, 7, 8, 9, 30, 31],
        cached=[4, 0, 4],
        scheduled=[2, 3, 2],
        tables=[[5, 0], [3], [2, 6, 7]],
        sampled=[True, True, False],
        temperatures=[0.5, 0.0, 0.25],
        seeds=[2**62, 5, 2**63 - 1],
        rows=[3, 0, 6],
    )


def build_decode(batch, state, num_rows=None) -> InputBatch:
    """A decode step in a bucket of num_rows; None: without padding."""
    arrays = input_batch.decode_arrays(batch, num_rows or batch.num_seqs)
    t = input_batch.to_device(arrays, state.num_tokens.device)
    max_context_len = int(batch.num_cached_tokens.max()) + 1
    return input_batch.build_decode(t["rows"], t["new_blocks"], state, max_context_len)


def decode_after_prefill(device=CPU) -> tuple[DecodeState, ScheduledBatch]:
    """Rows 5, 2 and 0 hold 13, 4 and 9 tokens; row 0 has just got its third block."""
    state = make_state(device=device)
    tables = [[5, 0, 9, 2], [3], [8, 1]]
    prompts = make_prefill(
        range(24), [0, 0, 0], [12, 4, 8], tables, None, [0.5, 0, 1], [7, 8, 2**63 - 1], [5, 2, 0]
    )
    inputs = input_batch.build_prefill(prompts, state)
    state.append(inputs.rows, torch.tensor([90, 40, 70], device=device))
    return state, make_decode([0, 5, 2], [8, 12, 4], [6, -1, 11])


# -- prefill ---------------------------------------------------------------------------------------


def test_prefill_without_cached_context_needs_no_block_tables():
    batch = make_prefill([1, 2, 3, 4, 5, 6], [0, 0], [5, 1], [[2, 0], [1]])
    inputs = input_batch.build_prefill(batch, make_state())
    ctx = inputs.context
    assert ctx.is_prefill
    assert inputs.input_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert inputs.positions.tolist() == [0, 1, 2, 3, 4, 0]
    assert ctx.slot_mapping.tolist() == [8, 9, 10, 11, 0, 4]
    assert ctx.block_tables is None and ctx.context_lens is None
    assert ctx.cu_seqlens_q.tolist() == ctx.cu_seqlens_k.tolist() == [0, 5, 6]
    assert (ctx.max_seqlen_q, ctx.max_seqlen_k) == (5, 5)
    assert ctx.logits_indices.tolist() == [4, 5]
    assert inputs.rows.tolist() == [0, 1]
    assert inputs.draw_positions.tolist() == [5, 1]


def test_prefill_with_cached_context_counts_keys_to_the_end_of_the_chunk():
    """Keys counted to the end of the prompt read slots that nobody has written yet."""
    inputs = input_batch.build_prefill(mixed_prefill(), make_state())
    ctx = inputs.context
    assert inputs.positions.tolist() == [4, 5, 0, 1, 2, 4, 5]
    assert ctx.slot_mapping.tolist() == [0, 1, 12, 13, 14, 24, 25]
    assert ctx.cu_seqlens_q.tolist() == [0, 2, 5, 7]
    assert ctx.cu_seqlens_k.tolist() == [0, 6, 9, 15]
    assert (ctx.max_seqlen_q, ctx.max_seqlen_k) == (3, 6)
    assert (ctx.seqlens_q, ctx.seqlens_k) == ([2, 3, 2], [6, 3, 6])
    assert ctx.block_tables.tolist() == [[5, 0, 99], [3, 99, 99], [2, 6, 7]]


def test_only_sampled_sequences_have_logits_and_a_place_to_draw_for():
    inputs = input_batch.build_prefill(mixed_prefill(), make_state())
    assert inputs.context.logits_indices.tolist() == [1, 4]  # not of the chunk
    assert inputs.rows.tolist() == [3, 0]
    assert inputs.temperatures.tolist() == [0.5, 0.0]
    assert inputs.seeds.tolist() == [2**62, 5]
    assert inputs.draw_positions.tolist() == [6, 3]  # of the token to come


def test_chunk_without_any_sampled_sequence_needs_no_logits():
    batch = make_prefill([1, 2], [0], [2], [[0, 1]], sampled=[False])
    inputs = input_batch.build_prefill(batch, make_state())
    names = ("rows", "temperatures", "seeds", "draw_positions")
    assert [getattr(inputs, name).tolist() for name in names] == [[]] * 4
    assert inputs.context.logits_indices.tolist() == []


def test_prefill_enters_its_rows_into_the_state_and_touches_no_other():
    """The chunk's too: its next step is a prefill, but its decode steps find these there."""
    state = make_state()
    input_batch.build_prefill(mixed_prefill(), state)
    untouched = [-7] * 4
    assert state.num_tokens.tolist() == [3, -7, -7, 6, -7, -7, 6, -7, -7]
    assert state.block_tables.tolist() == [
        [3, 99, 99, -7],
        untouched,
        untouched,
        [5, 0, 99, -7],
        untouched,
        untouched,
        [2, 6, 7, -7],
        untouched,
        untouched,
    ]
    assert state.temperatures.tolist() == [0, -7, -7, 0.5, -7, -7, 0.25, -7, -7]
    assert state.seeds.tolist() == [5, -7, -7, 2**62, -7, -7, 2**63 - 1, -7, -7]
    assert state.last_tokens.tolist() == [-7] * 9  # known once sampled


@pytest.mark.parametrize("block_size", [1, 3, 256])
def test_slots_follow_the_block_table_at_any_block_size(block_size):
    num_tokens = 2 * block_size + 1
    tables = [[7, 2, 5], [0, 1, 6]]
    batch = make_prefill([0] * 2 * num_tokens, [0, 0], [num_tokens] * 2, tables)
    expected = [
        table[p // block_size] * block_size + p % block_size
        for table in tables
        for p in range(num_tokens)
    ]
    inputs = input_batch.build_prefill(batch, make_state(block_size))
    assert inputs.context.slot_mapping.tolist() == expected


def test_padding_tokens_are_a_sequence_to_attention():
    """Every row is computed: what lay in memory could be NaN, and reach others as 0 * NaN."""
    shape = PrefillShape(10, 5, 4, attends_padding=True)
    arrays = input_batch.prefill_arrays(mixed_prefill(), shape, block_size=4)
    assert arrays["cu_seqlens_q"].tolist() == [0, 2, 5, 7, 7, 7, 10]
    assert arrays["cu_seqlens_k"].tolist() == [0, 6, 9, 15, 15, 15, 18]


def test_padded_prefill_has_tokens_without_a_slot_and_sequences_without_a_token():
    """As a captured prefill is: of the sizes that were captured, whatever the batch."""
    arrays = input_batch.prefill_arrays(mixed_prefill(), PrefillShape(10, 5, 4), block_size=4)
    values = {name: array.tolist() for name, array in arrays.items()}
    assert values["input_ids"] == [40, 41, 7, 8, 9, 30, 31, 0, 0, 0]
    assert values["positions"] == [4, 5, 0, 1, 2, 4, 5, 0, 0, 0]
    assert values["slot_mapping"] == [0, 1, 12, 13, 14, 24, 25, -1, -1, -1]
    assert values["cu_seqlens_q"] == [0, 2, 5, 7, 7, 7]
    assert values["cu_seqlens_k"] == [0, 6, 9, 15, 15, 15]
    assert values["block_tables"][2:] == [[2, 6, 7, 0], [0] * 4, [0] * 4]
    assert (values["rows"], values["ends"]) == ([3, 0, 6, -1, -1], [6, 3, 6, 0, 0])
    assert values["sampled_rows"] == [3, 0, -1, -1, -1]
    assert values["sampled_ends"] == [6, 3, 0, 0, 0]
    assert values["logits_indices"] == [1, 4, 0, 0, 0]
    assert arrays["seeds"].view(np.int64).tolist() == [2**62, 5, 2**63 - 1, 0, 0]
    assert arrays["sampled_seeds"].view(np.int64).tolist() == [2**62, 5, 0, 0, 0]
    assert arrays["temperatures"].view(np.float32).tolist() == [0.5, 0, 0.25, 0, 0]
    assert arrays["sampled_temperatures"].view(np.float32).tolist() == [0.5, 0, 0, 0, 0]
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.int32)}


def test_padding_of_a_prefill_changes_no_row_that_is_anyone_s():
    plain, padded = make_state(), make_state()
    input_batch.build_prefill(mixed_prefill(), plain)
    arrays = input_batch.prefill_arrays(mixed_prefill(), PrefillShape(10, 5, 4), block_size=4)
    tensors = input_batch.to_device(arrays, CPU)
    inputs = input_batch.prefill_inputs(tensors, padded, [10], [10], has_cached_context=True)
    for name, tensor in tensors_of(padded).items():
        kept = (slice(8), slice(3)) if name == "block_tables" else slice(8)
        assert torch.equal(tensor[kept], tensors_of(plain)[name][kept]), name
    before = padded.num_tokens[:8].tolist()
    padded.append(inputs.rows, torch.arange(5))
    assert padded.num_tokens[:8].tolist() == [n + (row in (3, 0)) for row, n in enumerate(before)]


# -- decode ----------------------------------------------------------------------------------------


def test_decode_takes_one_slot_for_each_sequence_and_counts_the_new_token():
    state, batch = decode_after_prefill()
    inputs = build_decode(batch, state)
    ctx = inputs.context
    assert not ctx.is_prefill
    assert inputs.input_ids.tolist() == [70, 90, 40]
    assert inputs.positions.tolist() == [8, 12, 4]
    assert ctx.slot_mapping.tolist() == [24, 8, 44]
    assert ctx.context_lens.tolist() == inputs.draw_positions.tolist() == [9, 13, 5]
    assert ctx.max_context_len == 13
    tables = ctx.block_tables.tolist()
    assert [tables[0][:3], tables[1], tables[2][:2]] == [[8, 1, 6], [5, 0, 9, 2], [3, 11]]
    assert ctx.cu_seqlens_q is None and ctx.cu_seqlens_k is None
    assert inputs.rows.tolist() == [0, 5, 2]
    assert inputs.temperatures.tolist() == [1, 0.5, 0]
    assert inputs.seeds.tolist() == [2**63 - 1, 7, 8]


def test_decode_in_a_larger_bucket_is_the_same_and_then_padding():
    state, batch = decode_after_prefill()
    expected = build_decode(batch, state)
    padded = build_decode(batch, state, num_rows=6)
    assert padded.rows.tolist() == [0, 5, 2, -1, -1, -1]
    for name in ("input_ids", "positions", "temperatures", "seeds", "draw_positions"):
        assert torch.equal(getattr(padded, name)[:3], getattr(expected, name)), name
    for name in ("slot_mapping", "context_lens", "block_tables"):
        assert torch.equal(getattr(padded.context, name)[:3], getattr(expected.context, name))
    assert padded.context.slot_mapping[3:].tolist() == [-1] * 3
    assert padded.context.context_lens[3:].tolist() == [0] * 3
    assert padded.temperatures[3:].tolist() == padded.input_ids[3:].tolist() == [0] * 3


@pytest.mark.parametrize("num_rows", [3, 4, 9])
def test_rows_of_a_decode_step_are_padded_to_the_bucket(num_rows):
    batch = make_decode([4, 1, 0], [3, 4, 5], [-1, 8, -1])
    arrays = input_batch.decode_arrays(batch, num_rows)
    padding = [-1] * (num_rows - 3)
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.int32)}
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "rows": [4, 1, 0, *padding],
        "new_blocks": [-1, 8, -1, *padding],
    }


# -- both ------------------------------------------------------------------------------------------


def build(kind, device=CPU) -> InputBatch:
    if kind == "prefill":
        return input_batch.build_prefill(mixed_prefill(), make_state(device=device))
    state, batch = decode_after_prefill(device)
    return build_decode(batch, state)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_dtypes_are_those_of_the_contract(kind):
    inputs = build(kind)
    dtypes = {n: t.dtype for n, t in {**tensors_of(inputs), **tensors_of(inputs.context)}.items()}
    assert dtypes.pop("temperatures") == torch.float32
    assert dtypes.pop("seeds") == torch.int64
    assert {"input_ids", "positions", "rows", "slot_mapping", "block_tables"} <= dtypes.keys()
    assert set(dtypes.values()) == {torch.int32}


def test_arrays_cross_in_one_buffer_and_keep_their_shapes():
    arrays = {
        "a": np.arange(6, dtype=np.int32).reshape(2, 3),
        "b": np.array([7, 8], np.int32),
        "c": np.arange(33, dtype=np.int32),
        "d": np.empty((0, 2), np.int32),
        "e": np.array([9], np.int32),
    }
    size = input_batch.packed_size(arrays)
    out = torch.full((size,), -1, dtype=torch.int32)
    for given in (None, out):
        tensors = input_batch.to_device(arrays, CPU, given)
        assert tensors.keys() == arrays.keys()
        for name, tensor in tensors.items():
            assert tensor.shape == arrays[name].shape and tensor.dtype == torch.int32
            assert tensor.tolist() == arrays[name].tolist()
    storage = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    assert storage == {out.untyped_storage().data_ptr()}


def test_every_array_starts_aligned_whatever_the_sizes_before_it():
    """Triton compiles a kernel again for a pointer that is not: seconds, in the middle of a run."""
    for num_tokens in (1, 2, 15, 16, 17, 33):
        batch = make_prefill([0] * num_tokens, [0], [num_tokens], [[0] * 9])
        arrays = input_batch.prefill_arrays(batch, PrefillShape.of(batch), block_size=4)
        tensors = input_batch.to_device(arrays, CPU)
        first = tensors["seeds"].data_ptr()
        assert all((t.data_ptr() - first) % 64 == 0 for t in tensors.values() if t.numel())


def test_tensors_do_not_change_when_the_scheduler_goes_on():
    """On the CPU a tensor can be a view of an array, and the next step rewrites the tables."""
    scheduler = Scheduler(4, 64, 64, 4, 16, [0])
    state = DecodeState.create(4, 16, 4, CPU)
    scheduler.add(Sequence([1, 2, 3, 4], SamplingParams(), scheduler.max_len))
    for kind in ("prefill", "decode"):
        batch = scheduler.schedule()
        assert batch.is_prefill == (kind == "prefill")
        inputs = (
            input_batch.build_prefill(batch, state)
            if batch.is_prefill
            else build_decode(batch, state)
        )
        before = snapshot(inputs)
        state.append(inputs.rows, torch.tensor([5]))
        scheduler.update(batch, np.array([5]))
        for array in vars(scheduler.table).values():
            if isinstance(array, np.ndarray):
                array.view(np.uint8)[:] ^= 255
        assert snapshot(inputs) == before
        for array in vars(scheduler.table).values():
            if isinstance(array, np.ndarray):
                array.view(np.uint8)[:] ^= 255


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_gpu_tensors_equal_the_cpu_ones(kind):
    on_gpu = build(kind, torch.device("cuda"))
    assert on_gpu.input_ids.is_cuda
    assert snapshot(on_gpu) == snapshot(build(kind))


def snapshot(inputs: InputBatch) -> dict:
    values = {name: getattr(inputs.context, name) for name in inputs.context.__slots__}
    values |= {name: getattr(inputs, name) for name in inputs.__slots__ if name != "context"}
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
