"""RequestOutput: what a caller receives for one request."""

from typing import Literal, TypedDict

# "stop": an EOS token; "length": max_tokens, or the longest sequence the engine holds;
# "error": the model's logits were not finite, the tokens before that are kept.
FinishReason = Literal["stop", "length", "error"]


class RequestOutput(TypedDict):
    """The result of one request; a plain dict at run time."""

    text: str  # the completion, special tokens left out
    token_ids: list[int]  # every generated token, the EOS that ended it included
    finish_reason: FinishReason
