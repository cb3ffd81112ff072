"""DecodeState: what a row holds after its prefill, and how decode steps read and advance it."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanovllm.engine.decode_state import DecodeState
from nanovllm.kernels import decode_step, launch

CPU = torch.device("cpu")


def ints(*values, device=CPU) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def docstring_state() -> DecodeState:
    """The drawing of decode_state.py: rows 0, 1 and 3 hold 12, 3 and 40 tokens in blocks of 4."""
    state = DecodeState.create(4, 12, 4, CPU)
    tables = torch.zeros(3, 12, dtype=torch.int32)
    tables[0, :2], tables[1, 0] = ints(5, 6), 2
    tables[2, :10] = torch.arange(20, 30, dtype=torch.int32)
    seeds = torch.tensor([2**63 - 1, 1, 2])
    state.admit(ints(0, 1, 3), ints(11, 2, 39), tables, torch.tensor([0.0, 0.5, 1]), seeds)
    state.append(ints(0, 1, 3), torch.tensor([9, 4, 7]))
    return state


def fields(value) -> dict[str, torch.Tensor]:
    tensors = {name: getattr(value, name) for name in value.__slots__}
    return {name: tensor for name, tensor in tensors.items() if name != "block_size"}


# -- one row after the other -----------------------------------------------------------------------


def test_new_state_has_one_row_more_for_padding():
    state = DecodeState.create(3, 5, 4, CPU)
    assert {name: tuple(t.shape) for name, t in fields(state).items()} == {
        "last_tokens": (4,),
        "num_tokens": (4,),
        "block_tables": (4, 5),
        "temperatures": (4,),
        "seeds": (4,),
    }
    assert state.seeds.dtype == torch.int64 and state.temperatures.dtype == torch.float32


def test_inputs_of_a_step_follow_the_batch_s_order():
    inputs = docstring_state().gather(ints(3, 0, 1), ints(-1, 8, -1))
    assert inputs.input_ids.tolist() == [7, 9, 4]
    assert inputs.positions.tolist() == [39, 11, 2]
    assert inputs.context_lens.tolist() == [40, 12, 3]
    assert inputs.slot_mapping.tolist() == [29 * 4 + 3, 8 * 4 + 3, 2 * 4 + 2]
    assert inputs.temperatures.tolist() == [1, 0, 0.5]
    assert inputs.seeds.tolist() == [2, 2**63 - 1, 1]


def test_new_block_goes_where_the_input_token_stands_and_stays():
    state = docstring_state()
    inputs = state.gather(ints(3, 0, 1), ints(-1, 8, -1))
    assert inputs.block_tables[1, :3].tolist() == [5, 6, 8]
    assert state.block_tables[0, :3].tolist() == [5, 6, 8]
    again = state.gather(ints(0), ints(-1))
    assert again.slot_mapping.tolist() == [8 * 4 + 3]
    assert state.block_tables[1, :2].tolist() == [2, 0]
    assert state.block_tables[3, :10].tolist() == list(range(20, 30))


def test_padding_has_no_slot_no_context_and_no_new_block():
    state = docstring_state()
    before = {name: tensor.clone() for name, tensor in fields(state).items()}
    inputs = state.gather(ints(1, -1, -1), ints(-1, -1, 9))
    assert inputs.slot_mapping.tolist() == [10, -1, -1]
    assert inputs.context_lens.tolist() == [3, 0, 0]
    assert inputs.positions.tolist() == [2, 0, 0]
    assert inputs.input_ids.tolist() == [4, 0, 0]
    assert inputs.temperatures.tolist() == [0.5, 0, 0]
    state.append(ints(-1, -1), torch.tensor([3, 3]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in fields(state).items())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_append_makes_each_token_its_row_s_newest(dtype):
    state = docstring_state()
    state.append(ints(3, -1, 0), torch.tensor([70, 80, -1], dtype=dtype))
    assert state.last_tokens[:4].tolist() == [-1, 4, 0, 70]
    assert state.num_tokens[:4].tolist() == [13, 3, 0, 41]
    # What is not a token (bad logits) is read as 0; the host ends the request one step later.
    inputs = state.gather(ints(0), ints(8))
    assert (inputs.input_ids.tolist(), inputs.positions.tolist()) == ([0], [12])


def test_next_owner_of_a_row_finds_nothing_of_the_last_one():
    state = docstring_state()
    state.append(ints(3), torch.tensor([70]))  # the surplus token of a step in flight
    state.admit(ints(3), ints(2), ints(15, 16)[None], torch.tensor([0.25]), torch.tensor([8]))
    state.append(ints(3), torch.tensor([6]))
    inputs = state.gather(ints(3), ints(-1))
    assert (inputs.input_ids.tolist(), inputs.positions.tolist()) == ([6], [2])
    assert (inputs.slot_mapping.tolist(), inputs.context_lens.tolist()) == ([15 * 4 + 2], [3])
    assert (inputs.temperatures.tolist(), inputs.seeds.tolist()) == ([0.25], [8])


def test_rows_decode_on_from_step_to_step():
    state = DecodeState.create(1, 3, 2, CPU)
    state.admit(ints(0), ints(1), ints(7)[None], torch.ones(1), torch.zeros(1, dtype=torch.int64))
    slots = []
    state.append(ints(0), torch.tensor([10]))
    for token, new_block in enumerate([-1, 3, -1, 5, -1], start=11):
        inputs = state.gather(ints(0), ints(new_block))
        assert inputs.input_ids.tolist() == [token - 1]
        slots += inputs.slot_mapping.tolist()
        state.append(ints(0), torch.tensor([token]))
    assert slots == [15, 6, 7, 10, 11]
    assert state.block_tables[0].tolist() == [7, 3, 5]


# -- the kernels -----------------------------------------------------------------------------------


def random_state(generator, num_rows, max_num_blocks, block_size, device) -> DecodeState:
    def integers(high, *shape, dtype=torch.int32, low=0):
        return torch.randint(low, high, shape, generator=generator, dtype=dtype).to(device)

    state = DecodeState.create(num_rows, max_num_blocks, block_size, device)
    state.last_tokens.copy_(integers(1000, num_rows + 1, low=-1))
    state.num_tokens.copy_(integers(max_num_blocks * block_size + 1, num_rows + 1, low=1))
    state.block_tables.copy_(integers(10_000, num_rows + 1, max_num_blocks))
    state.temperatures.copy_(integers(100, num_rows + 1) / 64)
    state.seeds.copy_(integers(2**62, num_rows + 1, dtype=torch.int64, low=-(2**62)))
    return state


def check_kernels(num_seqs, num_padding, max_num_blocks, block_size, device=CPU) -> None:
    """A step through the kernels and through the references, compared to the last bit.

    Of padding, the block table and the seed are nobody's and may be anything.
    """
    generator = torch.Generator().manual_seed(num_seqs)
    state = random_state(generator, num_seqs + 3, max_num_blocks, block_size, device)
    expected_state = replace(state, **{name: t.clone() for name, t in fields(state).items()})
    rows = torch.randperm(num_seqs + 3, generator=generator, dtype=torch.int32)[:num_seqs]
    padding = torch.full((num_padding,), -1, dtype=torch.int32)
    rows = torch.cat([rows, padding]).to(device)
    starts_block = (state.num_tokens[rows.long()] - 1) % block_size == 0
    fresh = torch.randint(20_000, 30_000, rows.shape, generator=generator, dtype=torch.int32)
    new_blocks = torch.where(starts_block & (rows >= 0), fresh.to(device), -1)
    tokens = torch.randint(-1, 1000, rows.shape, generator=generator).to(device)

    assert launch.use_triton(rows)
    actual = state.gather(rows, new_blocks)
    out = decode_step.DecodeInputs.empty(len(rows), max_num_blocks, device)
    assert state.gather(rows, new_blocks, out) is out  # a second time changes nothing
    arguments = fields(expected_state)
    expected = decode_step.gather_inputs_ref(rows, new_blocks, **arguments, block_size=block_size)
    for name, tensor in fields(expected).items():
        n = num_seqs if name in ("block_tables", "seeds") else len(rows)
        for given in (actual, out):
            assert getattr(given, name).dtype == tensor.dtype, name
            assert torch.equal(getattr(given, name)[:n], tensor[:n]), name

    state.append(rows, tokens)
    decode_step.append_tokens_ref(
        rows, tokens, expected_state.last_tokens, expected_state.num_tokens
    )
    for name, tensor in fields(expected_state).items():
        assert torch.equal(getattr(state, name), tensor), name


CASES = [  # num_seqs, num_padding, max_num_blocks, block_size
    (1, 0, 1, 256),
    (1, 3, 16, 256),
    (15, 1, 16, 1),
    (15, 0, 5, 3),
    (17, 7, 33, 16),
    (17, 130, 16, 4),  # several programs of append_tokens, the last ones all padding
]


def check_interpreted() -> None:
    with launch.interpreted():
        for case in CASES:
            check_kernels(*case)


@pytest.mark.skipif(launch.missing_triton is not None, reason="needs Triton")
def test_interpreted_kernels_equal_the_references():
    """In a process of its own, as Triton decides when a kernel is defined."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "import test_decode_state; test_decode_state.check_interpreted()"
    subprocess.run([sys.executable, "-c", code], env=env, check=True, cwd=Path(__file__).parent)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_compiled_kernels_equal_the_references(case):
    check_kernels(*case, device=torch.device("cuda"))
