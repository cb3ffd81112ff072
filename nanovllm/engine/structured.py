"""Structured output: a schema, regex, grammar or choice as the mask of the tokens that may follow.

Owns compiling with xgrammar, the compiled grammars, and each sample's place in its grammar. Does
not know logits or requests: the sampler applies the mask, the engine says which token came.
"""

import functools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanovllm.engine.json_schema import MAX_CHARS, check_regex, read_schema
from nanovllm.engine.tokenizer import whole_tokenizer

MAX_CACHED = 256  # compiled grammars, 0.1 to 10 MB each
MAX_COMPILE_SECONDS = 30.0  # a few short specifications would take hours


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """Shared by all requests with the same specification."""

    matcher: Any  # xgrammar.GrammarMatcher at its start: forked, never advanced
    vocab_size: int
    has_stop_tokens: bool

    def start(self) -> "GrammarState":
        """The state of one sample that has no output yet."""
        return GrammarState(self, self.matcher.fork())


class GrammarState:
    """Where one sample is in its grammar: on the host, beside its request, never pickled.

    A complete output allows the stop tokens, and only them when nothing else may follow; accepting
    one terminates it. A model without stop tokens terminates when nothing may follow. The engine
    then ends the request with reason "stop", also with ignore_eos: no token could come next.
    """

    def __init__(self, grammar: CompiledGrammar, matcher: Any) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self.is_terminated = False

    def accept(self, token_id: int) -> bool:
        """Advance by a token; False, and nothing changes, if it may not follow."""
        if self.is_terminated or not self._matcher.accept_token(token_id):
            return False
        self.is_terminated = self._matcher.is_terminated()
        if not self._grammar.has_stop_tokens and self._matcher.is_completed():
            self.is_terminated = not _allows_any(self._matcher, self._grammar.vocab_size)
        return True


def new_bitmask(num_rows: int, vocab_size: int, pin_memory: bool = False) -> torch.Tensor:
    """int32 [num_rows, ceil(vocab_size / 32)] on the CPU: bit i % 32 of word i // 32 is token i."""
    shape = (num_rows, -(-vocab_size // 32))
    return torch.full(shape, -1, dtype=torch.int32, pin_memory=pin_memory)


def fill_bitmask(states: Sequence[GrammarState | None], bitmask: torch.Tensor) -> None:
    """Write each row's mask in place, all ones without a grammar or after its end.

    bitmask: int32 [num_rows >= len(states), ceil(vocab_size / 32)] of new_bitmask
    """
    bitmask.fill_(-1)
    running = {i: s._matcher for i, s in enumerate(states) if s and not s.is_terminated}
    if running:
        # xgrammar might take a pinned tensor for one on a device; numpy's view is on the host.
        fill = _batch_matcher().batch_fill_next_token_bitmask
        fill([*running.values()], bitmask.numpy(), [*running])


@functools.cache
def _batch_matcher() -> Any:
    """Fills rows side by side, on threads of its own."""
    return _import_xgrammar().BatchGrammarMatcher()


class GrammarCompiler:
    """Compiles specifications for one model; the same specification gives the same object."""

    def __init__(self, tokenizer: Any, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        """vocab_size: rows of the model's logits; ids beyond the tokenizer's are never allowed.

        stop_token_ids: the model's EOS ids, each of them allowed when an output is complete.
        """
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.stop_token_ids = sorted(stop_token_ids)
        self._compiler: Any = None
        self._cache: OrderedDict[str, CompiledGrammar] = OrderedDict()

    def compile(self, spec: Mapping[str, Any]) -> CompiledGrammar:
        """The grammar of {"json_schema": ..}, {"regex": ..}, {"grammar": ..} or {"choice": ..}.

        spec: as SamplingParams lets it through. json_schema is an object or its text, grammar is
        EBNF with a rule `root`, choice is a list of strings. Raises ValueError for one that cannot
        be read or asks for what cannot be held to.
        """
        try:
            kind, text = _read_spec(*next(iter(spec.items())))
            key = json.dumps([kind, text])
            if key not in self._cache:
                xgrammar = _import_xgrammar()
                self._cache[key] = _in_time(lambda: self._compile(xgrammar, kind, text))
                if len(self._cache) > MAX_CACHED:
                    self._cache.popitem(last=False)
        except ValueError as error:
            raise ValueError(f"structured_outputs: {_one_line(error)}") from error
        self._cache.move_to_end(key)
        return self._cache[key]

    def _compile(self, xgrammar: Any, kind: str, text: str) -> CompiledGrammar:
        try:
            if self._compiler is None:
                info = self._tokenizer_info(xgrammar)
                self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            if kind == "json_schema":
                compiled = self._compiler.compile_grammar(_schema_grammar(xgrammar, text))
            elif kind == "regex":
                compiled = self._compiler.compile_regex(text)
            else:
                compiled = self._compiler.compile_grammar(text)
            matcher = xgrammar.GrammarMatcher(compiled)
            is_complete = matcher.is_completed()
            is_dead = not (is_complete or _allows_any(matcher, self.vocab_size))
        except Exception as error:  # a RuntimeError for most, but not for every mistake
            raise ValueError(f"xgrammar refuses this {kind}: {_one_line(error)}") from error
        if is_dead or (is_complete and kind == "json_schema"):
            raise ValueError(f"no output can fit this {kind}")
        return CompiledGrammar(matcher, self.vocab_size, bool(self.stop_token_ids))

    def _tokenizer_info(self, xgrammar: Any) -> Any:
        """What xgrammar knows of the vocabulary: the bytes of each token, none for special ones."""
        stop_ids, tokenizer = self.stop_token_ids, whole_tokenizer(self.tokenizer)
        found = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=self.vocab_size, stop_token_ids=stop_ids or None
        )
        added = tokenizer.added_tokens_decoder
        special = {i for i, token in added.items() if token.special}.union(stop_ids)
        special.update(tokenizer.all_special_ids)
        tokens = [b"" if i in special else token for i, token in enumerate(found.decoded_vocab)]
        return xgrammar.TokenizerInfo(
            tokens,
            xgrammar.VocabType.RAW,
            vocab_size=self.vocab_size,
            stop_token_ids=stop_ids,
            add_prefix_space=found.add_prefix_space,
        )


def _schema_grammar(xgrammar: Any, schema: str) -> str:
    """As xgrammar writes it, with the characters of strings of limited length put right.

    It lets control characters into those, which JSON forbids, and halves of surrogate pairs, which
    are decoded to more characters than one.
    """
    grammar = str(xgrammar.Grammar.from_json_schema(schema, any_whitespace=False))
    return grammar.replace(r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\ud800-\udfff]")


def _import_xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        remedy = 'try pip install "nano-vllm[structured]"'
        raise ValueError(f"needs xgrammar ({error}), {remedy}") from error
    return xgrammar


def _in_time(make: Callable[[], CompiledGrammar]) -> CompiledGrammar:
    """In a thread, as nothing stops xgrammar; one that takes too long is left to itself."""
    made: Future[CompiledGrammar] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="compile-grammar", daemon=True).start()
    if not wait([made], MAX_COMPILE_SECONDS).done:
        raise ValueError(f"compiling took over {MAX_COMPILE_SECONDS:g} s, needs a simpler one")
    return made.result()


def _allows_any(matcher: Any, vocab_size: int) -> bool:
    words = new_bitmask(1, vocab_size).numpy()
    matcher.fill_next_token_bitmask(words, 0)
    return bool(np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size].any())


def _one_line(error: Exception) -> str:
    text = re.sub(r"\[[\d:]+\] \S+:\d+: ", "", str(error)) or type(error).__name__
    return " ".join(text.split())[:300]


def _read_spec(kind: str, value: Any) -> tuple[str, str]:
    """Kind, one of json_schema, regex and grammar, and the text to compile."""
    if kind == "json_schema":
        return kind, read_schema(value)
    if kind == "choice":
        # JSON's escapes are among the grammar's; what it leaves as it is stands for itself.
        text = "root ::= " + " | ".join(json.dumps(c, ensure_ascii=False) for c in value)
        if len(text) > MAX_CHARS:
            raise ValueError(f"choice: got {len(text)} characters, needs at most {MAX_CHARS}")
        return "grammar", text
    if kind == "regex":
        check_regex(kind, value)
    return kind, value
