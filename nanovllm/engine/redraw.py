"""Redrawer: draws again for the rows of a step that ask for more than a temperature.

Every row is drawn by the step itself, which may be a captured graph. Of the rows with penalties,
filters, masks or log-probabilities the logits are then copied, processed and drawn from once more,
so that the others pay nothing and the captured steps stay as they are. It knows rows and tensors.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.input_batch import to_device
from nanovllm.engine.sequence import SpecialRow
from nanovllm.engine.structured import fill_bitmask, new_bitmask
from nanovllm.kernels.sample import sample
from nanovllm.layers.logits import (
    Biases,
    History,
    LogitsParams,
    Penalties,
    pack_bad_words,
    plan_top,
    process_logits,
)
from nanovllm.layers.logprobs import Logprobs, gather_logprobs


class _Rows(NamedTuple):
    """One step's special rows on the device, [n] each."""

    places: torch.Tensor  # int64, among the step's sampled rows
    rows: torch.Tensor  # int64, of the table
    lens: torch.Tensor  # int32 tokens so far, which is where the drawn one will stand
    prompt_lens: torch.Tensor  # int32
    seeds: torch.Tensor  # int64


@dataclass(frozen=True)
class _Static:
    """What stays the same while the same sequences are drawn together."""

    seq_ids: list[int]
    params: LogitsParams
    uses_history: bool
    # Rows, among the special ones, of which log-probabilities are reported; and how many.
    logprob_rows: torch.Tensor | None
    num_logprobs: int


class Redrawer:
    def __init__(self, num_rows: int, max_len: int, device: torch.device) -> None:
        """num_rows, max_len: of the table of running sequences."""
        self._shape, self._device = (num_rows, max_len + 1), device
        self._history: torch.Tensor | None = None  # int32, made when a row first needs it
        self._static = _Static([], LogitsParams(torch.empty(0)), False, None, 0)

    def compile(self, vocab_size: int) -> None:
        """Draw for few rows and for many, as later steps will, from logits of another dtype than
        that of steps without such rows."""
        for n in (1, min(9, self._shape[0])):  # sample has another way with more than 8
            zeros = torch.zeros(n, dtype=torch.float32, device=self._device)
            sample(zeros.new_zeros(n, vocab_size), zeros, zeros.long(), zeros.int())

    def redraw(
        self, special: tuple[SpecialRow, ...], logits: torch.Tensor, tokens: torch.Tensor
    ) -> Logprobs | None:
        """Replace these rows' tokens in place; returns what they report of the raw logits.

        logits: float [num_sampled, vocab_size]; tokens: int64 [num_sampled]
        """
        rows = self._to_device(special)
        seq_ids = [row.ask.seq_id for row in special]
        if seq_ids != self._static.seq_ids:
            self._static = self._make_static(special, seq_ids, logits.size(1))
        static = self._static
        params = replace(
            static.params,
            biases=self._biases(special, static.params.biases),
            bitmask=self._bitmask(special, logits.size(1)),
            history=self._read_history(special, rows) if static.uses_history else None,
        )
        x = logits.index_select(0, rows.places).float()
        temperatures = process_logits(x, params)
        drawn = sample(x, temperatures, rows.seeds, rows.lens)
        tokens.index_copy_(0, rows.places, drawn)
        if static.uses_history:
            assert self._history is not None
            self._history[rows.rows, rows.lens.long()] = drawn.clamp(min=0).int()
        if static.logprob_rows is None:
            return None
        raw = logits.index_select(0, rows.places[static.logprob_rows])
        return gather_logprobs(raw, drawn[static.logprob_rows], static.num_logprobs)

    def _to_device(self, special: tuple[SpecialRow, ...]) -> _Rows:
        arrays = {
            "seeds": np.array([row.ask.seed for row in special], np.int64).view(np.int32),
            "places": np.array([row.place for row in special], np.int32),
            "rows": np.array([row.row for row in special], np.int32),
            "lens": np.array([row.num_tokens for row in special], np.int32),
            "prompt_lens": np.array([row.ask.num_prompt_tokens for row in special], np.int32),
        }
        t = to_device(arrays, self._device)
        seeds = t["seeds"].view(torch.int64)
        return _Rows(t["places"].long(), t["rows"].long(), t["lens"], t["prompt_lens"], seeds)

    def _make_static(
        self, special: tuple[SpecialRow, ...], seq_ids: list[int], vocab_size: int
    ) -> _Static:
        asked = [row.ask.params for row in special]
        penalties = self._make_penalties(special)
        # Greedy rows have no use for a filter.
        filters = ((0, 0, 1) if p.is_greedy else (p.min_p, p.top_k, p.top_p) for p in asked)
        min_p, top_k, top_p = zip(*filters, strict=True)
        has_top_p = min(top_p) < 1
        words = [row.ask.bad_words for row in special]
        with_logprobs = [i for i, p in enumerate(asked) if p.logprobs is not None]
        return _Static(
            seq_ids,
            LogitsParams(
                temperatures=self._tensor([p.temperature for p in asked], torch.float32),
                biases=self._make_biases(
                    (i, token, value)
                    for i, p in enumerate(asked)
                    for token, value in dict(p.logit_bias or ()).items()
                ),
                bad_words=self._move(pack_bad_words(words)) if any(words) else None,
                allowed=self._make_allowed(special),
                penalties=penalties,
                min_p=self._tensor(min_p, torch.float32) if any(min_p) else None,
                top_k=self._tensor(top_k, torch.int64) if any(top_k) or has_top_p else None,
                top_p=self._tensor(top_p, torch.float64) if has_top_p else None,
                top_plan=self._move(plan_top(top_k, top_p, vocab_size)),
            ),
            uses_history=penalties is not None or any(words),
            logprob_rows=self._tensor(with_logprobs, torch.int64) if with_logprobs else None,
            num_logprobs=max((asked[i].logprobs or 0 for i in with_logprobs), default=0),
        )

    def _make_penalties(self, special: tuple[SpecialRow, ...]) -> Penalties | None:
        asked = (row.ask.params for row in special)
        rows = [(p.presence_penalty, p.frequency_penalty, p.repetition_penalty) for p in asked]
        if all(row == (0, 0, 1) for row in rows):
            return None
        return Penalties(*self._tensor(rows, torch.float32).T.contiguous())

    def _tensor(self, values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)

    def _move(self, parts: Any) -> Any:
        """A NamedTuple with its tensors on the device."""
        return type(parts)(
            *(x.to(self._device) if isinstance(x, torch.Tensor) else x for x in parts)
        )

    def _make_biases(self, entries: Iterable[tuple[int, int, float]]) -> Biases | None:
        """entries: row, token id and value."""
        columns = list(zip(*entries, strict=True))
        if not columns:
            return None
        dtypes = torch.int64, torch.int64, torch.float32
        return Biases(*map(self._tensor, columns, dtypes))

    def _make_allowed(
        self, special: tuple[SpecialRow, ...]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        lists = [row.ask.params.allowed_token_ids or () for row in special]
        if not any(lists):
            return None
        rows = np.repeat(np.arange(len(lists)), [len(ids) for ids in lists])
        token_ids = np.concatenate([np.array(ids, np.int64) for ids in lists])
        return torch.from_numpy(rows).to(self._device), torch.from_numpy(token_ids).to(self._device)

    def _biases(self, special: tuple[SpecialRow, ...], static: Biases | None) -> Biases | None:
        """logit_bias, and the bans of tokens that would end a row before min_tokens."""
        bans = self._make_biases(
            (i, token_id, -np.inf)
            for i, row in enumerate(special)
            if row.num_tokens - row.ask.num_prompt_tokens < row.ask.params.min_tokens
            for token_id in row.ask.stop_ids
        )
        if static is None or bans is None:
            return bans or static
        return Biases(*(torch.cat(pair) for pair in zip(static, bans, strict=True)))

    def _bitmask(self, special: tuple[SpecialRow, ...], vocab_size: int) -> torch.Tensor | None:
        grammars = [row.ask.grammar for row in special]
        if not any(grammars):
            return None
        bitmask = new_bitmask(len(special), vocab_size, pin_memory=self._device.type == "cuda")
        fill_bitmask(grammars, bitmask)
        return bitmask.to(self._device, non_blocking=True)

    def _read_history(self, special: tuple[SpecialRow, ...], rows: _Rows) -> History:
        """The rows' tokens. A prefill brings all of them; each draw after it adds one."""
        if self._history is None:
            self._history = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        for row in special:
            if row.token_ids is not None:
                self._history[row.row, : row.num_tokens] = torch.from_numpy(row.token_ids).to(
                    self._device
                )
        width = max(row.num_tokens for row in special)
        return History(self._history[rows.rows, :width], rows.prompt_lens, rows.lens)
