"""PromptReader: from what callers pass to token ids, checked before anything is queued."""

import contextlib
import json
import numbers
from array import array
from collections.abc import Sequence as AbstractSequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nanovllm.engine import faults
from nanovllm.engine.params import check_params, not_in_vocabulary
from nanovllm.sampling_params import SamplingParams

TokenIds = npt.NDArray[np.int32]
# What vLLM takes in a prompt's dict and this engine has no use for.
_FOREIGN_KEYS = {
    *("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "cache_salt"),
    *("prompt_embeds", "token_type_ids", "encoder_prompt", "decoder_prompt"),
}
# Texts that a sound tokenizer gets through: short and long, characters of one to four bytes.
PROBES = ["a", "Hello, wörld 12's\n", " a\u0300é, 東京 \U0001f600", 40 * "a"]


def load_tokenizer(checkpoint: Path, **options: Any) -> Any:
    """transformers' tokenizer; ValueError naming the folder when it has none that loads.

    options: of from_pretrained.
    """
    import transformers

    try:
        if transformers.__version__ >= "5" and (checkpoint / "tokenizer.json").is_file():
            # What AutoTokenizer would build from this file, without its import of all models.
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
                str(checkpoint), **options
            )
        else:
            auto = transformers.AutoTokenizer
            tokenizer = auto.from_pretrained(str(checkpoint), trust_remote_code=False)
        # The engine has a limit of its own and a sentence for what exceeds it.
        warned = getattr(tokenizer, "deprecation_warnings", {})
        warned["sequence-length-is-longer-than-the-specified-maximum"] = True
        for text in PROBES:
            with contextlib.suppress(Exception):  # a text may fail, but not by a panic
                tokenizer(text)
        return tokenizer
    except BaseException as error:  # transformers raises whatever its parsers raise
        if not faults.is_failure(error):
            raise
        need = "needs tokenizer.json and tokenizer_config.json beside the weights"
        got = f"{checkpoint} has no tokenizer that loads ({error})"
        raise ValueError(f"model: {got}; {need}") from error


def find_eos_token_ids(checkpoint: Path, tokenizer: Any, hf_config: Any) -> set[int]:
    """Every id that ends a completion: the tokenizer's and generation_config.json's.

    config.json speaks where there is no generation_config.json, as in transformers.
    """
    path = checkpoint / "generation_config.json"
    try:
        if path.is_file():
            listed = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        else:
            path, listed = checkpoint / "config.json", getattr(hf_config, "eos_token_id", None)
        ids = [*(listed if isinstance(listed, list) else [listed]), tokenizer.eos_token_id]
        vocab_size = getattr(hf_config, "vocab_size", 2**31)
        for i in ids:
            if i is not None and not (type(i) is int and 0 <= i < vocab_size):
                where = f"here or in the tokenizer, needs 0 <= id < {vocab_size} (the vocabulary)"
                raise ValueError(f"eos_token_id: got {i!r:.80} {where}, try the published files")
        return set(ids) - {None}
    except Exception as error:  # json also raises RecursionError
        raise ValueError(f"model: {path} cannot be read: {error}") from error


class PromptReader:
    def __init__(self, tokenizer: Any, vocab_size: int, max_len: int) -> None:
        """max_len: tokens, prompt and output, that the longest sequence may have."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_len = max_len

    def read(self, prompts: Any, on_error: str = "raise") -> list[Any]:
        """Token ids of one prompt or many, each int32 [num_tokens].

        prompts: a string, a list of token ids (a list, numpy array or tensor of integers), a dict
        {"prompt": string} or {"prompt_token_ids": ids}, or a list of these, mixing allowed.
        on_error: "raise" raises the ValueError or TypeError of the first bad one, "return" puts
        each error in the place of its prompt. An error among the prompts is one found earlier.
        """
        with faults.naming("prompts"):
            if not (is_single(prompts) or isinstance(prompts, AbstractSequence)):
                need = "a string, a list of token ids, or a list of these"
                raise TypeError(f"prompts: got {type(prompts).__name__}, needs {need}")
            items = [prompts] if is_single(prompts) else faults.listed(prompts)
        contents = faults.attempt_each(_open, "prompts", items)
        texts = [i for i, content in enumerate(contents) if isinstance(content, str)]
        names = [f"prompts[{i}]" for i in texts]
        encoded = encode(self.tokenizer, names, [contents[i] for i in texts])
        bos = self.tokenizer.bos_token_id if texts else None
        for i, ids in zip(texts, encoded, strict=True):
            # A chat template may have written the BOS that the tokenizer then adds again.
            is_doubled = bos is not None and type(ids) is list and ids[:2] == [bos, bos]
            contents[i] = ids[1:] if is_doubled else ids
        return faults.settle(self._check_all(contents), on_error)

    def _check_all(self, contents: list[Any]) -> list[TokenIds | Exception]:
        packed = self._pack([content for content in contents if type(content) is list])
        rest = iter(packed or ())  # None where one of the lists is bad, or unusual
        return [
            next(rest)
            if packed and type(content) is list
            else content
            if isinstance(content, Exception)  # found earlier
            else faults.attempt(self._check, f"prompts[{i}]", content)
            for i, content in enumerate(contents)
        ]

    def _pack(self, lists: list[list[Any]]) -> list[TokenIds] | None:
        """The lists as arrays when all are plain and good; None when one needs a closer look.

        array takes integers and nothing else, in half of the time that numpy needs.
        """
        lens = [len(ids) for ids in lists]
        if not lens or min(lens) == 0 or max(lens) >= self.max_len:
            return None
        ends, packed = list(accumulate(lens)), array("i")
        try:
            for ids in lists:
                packed.fromlist(ids)
        except Exception:  # of array, or of an element that fails to become an integer
            return None
        if len(packed) != ends[-1]:  # an element's code has changed a list
            return None
        flat = np.frombuffer(packed, np.int32)
        if flat.view(np.uint32).max() >= self.vocab_size:  # as unsigned, negative ids are large
            return None
        # A bool has been taken for 0 or 1. Few ids are that small.
        small = np.flatnonzero(flat <= 1)
        owners = np.searchsorted(ends, small, side="right").tolist()
        kinds = {type(lists[k][i - ends[k]]) for k, i in zip(owners, small.tolist(), strict=True)}
        if not all(issubclass(kind, numbers.Integral) and kind is not bool for kind in kinds):
            return None
        return [flat[end - n : end] for n, end in zip(lens, ends, strict=True)]

    def _check(self, name: str, item: Any) -> TokenIds:
        if type(item) is list and (packed := self._pack([item])):
            return packed[0]
        num = len(item) if isinstance(item, range) else 0  # it may be longer than memory
        ids = _as_integers(name, item[: self.max_len] if num else item)
        num = num or len(ids)
        if num == 0:
            raise ValueError(f"{name}: got an empty prompt, needs at least one token")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"{name}: {not_in_vocabulary(bad, self.vocab_size)}")
        if num >= self.max_len:
            raise ValueError(
                f"{name}: got {num} tokens, needs fewer than {self.max_len} (the smaller of"
                " max_model_len and what the KV cache holds), so that one token can follow; try a"
                " shorter prompt, a larger max_model_len or num_kvcache_blocks"
            )
        return ids.astype(np.int32)


def check_one(name: str, prompt: Any) -> None:
    """Refuse a number, which in a list would be the only token id of a prompt."""
    if isinstance(prompt, numbers.Integral):
        got = type(prompt).__name__
        raise TypeError(f"{name}: got {got}, needs a string or a list of token ids")


def is_single(prompts: Any) -> bool:
    """Whether this is one prompt rather than a list of prompts."""
    if isinstance(prompts, AbstractSequence) and not isinstance(prompts, str):
        return len(prompts) > 0 and isinstance(prompts[0], numbers.Integral)
    return isinstance(prompts, (str, dict)) or getattr(prompts, "ndim", None) == 1


def encode(tokenizer: Any, names: list[str], texts: list[str], **kwargs: Any) -> list[Any]:
    """Token ids of each text, a list, or the ValueError that names it."""

    def encode_one(name: str, text: str) -> Any:
        try:
            check_text(name, text)
            return faults.call_tokenizer(tokenizer, [text], **kwargs)["input_ids"][0]
        except faults.TokenizerError as error:
            raise ValueError(f"{name}: the tokenizer failed on this text: {error}") from error

    try:
        return list(faults.call_tokenizer(tokenizer, texts, **kwargs)["input_ids"]) if texts else []
    except faults.TokenizerError:  # the texts that cause it must not spoil the others
        return [faults.attempt(encode_one, *pair) for pair in zip(names, texts, strict=True)]


def _open(name: str, item: Any) -> Any:
    """The text or the ids of a prompt that may be a dict; text is known to be valid Unicode."""
    if isinstance(item, dict):
        for key in item.keys() - {"prompt", "prompt_token_ids"}:
            known = "that this engine cannot honour" if key in _FOREIGN_KEYS else "that is unknown"
            got, need = f"the key {key!r:.40} {known}", "'prompt' or 'prompt_token_ids'"
            raise ValueError(f"{name}: got {got}, needs {need}")
        if len(item) != 1:
            got = f"{'both' if item else 'none'} of 'prompt' and 'prompt_token_ids'"
            raise ValueError(f"{name}: got {got}, needs one of them")
        ((key, item),) = item.items()
        if isinstance(item, str) != (key == "prompt"):
            need = "a string" if key == "prompt" else "a list of integer token ids"
            raise TypeError(f"{name}: got {type(item).__name__} as {key!r}, needs {need}")
    if isinstance(item, str):
        check_text(name, item)
    return item


def check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # tokenizers would call it a wrong type
        got, need = f"a string with a lone surrogate at {error.start}", "valid Unicode"
        remedy = "decoding its source with errors='replace'"
        raise ValueError(f"{name}: got {got}, needs {need}, try {remedy}") from error


def _as_integers(name: str, item: Any) -> npt.NDArray[np.integer]:
    need = "a string or a list of integer token ids"
    if isinstance(item, (bytes, bytearray, memoryview, dict, set)) or item is None:
        raise TypeError(f"{name}: got {type(item).__name__}, needs {need}")
    if isinstance(item, (list, tuple)):
        item = faults.listed(item)
    # numpy takes a bool among integers for 0 or 1.
    if type(item) is list and not {bool, np.bool_}.isdisjoint(map(type, item)):
        raise TypeError(f"{name}: got a {type(item).__name__} holding a bool, needs {need}")
    try:
        ids = np.asarray(item)
    except Exception as error:  # ragged lists, device tensors: numpy and torch differ in the type
        raise TypeError(f"{name}: got {type(item).__name__}, needs {need}") from error
    if ids.ndim == 1 and len(ids) == 0:
        return ids.astype(np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TypeError(f"{name}: got {_describe(item, ids)}, needs {need}")
    return ids


def _describe(item: Any, ids: npt.NDArray[Any]) -> str:
    if ids.ndim == 0:
        # Python refuses to print an integer of thousands of digits.
        is_number = isinstance(item, float) or (type(item) is int and item.bit_length() < 99)
        return f"{type(item).__name__} {item!r}"[:80] if is_number else type(item).__name__
    return f"{ids.ndim}-dimensional {ids.dtype} values"


def read_sampling_params(
    params: Any, num_prompts: int, vocab_size: int | None = None, on_error: str = "raise"
) -> list[Any]:
    """One SamplingParams per prompt, from one for all or a list of the same length.

    vocab_size: of the model, which they must fit; None: not looked at.
    on_error: "return" puts an error in the place of each entry that is wrong.
    """
    if params is None:
        params = SamplingParams()
    if issubclass(type(params), SamplingParams):
        name = "sampling_params"
        checked = [faults.attempt(check_params, name, params, vocab_size)] * num_prompts
        return faults.settle(checked, on_error)
    with faults.naming("sampling_params"):
        if not isinstance(params, (list, tuple)):
            got = type(params).__name__
            raise TypeError(f"sampling_params: got {got}, needs a SamplingParams or a list")
        if len(params) != num_prompts:
            got = f"{len(params)} for {num_prompts} prompts"
            raise ValueError(f"sampling_params: got {got}, needs one for all or one for each")
        each = faults.listed(params)
    checked = faults.attempt_each(check_params, "sampling_params", each, vocab_size)
    return faults.settle(checked, on_error)
