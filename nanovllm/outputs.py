"""What a caller receives: a dict for each request, and for each piece of a stream."""

from typing import Literal, NamedTuple, TypedDict

# "stop": an EOS token, a stop string or a stop token id; "length": max_tokens, or the longest
# sequence the engine holds; "abort": ended by abort(); "error": the request was refused, the
# model's logits were not finite, or the tokenizer failed on the output, and the tokens before that
# are kept.
FinishReason = Literal["stop", "length", "abort", "error"]


class Logprob(NamedTuple):
    """One token's log-probability, by the model's own distribution."""

    logprob: float
    rank: int  # 1 is the most probable token
    decoded_token: str


# Of one position: the token that stands there, then the most probable ones.
TokenLogprobs = dict[int, Logprob]


class RequestMetrics(TypedDict):
    """Seconds on the host's clock."""

    queue: float  # from the call to the first step with the request
    prefill: float  # to its first token
    decode: float  # to its last token
    tokens_per_second: float  # generated tokens over prefill and decode


class SampleOutput(TypedDict):
    """One completion of a prompt."""

    text: str  # special tokens left out, unless skip_special_tokens=False
    token_ids: list[int]  # every generated token, the one that ended it included
    finish_reason: FinishReason
    stop_reason: int | str | None  # the stop string or stop token id that ended it
    logprobs: list[TokenLogprobs] | None  # one for each of token_ids


class RequestOutput(SampleOutput):
    """The result of one request, a plain dict at run time; n > 1: text and so on of the first."""

    prompt_token_ids: list[int]
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    prompt_logprobs: list[TokenLogprobs | None] | None  # None for the first token
    outputs: list[SampleOutput]  # all n completions
    metrics: RequestMetrics | None  # None where nothing was computed
    error: str | None  # why, where finish_reason is "error"


def count_tokens(output: RequestOutput) -> int:
    """New ones, of all samples."""
    return sum(len(sample["token_ids"]) for sample in output["outputs"])


class StreamDelta(TypedDict):
    """What is new of one completion; the texts of all its deltas are its text."""

    request_id: int  # for abort()
    index: int  # of the prompt
    sample: int  # 0 to n - 1
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None  # set in the last one
    stop_reason: int | str | None
