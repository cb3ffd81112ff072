"""Sequence, its row of running state, and ScheduledBatch: all that crosses to the model runner.

A waiting sequence holds its own token ids. An admitted one owns a *row* of the SequenceTable, and
everything that changes from step to step lives in that row, so that one numpy call advances every
running sequence and no step loops over tokens in Python.

    SequenceTable, block size 4, a row with 10 tokens of which 9 have their K/V stored:

    token_ids[row]     | 7 3 9 1 | 4 4 8 2 | 5 6 . . | . . .     num_tokens = 10
    block_tables[row]  |    5    |    0    |    9    |           num_blocks = 3
    K/V stored         | x x x x | x x x x | x       |           num_cached_tokens = 9

With overlap, a step is launched before the tokens of the one before are known. Such a token has a
position and a slot already, so num_cached_tokens moves on with the launch, and num_tokens when the
token is read back. A running sequence has num_cached_tokens + 1 tokens, read back or not.
"""

import enum
import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nanovllm.outputs import FinishReason
from nanovllm.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int32]


class SequenceStatus(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class SequenceTable:
    """State of the admitted sequences, one row each, as arrays over rows."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int) -> None:
        """num_rows sequences at once, each of at most max_model_len tokens."""
        max_num_blocks = -(-max_model_len // block_size)
        # np.empty takes no memory until a page is written, so long limits cost nothing up front.
        self.token_ids: IntArray = np.empty((num_rows, max_model_len), np.int32)
        self.block_tables: IntArray = np.zeros((num_rows, max_num_blocks), np.int32)
        self.num_tokens: IntArray = np.zeros(num_rows, np.int32)
        self.num_cached_tokens: IntArray = np.zeros(num_rows, np.int32)  # K/V stored or launched
        self.num_blocks: IntArray = np.zeros(num_rows, np.int32)
        self.stop_len: IntArray = np.zeros(num_rows, np.int32)  # num_tokens that ends the request
        self.ignore_eos: npt.NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self.temperatures: npt.NDArray[np.float32] = np.zeros(num_rows, np.float32)
        self.seeds: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.is_special: npt.NDArray[np.bool_] = np.zeros(num_rows, np.bool_)  # has a RowAsk
        self.has_stop_ids: npt.NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self.prompt_logprobs: IntArray = np.full(num_rows, -1, np.int32)  # -1: not asked for
        self.seq_ids: npt.NDArray[np.int64] = np.full(num_rows, -1, np.int64)  # -1: free row
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.free_rows = list(range(num_rows - 1, -1, -1))


_seq_ids = itertools.count()


@dataclass(frozen=True, slots=True, eq=False)
class RowAsk:
    """What a sequence asks for beyond a temperature, as far as it stays the same."""

    seq_id: int
    params: SamplingParams
    num_prompt_tokens: int
    seed: int
    stop_ids: tuple[int, ...]  # that would end it, not drawn before min_tokens
    bad_words: tuple[tuple[int, ...], ...]  # banned token sequences
    grammar: Any  # structured.GrammarState, advanced by the engine; or None


class SpecialRow(NamedTuple):
    """A sampled row of a step whose sequence has a RowAsk."""

    place: int  # among the step's sampled rows
    row: int  # of the table
    num_tokens: int  # prompt and output so far
    token_ids: IntArray | None  # all of them, in a prefill; a decode adds one to what is known
    ask: RowAsk


class Sequence:
    """One request: its prompt, its sampling parameters, and, while admitted, a row of the table."""

    __slots__ = (
        *("admitted_at", "ask", "block_hashes", "finish_reason", "finished_at", "first_token_at"),
        *("num_hit_tokens", "num_prompt_logprobs", "num_prompt_tokens", "row", "sampling_params"),
        *("seed", "seq_id", "status", "stop_len", "stop_reason", "_table", "_token_ids"),
    )

    def __init__(
        self, token_ids: npt.ArrayLike, sampling_params: SamplingParams, max_len: int, seed: int = 0
    ) -> None:
        """token_ids: the prompt, at least one id and fewer than max_len; copied.

        max_len: tokens (prompt + output) at which the request ends with reason "length".
        seed: of this request's random numbers, int64; with a position it names one draw.
        """
        self.seq_id = next(_seq_ids)
        self.seed = seed
        self.sampling_params = sampling_params
        self._token_ids: IntArray = np.array(token_ids, np.int32)
        self.num_prompt_tokens = len(self._token_ids)
        assert 0 < self.num_prompt_tokens < max_len, (self.num_prompt_tokens, max_len)
        limit = sampling_params.max_tokens
        self.stop_len = max_len if limit is None else min(max_len, self.num_prompt_tokens + limit)
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None  # what ended it, unless an EOS did
        self.ask: RowAsk | None = None
        self.num_prompt_logprobs = -1  # to report of each prompt token; -1: none asked for
        self.num_hit_tokens: int | None = None  # of the prompt, found in the prefix cache
        self.admitted_at = self.first_token_at = self.finished_at = 0.0  # time.perf_counter()
        self.row: int | None = None
        # Chained hashes of the leading full blocks, each computed once (block_manager.py).
        self.block_hashes: list[int] = []
        self._table: SequenceTable | None = None

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def num_tokens(self) -> int:
        if self._table is None or self.row is None:
            return len(self._token_ids)
        return self._table.num_tokens.item(self.row)

    @property
    def token_ids(self) -> IntArray:
        """int32 [num_tokens], prompt then completion; a view, valid until the next step."""
        if self._table is None:
            return self._token_ids
        return self._table.token_ids[self.row, : self.num_tokens]

    @property
    def completion_token_ids(self) -> IntArray:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def last_token(self) -> int:
        return int(self.token_ids[-1])

    @property
    def num_cached_tokens(self) -> int:
        if self._table is None or self.row is None:
            return 0
        return self._table.num_cached_tokens.item(self.row)

    @property
    def block_table(self) -> IntArray:
        """int32 [blocks held], in order; empty while the sequence is not admitted."""
        if self._table is None:
            return np.empty(0, np.int32)
        return self._table.block_tables[self.row, : self._table.num_blocks[self.row]]

    def enter(self, table: SequenceTable) -> None:
        """Take a free row of the table and copy the state into it; no token is cached yet."""
        row, params = table.free_rows.pop(), self.sampling_params
        n = len(self._token_ids)
        table.token_ids[row, :n] = self._token_ids
        table.num_tokens[row] = n
        table.num_cached_tokens[row] = 0
        table.num_blocks[row] = 0
        table.stop_len[row] = self.stop_len
        table.ignore_eos[row] = params.ignore_eos
        table.temperatures[row] = params.temperature
        table.seeds[row] = self.seed
        table.is_special[row] = self.ask is not None
        table.has_stop_ids[row] = params.stop_token_ids is not None
        table.prompt_logprobs[row] = self.num_prompt_logprobs
        table.seq_ids[row] = self.seq_id
        table.sequences[row] = self
        self._table, self.row = table, row

    def leave(self) -> None:
        """Copy the tokens out and give the row back; the blocks must have been freed before."""
        table, row = self._table, self.row
        assert table is not None and row is not None
        assert table.num_blocks[row] == 0, "a row was left with blocks in its table"
        self._token_ids = self.token_ids.copy()
        table.sequences[row] = None
        table.seq_ids[row] = -1
        table.free_rows.append(row)
        self._table, self.row = None, None


def _empty(*shape: int, dtype: type = np.int32) -> Any:
    """A field that is empty unless it is given."""
    return field(default_factory=lambda: np.empty(shape, dtype))


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step's work. Arrays have one entry per scheduled sequence, in batch order.

    A prefill carries all that the device needs to know of its rows. A decode carries only what
    changed: the device keeps each row's newest token, length and block table (decode_state.py).
    """

    is_prefill: bool
    rows: IntArray  # rows of the SequenceTable, and of the device's DecodeState
    seq_ids: npt.NDArray[np.int64]  # who owned the rows when the step was scheduled
    num_cached_tokens: IntArray  # tokens before the scheduled ones, their K/V is in the cache
    num_scheduled_tokens: IntArray  # how many of input_ids are this sequence's; decode: 1
    is_sampled: npt.NDArray[np.bool_]  # False for a chunk that does not reach the prompt's end
    all_greedy: bool  # every sampled sequence has temperature 0
    # A prefill of each prompt's last token alone: a decode, once the device knows its rows.
    as_decode: bool = False
    # Decode: the block in which this step's token takes the first slot, -1 where it takes another.
    new_blocks: IntArray = _empty(0)
    # Prefill, otherwise empty:
    input_ids: IntArray = _empty(0)  # [num_tokens] to compute, packed without padding
    # [num_seqs, widest table]; entries past a sequence's own are stale
    block_tables: IntArray = _empty(0, 0)
    temperatures: npt.NDArray[np.float32] = _empty(0, dtype=np.float32)
    seeds: npt.NDArray[np.int64] = _empty(0, dtype=np.int64)
    # [num_seqs] how many log-probabilities to report of each prompt token, -1 for none, and
    # [num_tokens] the token after each of input_ids; both empty where nobody asks.
    prompt_logprobs: IntArray = _empty(0)
    next_ids: IntArray = _empty(0)
    # [n, 3] K/V to copy ahead of all else: from this block to that one, so many leading tokens.
    copies: IntArray = _empty(0, 3)
    # Decode, and as_decode: [num_groups, 4] which rows share leading keys, see prefix_groups.py.
    groups: IntArray = _empty(0, 4)
    # Rows that rank 0 draws again; is_redrawn tells the other ranks that it does.
    special: tuple[SpecialRow, ...] = ()
    is_redrawn: bool = False

    @property
    def num_seqs(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids) if self.is_prefill else len(self.rows)
