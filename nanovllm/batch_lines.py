"""Lines of a bulk job: from JSON to a prompt and its params.

A line is plain, {"prompt": ...}, {"messages": ...} or {"prompt_token_ids": ...} with fields of
SamplingParams beside it, or OpenAI's batch format, {"custom_id": ..., "body": {...}}. Files,
engines and other lines are none of its business.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nanovllm.sampling_params import SamplingParams

SAMPLING_FIELDS = {f.name for f in fields(SamplingParams)}
# Of render_chat.
CHAT_FIELDS = {
    *("add_generation_prompt", "continue_final_message", "tools", "chat_template"),
    "chat_template_kwargs",
}
# OpenAI's own, which change no token here.
_NO_EFFECT = {
    *("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store"),
    *("stream_options", "user"),
}
PROMPT_FIELDS = {"prompt", "messages", "prompt_token_ids"}
_TRANSLATED = {"max_completion_tokens", "response_format", "stream", "top_logprobs"}
_PLAIN_FIELDS = {"custom_id", *PROMPT_FIELDS, *CHAT_FIELDS}
_OPENAI_FIELDS = {"model", "messages", "prompt", *_TRANSLATED, *_NO_EFFECT, *CHAT_FIELDS}
_SAME = SAMPLING_FIELDS - {"logprobs"}  # need no translation
_URLS = {True: "/v1/chat/completions", False: "/v1/completions"}
MAX_CACHED_PARAMS = 256
_decode = json.JSONDecoder().raw_decode  # json.loads looks for spaces, which are off already


@dataclass(slots=True)
class Line:
    """One request. `prompt` is what generate takes, or a conversation if `chat` is not None."""

    number: int  # 1 is the first of the file
    raw: bytes  # as it was read
    custom_id: str | None = None
    is_openai: bool = False
    model: str = ""  # as the line has it; the answer repeats it
    prompt: Any = None
    chat: dict[str, Any] | None = None  # options of render_chat
    params: SamplingParams | None = None
    error: str | None = None  # why it cannot be run

    @property
    def key(self) -> int:
        """Of generate_each: what is drawn depends on the line, not on which ones ran before it, so
        that a job that was interrupted gives what it would have given."""
        return self.number - 1


class LineReader:
    """Lines of one file, or rows of a table."""

    ROW_FIELDS = SAMPLING_FIELDS | CHAT_FIELDS | PROMPT_FIELDS

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        """defaults: of SamplingParams, where a line does not say."""
        self._defaults = dict(defaults)
        self._default_params = _sampling_params(self._defaults)
        self._cached: dict[str, SamplingParams] = {}  # many lines ask for the same

    def read(self, number: int, raw: bytes) -> Line:
        """raw: without its end. A line that cannot be run has an error and what else is known."""
        line = Line(number, raw, is_openai=b'"body"' in raw)
        try:
            data = _load(raw)
            line.is_openai = "body" in data
            if (custom_id := data.pop("custom_id", None)) is not None:
                line.custom_id = _text("custom_id", custom_id)
            if line.is_openai:
                self._read_openai(line, data)
            else:
                self._read_plain(line, data)
        except (ValueError, TypeError) as error:
            line.error = str(error)
        return line

    def read_row(self, number: int, row: dict[str, Any]) -> Line:
        """A plain line that was never JSON. number: from 1."""
        line = Line(number, b"")
        try:
            self._read_plain(line, row)
        except (ValueError, TypeError) as error:
            line.error = str(error)
        return line

    def _read_plain(self, line: Line, data: dict[str, Any]) -> None:
        values = _without_nulls(data)
        kinds = PROMPT_FIELDS & values.keys()
        if len(kinds) != 1:
            got = " and ".join(sorted(kinds)) or "none"
            raise ValueError(f"got {got} of prompt, messages and prompt_token_ids, needs one")
        kind = kinds.pop()
        content = values.pop(kind)
        if kind == "messages":
            line.prompt, line.chat = _conversation(content), _chat_options(values)
        else:
            is_text = isinstance(content, str)
            if is_text != (kind == "prompt") or not isinstance(content, (str, list)):
                need = "a string" if kind == "prompt" else "a list of token ids"
                raise TypeError(f"{kind}: got {type(content).__name__}, needs {need}")
            line.prompt = content if is_text else {kind: content}
        line.params = self._params(values, _PLAIN_FIELDS)

    def _read_openai(self, line: Line, data: dict[str, Any]) -> None:
        body, method, url = data.pop("body"), data.pop("method", "POST"), data.pop("url", None)
        if data:
            raise _unknown(next(iter(data)), {"custom_id", "method", "url", "body"})
        if line.custom_id is None:
            raise ValueError("custom_id: got none, needs a string beside body")
        if method != "POST":
            raise ValueError(f"method: got {method!r:.40}, needs 'POST'")
        if not isinstance(body, dict):
            raise TypeError(f"body: got {type(body).__name__}, needs an object")
        values = _without_nulls(body)
        line.model = _text("body.model", values.pop("model", "")) if "model" in values else ""
        is_chat = "messages" in values
        if is_chat == ("prompt" in values):
            raise ValueError(f"body: got {'both' if is_chat else 'none'} of messages and prompt")
        if url not in (None, _URLS[is_chat]):
            need = f"{_URLS[is_chat]!r} for {'messages' if is_chat else 'a prompt'}"
            raise ValueError(f"url: got {url!r:.60}, needs {need}")
        if is_chat:
            line.prompt, line.chat = _conversation(values.pop("messages")), _chat_options(values)
        else:
            line.prompt = _prompt(values.pop("prompt"))
        if not values.keys() <= _SAME:
            _translate(values, is_chat)
        line.params = self._params(values, _OPENAI_FIELDS)

    def _params(self, values: dict[str, Any], known: set[str]) -> SamplingParams:
        """known: other fields that the line might have had, for the error."""
        if not values:
            return self._default_params
        key = repr(values)  # tells 1 from True
        params = self._cached.get(key)
        if params is None:
            for name in values.keys() - SAMPLING_FIELDS:
                raise _unknown(name, SAMPLING_FIELDS | known)
            params = _sampling_params({**self._defaults, **values})
            if len(self._cached) >= MAX_CACHED_PARAMS:
                self._cached.clear()
            self._cached[key] = params
        return params


def _load(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode()
        data, end = _decode(text)
        if end != len(text):
            raise ValueError(f"more after its end at {end}")
    except (ValueError, RecursionError) as error:  # JSON's and Unicode's are ValueErrors
        raise ValueError(f"not JSON in UTF-8: {error!s:.200}") from error
    if not isinstance(data, dict):
        raise TypeError(f"got {type(data).__name__}, needs an object, try {{'prompt': 'Hello'}}")
    return data


def _without_nulls(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if value is not None}


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}: got {type(value).__name__}, needs a string")
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: got a lone surrogate, needs valid Unicode") from error
    return value


def _prompt(content: Any) -> Any:
    """One prompt of OpenAI's completions: a string or token ids, or a list of one of these."""
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], (str, list)):
        content = content[0]
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(type(token) is int for token in content):
        need = "one string or one list of token ids, try a line for each prompt"
        raise TypeError(f"prompt: got {type(content).__name__}, needs {need}")
    return {"prompt_token_ids": content}


def _conversation(messages: Any) -> list[Any]:
    if not isinstance(messages, list) or any(not isinstance(m, dict) for m in messages):
        raise TypeError("messages: needs a list of {'role': ..., 'content': ...}")
    return messages


def _chat_options(values: dict[str, Any]) -> dict[str, Any]:
    return {name: values.pop(name) for name in values.keys() & CHAT_FIELDS}


def _translate(values: dict[str, Any], is_chat: bool) -> None:
    """OpenAI's fields -> those of SamplingParams, in place."""
    for name in values.keys() & _NO_EFFECT:
        del values[name]
    if values.pop("stream", False) is not False:
        raise ValueError("stream: needs false, a file gets whole answers")
    if "max_completion_tokens" in values:
        if "max_tokens" in values:
            raise ValueError("max_tokens: got max_completion_tokens too, needs one of them")
        values["max_tokens"] = values.pop("max_completion_tokens")
    if is_chat and ("logprobs" in values or "top_logprobs" in values):
        wanted, num = values.pop("logprobs", False), values.pop("top_logprobs", 0)
        if type(wanted) is not bool or (num and not wanted):
            raise TypeError("logprobs: needs true or false, and true where top_logprobs is given")
        if wanted:
            values["logprobs"] = num
    if "response_format" in values:
        schema = _schema(values.pop("response_format"))
        if schema is not None:
            if "structured_outputs" in values:
                raise ValueError("response_format: got structured_outputs too, needs one of them")
            values["structured_outputs"] = {"json_schema": schema}


def _sampling_params(values: dict[str, Any]) -> SamplingParams:
    """JSON has token ids as strings where they are keys."""
    if isinstance(biases := values.get("logit_bias"), dict):
        values = {**values, "logit_bias": {_token_id(key): biases[key] for key in biases}}
    return SamplingParams(**values)


def _token_id(key: Any) -> Any:
    if not isinstance(key, str):
        return key
    if not key.isdecimal() or len(key) > 10:
        raise TypeError(f"logit_bias key: got {key!r:.40}, needs a token id")
    return int(key)


def _schema(response_format: Any) -> dict[str, Any] | None:
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
    need = "type text, json_object, or json_schema with json_schema.schema"
    raise ValueError(f"response_format: needs {need}")


def _unknown(name: str, known: set[str]) -> ValueError:
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
    return ValueError(f"{name[:40]}: not a field that this engine knows, try {near}")
