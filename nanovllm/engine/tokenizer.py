"""open_tokenizer: the checkpoint's tokenizer, without the seconds of importing transformers.

Beneath transformers' tokenizer lies one of the tokenizers library, which imports at once. Where the
files leave nothing to do for what is between the two, the engine talks to the lower one, and
transformers is imported when something else is asked, as by llm.chat and llm.tokenizer. Which files
those are is decided by a short list of what is known; anything else is for transformers at once.
"""

import contextlib
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nanovllm.engine.faults import TokenizerError, call_tokenizer
from nanovllm.engine.prompts import PROBES, load_tokenizer

_NAMED = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
_LISTS = {"additional_special_tokens", "extra_special_tokens"}
_ENDS = {"add_bos_token", "add_eos_token"}
# Settings that change what comes of a text or of ids, unless they are false.
_OFF = {
    *("clean_up_tokenization_spaces", "split_special_tokens"),
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
}
# What tokenizer_config.json may hold: each key with the types that transformers accepts.
_KNOWN: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(_NAMED, (str, type(None))),
    **dict.fromkeys(_LISTS, (list, type(None))),
    **dict.fromkeys(_ENDS | _OFF, (bool,)),
    # Only those that read other files than tokenizer.json make something of these.
    **dict.fromkeys(("add_prefix_space", "is_local", "legacy"), (bool,)),
    **dict.fromkeys(("backend", "errors", "tokenizer_class"), (str,)),
    "added_tokens_decoder": (dict,),
    "chat_template": (str, type(None)),
    "model_input_names": (list,),
    "model_max_length": (int, float),
}


class QuickTokenizer:
    """Ids to text and text to ids; once transformers' tokenizer was asked for, that one does it."""

    clean_up_tokenization_spaces = False

    def __init__(self, checkpoint: Path, backend: Any, config: dict[str, Any]) -> None:
        """backend: a tokenizers.Tokenizer. config: tokenizer_config.json, known to be plain."""
        self._checkpoint = checkpoint
        self._backend = backend
        self._whole: Any = None
        names = (config.get(f"{name}_token") for name in ("bos", "eos", "unk"))
        ids = (None if name is None else backend.token_to_id(name) for name in names)
        self.bos_token_id, self.eos_token_id, self._unk_token_id = ids
        # Versions of transformers differ in who decides on a BOS, the settings or the file.
        adds_ends = backend.num_special_tokens_to_add(False) or any(map(config.get, _ENDS))
        self._can_encode = not adds_ends

    def whole(self) -> Any:
        """transformers' tokenizer of the same files."""
        if self._whole is None:
            self._whole = load_tokenizer(self._checkpoint, tokenizer_object=_Shared(self._backend))
        return self._whole

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        source = self._backend if self._whole is None else self._whole
        return source.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, Any]:
        if self._whole is None and self._can_encode:
            encodings = self._backend.encode_batch(texts, add_special_tokens=add_special_tokens)
            return {"input_ids": [encoding.ids for encoding in encodings]}
        return self.whole()(texts, add_special_tokens=add_special_tokens)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self([text], add_special_tokens)["input_ids"][0]

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]:
        ids = map(self._backend.token_to_id, tokens)
        return [self._unk_token_id if i is None else i for i in ids]


class _Shared:
    """A backend that transformers, which copies it, takes as it is: a copy costs a second."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: Any) -> Any:
        return self._backend


def open_tokenizer(checkpoint: Path) -> Any:
    """A QuickTokenizer where that can be no different from transformers', else that one.

    Raises what load_tokenizer raises.
    """
    try:
        quick = call_tokenizer(_open_quick, checkpoint)
    except TokenizerError:  # what is wrong with the files is for transformers to say
        quick = None
    return quick or load_tokenizer(checkpoint)


def whole_tokenizer(tokenizer: Any) -> Any:
    """transformers' own tokenizer of one that may be a QuickTokenizer."""
    return tokenizer.whole() if isinstance(tokenizer, QuickTokenizer) else tokenizer


def _open_quick(checkpoint: Path) -> QuickTokenizer | None:
    """None, or any exception, where transformers is needed."""
    file = checkpoint / "tokenizer.json"
    if version("transformers").split(".")[0] != "5" or not file.is_file():
        return None
    config = _read_json(checkpoint / "tokenizer_config.json")
    if not (_is_plain(config) and _is_model_plain(checkpoint)):
        return None
    from tokenizers import AddedToken, Tokenizer

    backend = Tokenizer.from_file(str(file))
    added = backend.get_added_tokens_decoder().values()
    # transformers would add the tokens of the one list to the other.
    declared = {repr(AddedToken(**token)) for token in _declared(checkpoint, config)}
    named = {config[key] for key in _NAMED & config.keys()} - {None}
    named.update(*(config.get(key) or () for key in _LISTS))
    if (
        not declared <= {repr(token) for token in added}
        or not named <= {token.content for token in added if token.special}
        or backend.truncation is not None
        or backend.padding is not None
    ):
        return None
    for text in PROBES:
        with contextlib.suppress(Exception):  # a text may fail, but not by a panic
            backend.encode_batch([text])
    return QuickTokenizer(checkpoint, backend, config)


def _is_plain(config: Any) -> bool:
    """Whether transformers would take this tokenizer_config.json and change nothing for it."""
    return (
        isinstance(config, dict)
        and all(isinstance(value, _KNOWN.get(key, ())) for key, value in config.items())
        and not any(config.get(key) for key in _OFF)
        and all(isinstance(token, str) for key in _LISTS for token in config.get(key) or ())
    )


def _is_model_plain(checkpoint: Path) -> bool:
    """Whether transformers has no reason to look at more of the folder.

    It mends the tokenizers of models whose type ends in "tral" if they were saved by old versions.
    """
    model = _read_json(checkpoint / "config.json")
    saved_by = model.get("transformers_version") or "5.0.0"
    template = checkpoint / "chat_template.jinja"
    if template.is_file():
        template.read_text(encoding="utf-8")
    return (
        re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", saved_by) is not None
        and not model["model_type"].rstrip("3").endswith("tral")
        and not (checkpoint / "additional_chat_templates").exists()
    )


def _declared(checkpoint: Path, config: dict[str, Any]) -> list[dict[str, Any]]:
    """The added tokens that transformers reads beside those of the backend."""
    if "added_tokens_decoder" in config:
        return list({int(i): t for i, t in config["added_tokens_decoder"].items()}.values())
    for name in ("special_tokens_map.json", "added_tokens.json"):
        if (checkpoint / name).exists():
            raise ValueError(f"{name} is for transformers")
    tokens = _read_json(checkpoint / "tokenizer.json")["added_tokens"]
    return [{key: token[key] for key in token.keys() - {"id"}} for token in tokens]


def _read_json(path: Path) -> Any:
    if not path.is_file():  # reading a pipe would never end
        raise FileNotFoundError(path)
    return json.loads(path.read_text(encoding="utf-8"))
