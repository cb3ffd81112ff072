"""What of a request's SamplingParams depends on the model: vocabulary, tokenizer, defaults."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nanovllm.engine.faults import TokenizerError, call_tokenizer
from nanovllm.sampling_params import SamplingParams

# generation_config.json's names of what SamplingParams has.
_DEFAULTS = {
    **{k: k for k in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}


def default_sampling_params(checkpoint: Path) -> dict[str, Any]:
    """What generation_config.json sets of SamplingParams' arguments; nothing without the file.

    As in vLLM, do_sample does not count: a file that says false still names the temperature to
    sample with, and greedy decoding is asked for with temperature=0.
    """
    path = checkpoint / "generation_config.json"
    try:
        listed = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        values = {ours: listed.get(theirs) for theirs, ours in _DEFAULTS.items()}
        found: dict[str, Any] = {name: v for name, v in values.items() if v is not None}
        SamplingParams(**found)
        return found
    except Exception as error:  # json also raises RecursionError
        raise ValueError(f"model: {path} cannot be read: {error}") from error


def check_params(name: str, params: Any, vocab_size: int | None) -> SamplingParams:
    """These params, which are of the right type and fit a vocabulary; else it raises."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"{name}: got {type(params).__name__}, needs a SamplingParams")
    ids = params.logit_bias or params.allowed_token_ids or params.stop_token_ids
    if vocab_size is None or not (ids or params.logprobs or params.prompt_logprobs):
        return params
    for field in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        ids = getattr(params, field) or ()
        for i in dict(ids) if field == "logit_bias" else ids:
            if not 0 <= i < vocab_size:
                raise ValueError(f"{name}.{field}: {not_in_vocabulary(i, vocab_size)}")
    for field in ("logprobs", "prompt_logprobs"):
        num = getattr(params, field) or 0
        if num > vocab_size:
            need = f"at most {vocab_size} (the vocabulary)"
            raise ValueError(f"{name}.{field}: got {num}, needs {need}")
    return params


def not_in_vocabulary(token_id: int, vocab_size: int) -> str:
    need = f"0 <= id < {vocab_size} (the vocabulary), try this model's own tokenizer"
    return f"got token id {token_id}, needs {need}"


def bad_word_ids(
    tokenizer: Any, bad_words: Iterable[str], vocab_size: int | None = None
) -> list[tuple[int, ...]]:
    """The token sequences that must not appear, for words that must not.

    As in vLLM, a word is banned at the start of a text and after a space. The second sequence is
    left out where it ends with the first, which bans it already.
    """
    found: dict[tuple[int, ...], None] = {}
    for i, word in enumerate(bad_words):
        bare = word.lstrip() or word
        try:
            first, spaced = (
                tuple(call_tokenizer(tokenizer.encode, text, add_special_tokens=False))
                for text in (bare, f" {bare}")
            )
        except TokenizerError as error:  # a lone surrogate, say
            failure = f"the tokenizer failed on {word!r}: {error}"
            raise ValueError(f"bad_words[{i}]: {failure}") from error
        if not first or (vocab_size is not None and max(first + spaced) >= vocab_size):
            need = "at least one, all of them in the vocabulary"
            got = f"{word!r}, which is {list(first)} in tokens"
            raise ValueError(f"bad_words[{i}]: got {got}, needs {need}")
        found[first] = None
        if spaced[-len(first) :] != first:
            found[spaced] = None
    return list(found)
