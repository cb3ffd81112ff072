"""PromptReader: from what callers pass to token ids, checked before anything is queued."""

import json
import numbers
from collections.abc import Sequence as AbstractSequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nanovllm.sampling_params import SamplingParams

TokenIds = npt.NDArray[np.int32]


def load_tokenizer(checkpoint: Path) -> Any:
    """The checkpoint's tokenizer; ValueError naming the folder when it has none that loads."""
    import transformers

    try:
        if transformers.__version__ >= "5" and (checkpoint / "tokenizer.json").is_file():
            # What AutoTokenizer would build from this file, without its import of all models.
            return transformers.PreTrainedTokenizerFast.from_pretrained(str(checkpoint))
        return transformers.AutoTokenizer.from_pretrained(str(checkpoint), trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its parsers raise
        raise ValueError(
            f"model: {checkpoint} has no tokenizer that loads ({error}); needs tokenizer.json and"
            " tokenizer_config.json beside the weights"
        ) from error


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
        ids = listed if isinstance(listed, list) else [listed]
        return {int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"model: {path} cannot be read: {error}") from error


class PromptReader:
    def __init__(self, tokenizer: Any, vocab_size: int, max_len: int) -> None:
        """max_len: tokens, prompt and output, that the longest sequence may have."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_len = max_len

    def read(self, prompts: Any) -> list[TokenIds]:
        """Token ids of one prompt or many, each int32 [num_tokens].

        prompts: a string, a list of token ids (a list, numpy array or tensor of integers), or a
        list of these, mixing allowed. Raises ValueError or TypeError naming the first bad one.
        """
        items = [prompts] if is_single(prompts) else prompts
        if not isinstance(items, AbstractSequence):
            raise TypeError(
                f"prompts: got {type(prompts).__name__}, needs a string, a list of token ids, or a"
                " list of these"
            )
        texts = [i for i, item in enumerate(items) if isinstance(item, str)]
        for i in texts:
            _check_text(f"prompts[{i}]", items[i])
        encoded = dict(zip(texts, self._encode([items[i] for i in texts]), strict=True))
        return [
            self._check(f"prompts[{i}]", encoded[i] if i in encoded else item)
            for i, item in enumerate(items)
        ]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        bos = self.tokenizer.bos_token_id
        ids: list[list[int]] = self.tokenizer(texts)["input_ids"]
        # A chat template may have written the BOS that the tokenizer then adds again.
        return [x[1:] if bos is not None and x[:2] == [bos, bos] else x for x in ids]

    def _check(self, name: str, item: Any) -> TokenIds:
        ids = _as_integers(name, item)
        if len(ids) == 0:
            raise ValueError(f"{name}: got an empty prompt, needs at least one token")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            raise ValueError(
                f"{name}: got token id {low if low < 0 else high}, needs 0 <= id < "
                f"{self.vocab_size} (the vocabulary), try this model's own tokenizer"
            )
        if len(ids) >= self.max_len:
            raise ValueError(
                f"{name}: got {len(ids)} tokens, needs fewer than {self.max_len} (the smaller of"
                " max_model_len and what the KV cache holds), so that one token can follow; try a"
                " shorter prompt, a larger max_model_len or num_kvcache_blocks"
            )
        return ids.astype(np.int32)


def is_single(prompts: Any) -> bool:
    """Whether this is one prompt rather than a list of prompts."""
    if isinstance(prompts, AbstractSequence) and not isinstance(prompts, str):
        return len(prompts) > 0 and isinstance(prompts[0], numbers.Integral)
    return isinstance(prompts, str) or getattr(prompts, "ndim", None) == 1


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # tokenizers would call it a wrong type
        raise ValueError(
            f"{name}: got a string with a lone surrogate at {error.start}, needs valid Unicode, try"
            " decoding its source with errors='replace'"
        ) from error


def _as_integers(name: str, item: Any) -> npt.NDArray[np.integer]:
    need = "a string or a list of integer token ids"
    if isinstance(item, (bytes, bytearray, memoryview, dict, set)) or item is None:
        raise TypeError(f"{name}: got {type(item).__name__}, needs {need}")
    # numpy takes a bool among integers for 0 or 1.
    if isinstance(item, (list, tuple)) and not {bool, np.bool_}.isdisjoint(map(type, item)):
        raise TypeError(f"{name}: got a {type(item).__name__} holding a bool, needs {need}")
    try:
        ids = np.asarray(item)
    except Exception as error:  # ragged lists, device tensors: numpy and torch differ in the type
        raise TypeError(f"{name}: got {type(item).__name__}, needs {need}") from error
    if ids.ndim == 1 and len(ids) == 0:
        return ids.astype(np.int64)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"{name}: got {_describe(item, ids)}, needs {need}")
    return ids


def _describe(item: Any, ids: npt.NDArray[Any]) -> str:
    if ids.ndim == 0:
        return f"{type(item).__name__} {item!r}"[:80]
    return f"{ids.ndim}-dimensional {ids.dtype} values"


def read_sampling_params(params: Any, num_prompts: int) -> list[SamplingParams]:
    """One SamplingParams per prompt, from one for all or a list of the same length."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, (list, tuple)):
        raise TypeError(
            f"sampling_params: got {type(params).__name__}, needs a SamplingParams or a list"
        )
    if len(params) != num_prompts:
        raise ValueError(
            f"sampling_params: got {len(params)} for {num_prompts} prompts, needs one for all or"
            " one for each"
        )
    for i, p in enumerate(params):
        if not isinstance(p, SamplingParams):
            raise TypeError(f"sampling_params[{i}]: got {type(p).__name__}, needs a SamplingParams")
    return list(params)
