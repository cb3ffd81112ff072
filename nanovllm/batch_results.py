"""Results of a bulk job as lines of JSON, in the format of the lines that they answer."""

import json
import time
from json.encoder import encode_basestring as _quote_text
from typing import Any

from nanovllm.batch_lines import Line
from nanovllm.outputs import Logprob, RequestOutput, SampleOutput, TokenLogprobs, count_tokens
from nanovllm.sampling_params import SamplingParams

_ID = "batch_req_"  # and the line's number
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _quote(text: str | None) -> str:
    return "null" if text is None else _quote_text(text)


def result_line(line: Line, output: RequestOutput) -> bytes:
    """The finished request's line of output, its end included."""
    if output["finish_reason"] == "error":
        text = _encode(_error(line, output["error"] or "unknown"))
    else:
        params = line.params
        assert params is not None, "the result of a line that was not run"
        text = (_openai if line.is_openai else _plain_line)(line, params, output)
    # A lone surrogate, of an error's words, becomes JSON's escape for it.
    return (text + "\n").encode("utf-8", "backslashreplace")


def _error(line: Line, error: str) -> dict[str, Any]:
    if not line.is_openai:
        return {"line": line.number, "custom_id": line.custom_id, "error": error}
    said = {"code": "request_failed", "message": f"line {line.number}: {error}"}
    head = {"id": f"{_ID}{line.number}", "custom_id": line.custom_id}
    return {**head, "response": None, "error": said}


# Lines are written out, as encoding dicts of dicts would take most of the time that a line takes.


def _plain_line(line: Line, params: SamplingParams, output: RequestOutput) -> str:
    more = ""
    if params.prompt_logprobs is not None:
        parts = output["prompt_logprobs"] or ()
        found = [None if part is None else _position(part) for part in parts]
        more += f',"prompt_logprobs":{_encode(found)}'
    if params.n > 1:
        samples = ",".join(f"{{{_plain(sample)}}}" for sample in output["outputs"])
        more += f',"outputs":[{samples}]'
    return (
        f'{{"line":{line.number},"custom_id":{_quote(line.custom_id)},{_plain(output)},'
        f'"num_prompt_tokens":{len(output["prompt_token_ids"])}{more},"error":null}}'
    )


def _plain(sample: SampleOutput) -> str:
    text, token_ids = _quote(sample["text"]), repr(sample["token_ids"]).replace(" ", "")
    reason, stop = sample["finish_reason"], sample["stop_reason"]
    stop_reason = "null" if stop is None else _encode(stop)
    more = ""
    if sample["logprobs"] is not None:
        more = f',"logprobs":{_encode([_position(part) for part in sample["logprobs"]])}'
    return (
        f'"text":{text},"token_ids":{token_ids},"finish_reason":"{reason}",'
        f'"stop_reason":{stop_reason}{more}'
    )


def _position(found: TokenLogprobs) -> dict[int, dict[str, Any]]:
    return {token: logprob._asdict() for token, logprob in found.items()}


def _openai(line: Line, params: SamplingParams, output: RequestOutput) -> str:
    number, is_chat = line.number, line.chat is not None
    samples = enumerate(output["outputs"])
    choices = ",".join(_choice(i, sample, is_chat, params) for i, sample in samples)
    num_prompt = len(output["prompt_token_ids"])
    num_new = count_tokens(output)
    name, kind = ("chatcmpl", "chat.completion") if is_chat else ("cmpl", "text_completion")
    return (
        f'{{"id":"{_ID}{number}","custom_id":{_quote(line.custom_id)},"response":'
        f'{{"status_code":200,"request_id":"req_{number}","body":'
        f'{{"id":"{name}-{number}","object":"{kind}","created":{int(time.time())},'
        f'"model":{_quote(line.model)},"choices":[{choices}],"usage":{{"prompt_tokens":{num_prompt}'
        f',"completion_tokens":{num_new},"total_tokens":{num_prompt + num_new}}}}}}},"error":null}}'
    )


def _choice(index: int, sample: SampleOutput, is_chat: bool, params: SamplingParams) -> str:
    content, logprobs = _quote(sample["text"]), "null"
    message = f'"message":{{"role":"assistant","content":{content}}}'
    text = message if is_chat else f'"text":{content}'
    if (found := sample["logprobs"]) is not None:
        num_top = params.logprobs or 0
        logprobs = _encode(_chat_logprobs(found, num_top) if is_chat else _text_logprobs(found))
    reason = sample["finish_reason"]
    return f'{{"index":{index},{text},"logprobs":{logprobs},"finish_reason":"{reason}"}}'


def _chat_logprobs(positions: list[TokenLogprobs], num_top: int) -> dict[str, Any]:
    def entry(logprob: Logprob) -> dict[str, Any]:
        text = logprob.decoded_token
        return {"token": text, "logprob": logprob.logprob, "bytes": list(text.encode())}

    content = []
    for found in positions:
        drawn = next(iter(found.values()))
        top = sorted(found.values(), key=lambda logprob: logprob.rank)[:num_top]
        content.append({**entry(drawn), "top_logprobs": [entry(logprob) for logprob in top]})
    return {"content": content}


def _text_logprobs(positions: list[TokenLogprobs]) -> dict[str, Any]:
    drawn = [next(iter(found.values())) for found in positions]
    return {
        "tokens": [logprob.decoded_token for logprob in drawn],
        "token_logprobs": [logprob.logprob for logprob in drawn],
        "top_logprobs": [
            {logprob.decoded_token: logprob.logprob for logprob in found.values()}
            for found in positions
        ],
    }


def known_result(raw: bytes) -> tuple[int, str | None, bool]:
    """Of a line of output: the input line's number, its custom_id, whether it failed."""
    data = json.loads(raw)
    if not isinstance(data, dict):
        raise ValueError("not a result of run-batch")
    number = data.get("line")
    if number is None:
        name = data.get("id")
        number = name.removeprefix(_ID) if isinstance(name, str) else ""
    custom_id = data.get("custom_id")
    if not str(number).isdecimal() or not (custom_id is None or isinstance(custom_id, str)):
        raise ValueError("not a result of run-batch")
    return int(number), custom_id, data.get("error") is not None
