"""The two ends of a decode step: its inputs out of the rows' state, its tokens back into it.

gather_inputs reads what the device keeps of each row (engine/decode_state.py) and lays it out by
batch entry; append_tokens advances the rows by the sampled tokens. Between them no number of the
step passes through the host, so a captured step can be replayed again and again.
"""

from dataclasses import dataclass

import torch

from nanovllm.kernels import launch
from nanovllm.kernels.launch import tl, triton


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """One entry per batch row; padding has slot -1 and context length 0."""

    input_ids: torch.Tensor  # int32 [n]
    positions: torch.Tensor  # int32 [n] of the input token
    slot_mapping: torch.Tensor  # int32 [n]
    context_lens: torch.Tensor  # int32 [n] positions + 1
    block_tables: torch.Tensor  # int32 [n, max_num_blocks]
    temperatures: torch.Tensor  # float32 [n]
    seeds: torch.Tensor  # int64 [n]

    @classmethod
    def empty(cls, n: int, max_num_blocks: int, device: torch.device) -> "DecodeInputs":
        def ints(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        return cls(
            input_ids=ints(n),
            positions=ints(n),
            slot_mapping=ints(n),
            context_lens=ints(n),
            block_tables=ints(n, max_num_blocks),
            temperatures=torch.empty(n, dtype=torch.float32, device=device),
            seeds=torch.empty(n, dtype=torch.int64, device=device),
        )


def gather_inputs_ref(
    rows: torch.Tensor, new_blocks: torch.Tensor, last_tokens: torch.Tensor,
    num_tokens: torch.Tensor, block_tables: torch.Tensor, temperatures: torch.Tensor,
    seeds: torch.Tensor, block_size: int,
) -> DecodeInputs:  # fmt: skip
    is_real = rows >= 0
    at = rows.clamp(min=0).long()
    context_lens = num_tokens[at] * is_real
    positions = (context_lens - 1).clamp_(min=0)
    index = (positions // block_size).long()
    starts_block = (new_blocks >= 0) & is_real
    if starts_block.any():
        block_tables[at[starts_block], index[starts_block]] = new_blocks[starts_block]
    tables = block_tables[at]
    slots = tables.gather(1, index[:, None])[:, 0] * block_size + positions % block_size
    return DecodeInputs(
        input_ids=last_tokens[at].clamp_(min=0) * is_real,
        positions=positions,
        slot_mapping=torch.where(is_real, slots, -1),
        context_lens=context_lens,
        block_tables=tables,
        temperatures=temperatures[at] * is_real,
        seeds=seeds[at],
    )


@triton.jit
def _gather_inputs_kernel(
    rows_ptr, new_blocks_ptr, last_tokens_ptr, num_tokens_ptr, block_tables_ptr, temperatures_ptr,
    seeds_ptr, input_ids_ptr, positions_ptr, slot_mapping_ptr, context_lens_ptr, out_tables_ptr,
    out_temperatures_ptr, out_seeds_ptr, max_num_blocks,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program per batch row. It never releases a dependent launch early (see launch.py)."""
    i = tl.program_id(0)
    row = tl.load(rows_ptr + i)
    is_real = row >= 0
    at = tl.maximum(row, 0).to(tl.int64)
    length = tl.load(num_tokens_ptr + at, mask=is_real, other=0)
    position = tl.maximum(length - 1, 0)
    index = position // BLOCK_SIZE
    new_block = tl.load(new_blocks_ptr + i)
    starts_block = is_real & (new_block >= 0)
    column = tl.arange(0, WIDTH)
    inside = column < max_num_blocks
    table = tl.load(block_tables_ptr + at * max_num_blocks + column, mask=inside, other=0)
    table = tl.where(starts_block & (column == index), new_block, table)
    tl.store(out_tables_ptr + i.to(tl.int64) * max_num_blocks + column, table, mask=inside)
    tl.store(block_tables_ptr + at * max_num_blocks + index, new_block, mask=starts_block)
    block = tl.sum(tl.where(column == index, table, 0), 0)
    slot = tl.where(is_real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    token = tl.load(last_tokens_ptr + at, mask=is_real, other=0)
    tl.store(input_ids_ptr + i, tl.maximum(token, 0))
    tl.store(positions_ptr + i, position)
    tl.store(slot_mapping_ptr + i, slot)
    tl.store(context_lens_ptr + i, length)
    tl.store(out_temperatures_ptr + i, tl.load(temperatures_ptr + at, mask=is_real, other=0.0))
    tl.store(out_seeds_ptr + i, tl.load(seeds_ptr + at))


def gather_inputs(
    rows: torch.Tensor, new_blocks: torch.Tensor, last_tokens: torch.Tensor,
    num_tokens: torch.Tensor, block_tables: torch.Tensor, temperatures: torch.Tensor,
    seeds: torch.Tensor, block_size: int, out: DecodeInputs | None = None,
) -> DecodeInputs:  # fmt: skip
    """The inputs of a decode step; also writes the new blocks into the rows' tables.

    rows: int32 [n], -1 for padding. new_blocks: int32 [n], the block that holds the input token's
    slot where it is the first of that block, otherwise -1.
    last_tokens, num_tokens: int32 [num_rows]; -1 as a token (not finite) is read as 0.
    block_tables: int32 [num_rows, max_num_blocks]. temperatures: float32, seeds: int64 [num_rows].
    out: where to write; None: new tensors.
    """
    if not launch.use_triton(rows):
        assert out is None, "the reference returns new tensors"
        state = (last_tokens, num_tokens, block_tables, temperatures, seeds)
        return gather_inputs_ref(rows, new_blocks, *state, block_size)
    max_num_blocks = block_tables.size(1)
    if out is None:
        out = DecodeInputs.empty(len(rows), max_num_blocks, rows.device)
    _gather_inputs_kernel[(len(rows),)](
        rows, new_blocks, last_tokens, num_tokens, block_tables, temperatures, seeds,
        out.input_ids, out.positions, out.slot_mapping, out.context_lens, out.block_tables,
        out.temperatures, out.seeds, max_num_blocks,
        BLOCK_SIZE=block_size, WIDTH=launch.next_power_of_2(max_num_blocks), num_warps=1,
    )  # fmt: skip
    return out


def append_tokens_ref(
    rows: torch.Tensor, tokens: torch.Tensor, last_tokens: torch.Tensor, num_tokens: torch.Tensor
) -> None:
    rows, tokens = rows[rows >= 0].long(), tokens[rows >= 0]
    last_tokens[rows] = tokens.to(last_tokens.dtype)
    num_tokens[rows] += 1


@triton.jit(do_not_specialize=["n"])
def _append_tokens_kernel(
    rows_ptr, tokens_ptr, last_tokens_ptr, num_tokens_ptr, n, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + i, mask=i < n, other=-1)
    is_real = row >= 0
    token = tl.load(tokens_ptr + i, mask=is_real, other=0)
    tl.store(last_tokens_ptr + row, token.to(tl.int32), mask=is_real)
    length = tl.load(num_tokens_ptr + row, mask=is_real, other=0)
    tl.store(num_tokens_ptr + row, length + 1, mask=is_real)


def append_tokens(
    rows: torch.Tensor, tokens: torch.Tensor, last_tokens: torch.Tensor, num_tokens: torch.Tensor
) -> None:
    """Make each token its row's newest: last_tokens and num_tokens [num_rows] are changed.

    rows: int32 [n], no row twice, -1 for padding. tokens: int64 or int32 [n].
    """
    if not launch.use_triton(rows):
        append_tokens_ref(rows, tokens, last_tokens, num_tokens)
        return
    n, block = len(rows), 128
    _append_tokens_kernel[(-(-n // block),)](
        rows, tokens, last_tokens, num_tokens, n, BLOCK=block, num_warps=4
    )
