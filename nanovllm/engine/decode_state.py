"""DecodeState: what a rank's device keeps of every row, so that a decode step needs little else.

A prefill writes its rows here; each decode step reads its inputs from here and leaves its tokens
here. All the host sends for a decode step is which rows take part and which of them start a block:

    row              0    1    2    3          batch of rows [3 0 1], new blocks [-1 8 -1]
    last_tokens      9    4    .    7          input_ids     7  9  4
    num_tokens      12    3    .   40          positions    39 11  2      context_lens 40 12 3
    block_tables   [5 .] [2]   .  [1 ..]       slots: row 0's token 11 goes to its new block 8
"""

from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.engine.sequence import IntArray
from nanovllm.kernels.decode_step import DecodeInputs, append_tokens, gather_inputs


@dataclass(frozen=True, slots=True)
class DecodeState:
    last_tokens: torch.Tensor  # int32 [num_rows] newest, its K/V not stored; -1: not finite
    num_tokens: torch.Tensor  # int32 [num_rows] that one included
    block_tables: torch.Tensor  # int32 [num_rows, max_num_blocks]
    temperatures: torch.Tensor  # float32 [num_rows]
    seeds: torch.Tensor  # int64 [num_rows]
    block_size: int

    @classmethod
    def create(
        cls, num_rows: int, max_num_blocks: int, block_size: int, device: torch.device
    ) -> "DecodeState":
        """The state of num_rows rows, and one row more, -1, that padding may write to."""
        num_rows += 1
        last_tokens, num_tokens = torch.zeros(2, num_rows, dtype=torch.int32, device=device)
        return cls(
            last_tokens=last_tokens,
            num_tokens=num_tokens,
            block_tables=torch.zeros(num_rows, max_num_blocks, dtype=torch.int32, device=device),
            temperatures=torch.zeros(num_rows, dtype=torch.float32, device=device),
            seeds=torch.zeros(num_rows, dtype=torch.int64, device=device),
            block_size=block_size,
        )

    def admit(
        self,
        rows: torch.Tensor,
        num_tokens: torch.Tensor,
        block_tables: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
    ) -> None:
        """Take over the rows of a prefill, [n] each, block_tables [n, width]; -1 is padding."""
        rows = rows.long()
        self.num_tokens[rows] = num_tokens
        self.block_tables[rows, : block_tables.size(1)] = block_tables
        self.temperatures[rows] = temperatures
        self.seeds[rows] = seeds

    def gather(
        self, rows: torch.Tensor, new_blocks: torch.Tensor, out: DecodeInputs | None = None
    ) -> DecodeInputs:
        """The inputs of a decode step of these rows; see gather_inputs."""
        if out is None and rows.is_cpu and rows.numpy().min(initial=0) >= 0:
            return self._gather_on_host(rows.numpy(), new_blocks.numpy())
        state = self.last_tokens, self.num_tokens, self.block_tables, self.temperatures, self.seeds
        return gather_inputs(rows, new_blocks, *state, self.block_size, out)

    def _gather_on_host(self, rows: IntArray, new_blocks: IntArray) -> DecodeInputs:
        """gather_inputs_ref for rows without padding, in numpy: the calls are what it costs."""
        block_size = np.int32(self.block_size)
        context_lens = self.num_tokens.numpy()[rows]
        positions = context_lens - np.int32(1)
        index, offsets = np.divmod(positions, block_size)
        if new_blocks.max(initial=-1) >= 0:
            starts = np.flatnonzero(new_blocks >= 0)
            self.block_tables.numpy()[rows[starts], index[starts]] = new_blocks[starts]
        tables = self.block_tables.numpy()[rows]
        slots = tables[np.arange(len(rows)), index] * block_size + offsets
        return DecodeInputs(
            input_ids=torch.from_numpy(np.maximum(self.last_tokens.numpy()[rows], 0)),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slots),
            context_lens=torch.from_numpy(context_lens),
            block_tables=torch.from_numpy(tables),
            temperatures=torch.from_numpy(self.temperatures.numpy()[rows]),
            seeds=torch.from_numpy(self.seeds.numpy()[rows]),
        )

    def append(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Make the sampled tokens the rows' newest; rows of -1 are padding."""
        append_tokens(rows, tokens, self.last_tokens, self.num_tokens)
