"""Intake: from what callers pass to requests, with everything that can be wrong found before."""

import struct
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from nanovllm.engine.faults import attempt, settle
from nanovllm.engine.params import bad_word_ids
from nanovllm.engine.prompts import PromptReader, read_sampling_params
from nanovllm.engine.request import Request
from nanovllm.engine.sequence import RowAsk, Sequence
from nanovllm.engine.structured import CompiledGrammar, GrammarCompiler
from nanovllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Means:
    """What sampling params come to with this model's tokenizer."""

    stop_ids: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]
    grammar: CompiledGrammar | None


@dataclass(slots=True)  # a frozen one takes three times as long to make
class Prepared:
    """One prompt, checked, or why it cannot be run."""

    index: int
    prompt_ids: Any  # int32 [num_tokens], or an exception
    params: SamplingParams
    means: Means | None
    called_at: float  # time.perf_counter()
    error: Exception | None = None


class Intake:
    def __init__(
        self, seed: int, tokenizer: Any, vocab_size: int, max_len: int, eos_token_ids: list[int]
    ) -> None:
        """seed: the engine's. max_len: tokens that the longest sequence may have."""
        self._seed, self._max_len = seed, max_len
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = eos_token_ids
        self._reader = PromptReader(tokenizer, vocab_size, max_len)
        self._grammars = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)
        # Of most params, with neither stop tokens nor words nor a grammar, by their ignore_eos.
        self._usual_means = Means(tuple(sorted({*eos_token_ids})), (), None), Means((), (), None)
        self._num_requests = 0

    def read(self, prompts: Any, params: Any, on_error: str = "raise") -> list[Prepared]:
        """Check all prompts and their params; the first error is raised, or kept in its place."""
        now = time.perf_counter()
        prompt_ids = self._reader.read(prompts, on_error)
        checked = read_sampling_params(params, len(prompt_ids), self._vocab_size, on_error)
        means = settle(self._mean_each(checked, isinstance(params, (list, tuple))), on_error)
        prepared = []
        for i, (ids, p, m) in enumerate(zip(prompt_ids, checked, means, strict=True)):
            # Where params are an error, so is what they mean.
            error = ids if isinstance(ids, Exception) else m if isinstance(m, Exception) else None
            prepared.append(Prepared(i, ids, p, m, now, error))
        return prepared

    def make(
        self, prepared: Prepared, is_streamed: bool = False, turn: int | None = None
    ) -> Request:
        """The request of a prompt that has no error. turn: None: as many as were made before."""
        turn = self._num_requests if turn is None else turn
        seqs = [self._make_sequence(prepared, i, turn) for i in range(prepared.params.n)]
        if prepared.params.prompt_logprobs is not None:
            seqs[0].num_prompt_logprobs = prepared.params.prompt_logprobs
        self._num_requests += 1
        return Request(prepared.index, seqs, self._tokenizer, is_streamed, prepared.called_at)

    def _mean_each(self, checked: list[Any], is_list: bool) -> list[Any]:
        """What each one's params mean; an error where they have no meaning or are one."""
        # Usually many prompts share one SamplingParams object, and then one error.
        known: dict[int, Any] = {}
        for i, p in enumerate(checked):
            if id(p) in known:
                continue
            if isinstance(p, Exception):
                known[id(p)] = p
            elif type(p) is SamplingParams and not (
                p.stop_token_ids or p.bad_words or p.structured_outputs
            ):
                known[id(p)] = self._usual_means[p.ignore_eos]
            else:
                known[id(p)] = attempt(self._mean, f"sampling_params[{i}]" if is_list else "", p)
        return [known[id(p)] for p in checked]

    def _mean(self, name: str, params: SamplingParams) -> Means:
        stop_ids = {*(params.stop_token_ids or ())}
        if not params.ignore_eos:
            stop_ids.update(self._eos_token_ids)
        grammar = None
        try:
            words = bad_word_ids(self._tokenizer, params.bad_words or (), self._vocab_size)
            if params.structured_outputs is not None:
                grammar = self._grammars.compile(dict(params.structured_outputs))
        except ValueError as error:
            raise ValueError(f"{name}.{error}" if name else str(error)) from error
        return Means(tuple(sorted(stop_ids)), tuple(words), grammar)

    def _make_sequence(self, prepared: Prepared, sample: int, turn: int) -> Sequence:
        """Its random numbers depend on the request's seed, or the engine's and the request's turn,
        and on which of the request's samples it is."""
        params, means = prepared.params, prepared.means
        assert means is not None, "a request with an error"
        if params.seed is None:
            key = struct.pack("<QQ", self._seed, turn)
        else:
            key = b"request" + struct.pack("<q", params.seed)
        if sample:
            key += struct.pack("<Q", sample)
        seed = xxhash.xxh64_intdigest(key) >> 1
        seq = Sequence(prepared.prompt_ids, params, self._max_len, seed)
        if not params.is_plain:
            num_tokens = seq.num_prompt_tokens
            grammar = None if means.grammar is None else means.grammar.start()
            seq.ask = RowAsk(
                seq.seq_id, params, num_tokens, seed, means.stop_ids, means.bad_words, grammar
            )
        return seq


def known_prompt_ids(prepared: Prepared) -> list[int]:
    """The ids of a prompt that could be read, though it cannot be run."""
    ids = prepared.prompt_ids
    return ids.tolist() if isinstance(ids, np.ndarray) else []
