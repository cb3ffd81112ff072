"""Detokenizer: the text of one completion while its tokens come, cut at a stop string.

It knows a tokenizer and token ids, not sequences, schedulers or tensors. What
`tokenizer.decode(all ids)` gives is the law: text handed out early is a prefix of it.

Decoding everything again for each token would be quadratic, so only a window of recent tokens is:

    token ids   . . . . . . . . . . [ . . . . . . . ]        window
    its text                        [ shown | loose | hidden ]

    shown    settled: no later token changes it
    loose    as decode gives it now; bytes to come or a cleaning of spaces may still change it
    hidden   U+FFFD at the end, perhaps for the first bytes of a character

Stop strings are looked for in all but the hidden part; only settled text is handed out.
"""

import codecs
import re
from collections.abc import Sequence
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

from nanovllm.engine.faults import TokenizerError, call_tokenizer

_UNKNOWN = "\ufffd"  # what decoders write for bytes that make no character
_MAX_HIDDEN = 3  # bytes of UTF-8 that may wait for their character's last one
_MAX_WINDOW = 16  # tokens; then the newer half stays
# clean_up_tokenization_spaces drops spaces before " n't", " 've", " ' " and shorter ones: a space
# with at most two other characters after it may go. Nine other spaces can wait in one place.
_LOOSE_SPACES = re.compile(r" +[^ ]? *[^ ]? *\Z")
_MAX_LOOSE = 16


@lru_cache(maxsize=8)
def _byte_pieces(tokenizer: Any) -> dict[int, bytes]:
    """Token id -> its byte, for tokens <0x00> to <0xFF> of which a bad one spoils its neighbours.

    The ByteFallback decoder (Llama 2, Gemma) writes a run of these as characters if the whole run
    is valid UTF-8, else as one U+FFFD for each byte. Empty for other tokenizers.
    """
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    try:
        ids = call_tokenizer(tokenizer.convert_tokens_to_ids, pieces)
        if None in ids or call_tokenizer(tokenizer.decode, [ids[65], ids[255]]) != 2 * _UNKNOWN:
            return {}
    except TokenizerError:  # it will fail on an output too, whose business it is
        return {}
    return {token_id: bytes([byte]) for byte, token_id in enumerate(ids)}


class Detokenizer:
    """Text of one completion; without stop strings nothing is decoded before it is asked for."""

    def __init__(
        self,
        tokenizer: Any,
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """tokenizer: from transformers, fast or slow; its `decode` is used.

        stop: none of them empty. include_stop: whether the text keeps the one that ends it.
        min_tokens: no stop string is found that ends in the text of that many first tokens.
        """
        assert all(stop), f"an empty stop string: {stop}"
        self.text = ""  # the completion's, once is_finished
        self.is_finished = False
        self._decode = partial(
            call_tokenizer, tokenizer.decode, skip_special_tokens=skip_special_tokens
        )
        self._stop = stop
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._tail_len = max(map(len, stop), default=1)
        self._cleans_up = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._byte_pieces = _byte_pieces(tokenizer)

        self._ids: list[int] = []
        self._num_read = 0  # tokens that have been in the window
        self._window: list[int] = []
        self._max_window = _MAX_WINDOW
        self._num_shown = 0  # characters of the window's text
        self._num_hidden = 0  # likewise
        self._byte_run: codecs.IncrementalDecoder | None = None  # the last token is a byte

        self._pieces: list[str] = []  # settled, not handed out
        self._num_taken = 0  # characters handed out
        self._num_loose = 0  # characters
        self._num_barred = 0  # of these, the first ones, in which no stop string may end
        self._settled_tail = ""  # the end of the settled text: a stop string may begin in it
        self._seen_tail = ""  # the end of the settled and loose text

    @property
    def num_tokens(self) -> int:
        """Tokens of the completion, the last one being that which completed the stop string."""
        return len(self._ids)

    def append(self, token_ids: Sequence[int]) -> str | None:
        """Take new tokens; return the stop string that one of them completed.

        It is the one that ends first; of those that end together, the first listed (as in vLLM).
        This ends the completion: later tokens, of this call too, are ignored.
        """
        if self.is_finished:
            return None
        if not self._stop:
            self._ids.extend(token_ids)
            return None
        for token_id in token_ids:
            self._ids.append(token_id)
            view, num_old = self._read(1)
            if len(self._ids) <= self._min_tokens:
                self._num_barred = self._num_loose
                continue
            ends = [
                (start + len(stop), stop)
                for stop in self._stop
                if (start := view.find(stop, max(0, num_old + 1 - len(stop)))) >= 0
            ]
            if ends:
                end, stop = min(ends, key=itemgetter(0))
                after = len(view) - end + self._num_hidden
                self.finish(after if self._include_stop else after + len(stop))
                return stop
        return None

    def take_delta(self) -> str:
        """Text not handed out yet that can no longer change nor belong to a stop string.

        Joined, all deltas are `text` once finished.
        """
        while not self.is_finished and self._num_read < len(self._ids):
            # A run of bytes is followed token by token.
            self._read(1 if self._byte_pieces else _MAX_WINDOW // 2)
        settled = "".join(self._pieces)
        delta = settled[: len(settled) - self._num_begun(settled)]
        self._pieces = [settled[len(delta) :]]
        self._num_taken += len(delta)
        return delta

    def finish(self, num_cut: int = 0) -> None:
        """No more tokens come: what was held back is text, but for num_cut characters at the end
        that are not the completion's."""
        if self.is_finished:
            return
        text = self._decode(self._ids)
        self.text = text[: len(text) - num_cut]
        self._pieces = [self.text[self._num_taken :]]
        self.is_finished = True

    def _num_begun(self, settled: str) -> int:
        """Characters at the end of `settled` that may turn out to begin a stop string."""
        num = len(settled)
        starts = (
            start
            for stop in self._stop
            for start in range(max(0, num + 1 - len(stop)), num)
            if settled[start] == stop[0] and stop.startswith(settled[start:])
        )
        return 0 if self.is_finished else num - min(starts, default=num)

    def _is_silent(self, token_id: int) -> bool:
        """Whether the decoder never sees it: special and skipped, or beyond the tokenizer's table.

        Twice, because a first token's leading space is dropped.
        """
        return not self._decode([token_id, token_id])

    def _read(self, num_tokens: int) -> tuple[str, int]:
        """Move tokens into the window.

        Returns the end of the settled and loose text, and how many of these characters are old:
        a stop string that ends in them has been looked for.
        """
        new = self._ids[self._num_read : self._num_read + num_tokens]
        self._num_read += len(new)
        self._window += new
        byte = self._byte_pieces.get(new[-1])
        if byte is None and self._byte_run and self._is_silent(new[-1]):
            byte = b""  # the run goes on
        view, num_old = self._read_window() if byte is None else self._read_byte(byte)
        self._seen_tail = view[-self._tail_len :]
        return view, num_old

    def _read_byte(self, byte: bytes) -> tuple[str, int]:
        """Add to a run of bytes, all of it loose; the tokenizer decodes it when it has ended."""
        if self._byte_run is None:
            self._byte_run = codecs.getincrementaldecoder("utf-8")()
        try:
            text = self._byte_run.decode(byte)
        except UnicodeDecodeError:
            self._byte_run.setstate((b"\xff", 0))  # so that it fails to the end of the run
            text = ""
        if text and not self._seen_tail:
            text = self._decode(self._window)  # decoders may drop the very first space
        self._num_loose += len(text)
        return self._seen_tail + text, len(self._seen_tail)

    def _read_window(self) -> tuple[str, int]:
        self._byte_run = None
        text = self._decode(self._window)
        num_seen = len(text)
        if not self._byte_pieces:  # where there are some, only they can be part of a character
            num_seen = max(len(text.rstrip(_UNKNOWN)), num_seen - _MAX_HIDDEN, self._num_shown)
        self._num_hidden = len(text) - num_seen
        num_shown = num_seen
        if self._cleans_up and (
            loose := _LOOSE_SPACES.search(
                text, max(self._num_shown, num_seen - _MAX_LOOSE), num_seen
            )
        ):
            num_shown = loose.start()
        view = self._settled_tail + text[self._num_shown : num_seen]
        num_old = len(self._settled_tail) + self._num_barred
        settled = text[self._num_shown : num_shown]
        self._pieces.append(settled)
        self._settled_tail = (self._settled_tail + settled)[-self._tail_len :]
        self._num_barred = max(0, self._num_barred - len(settled))
        self._num_loose = num_seen - num_shown
        self._num_shown = num_shown
        if len(self._window) >= self._max_window:
            self._shorten_window(text[num_shown:])
        return view, num_old

    def _shorten_window(self, rest: str) -> None:
        """Drop the older half if what follows `rest`, the loose and hidden text, stays the same.

        Where the cut splits a character, its other bytes come out as up to three U+FFFD; after
        them both windows agree. The first token may lose its space. Both must lie in shown text.
        """
        newer = self._window[len(self._window) // 2 :]
        text = self._decode(newer)
        num_shown = len(text) - len(rest)
        num_stray = min(len(text) - len(text.lstrip(_UNKNOWN)), _MAX_HIDDEN)
        if num_shown > num_stray and text.endswith(rest):
            self._window, self._num_shown = newer, num_shown
            self._max_window = _MAX_WINDOW
        else:  # too little text in that half
            self._window = [i for i in self._window if not self._is_silent(i)]
            self._max_window = max(_MAX_WINDOW, 2 * len(self._window))
