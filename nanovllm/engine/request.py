"""Request: one prompt's samples from their first token to the caller's dict.

It knows text, log-probabilities and clocks; sequences only to read what the scheduler left there.
"""

from collections.abc import Callable
from typing import Any

from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.faults import TokenizerError, call_tokenizer
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import (
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SampleOutput,
    StreamDelta,
    TokenLogprobs,
)
from nanovllm.sampling_params import SamplingParams

Item = tuple[int, Any, SamplingParams | None]  # of generate_each: key, prompt, params


class Sample:
    """One completion. The engine feeds it tokens only if is_watched."""

    def __init__(
        self, request: "Request", seq: Sequence, number: int, tokenizer: Any, is_streamed: bool
    ) -> None:
        params = seq.sampling_params
        self.request, self.seq, self.number = request, seq, number
        self.grammar = None if seq.ask is None else seq.ask.grammar
        asked = params.stop, self.grammar, params.logprobs, params.prompt_logprobs
        self.is_watched = is_streamed or asked.count(None) < len(asked)
        self.error: str | None = None  # why no more can be made of its tokens
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._tokenizer = tokenizer
        self._num_streamed = 0
        self._is_closed = False  # its last delta was taken
        self._drops_last = False  # the last token is no text
        self._detokenizer: Detokenizer | None = None
        if params.detokenize and (is_streamed or params.stop):
            self._detokenizer = Detokenizer(
                tokenizer,
                params.skip_special_tokens,
                tuple(params.stop or ()),
                params.include_stop_str_in_output,
                params.min_tokens,
            )

    def append(self, token: int) -> FinishReason | None:
        """Take a token that the scheduler has stored; why the completion ends with it, if it does.

        A stop string wins over a length reached with the same token.
        """
        seq = self.seq
        if self.grammar is not None:
            self.grammar.accept(token)
        self._drops_last = _is_ended_by_token(seq)
        if self._detokenizer is not None and not self._drops_last:
            if (stop := self.attempt(self._detokenizer.append, [token])) is not None:
                seq.stop_reason = stop
                return "stop"
        if self.error is not None:
            return "error"
        return "stop" if self.grammar is not None and self.grammar.is_terminated else None

    def attempt(self, function: Callable[..., Any], *args: Any) -> Any:
        """What function(*args) returns; None from where on the tokenizer fails, which ends this
        completion and no other."""
        if self.error is None:
            try:
                return function(*args)
            except TokenizerError as error:
                self.error = f"the tokenizer failed on the output: {error}"
        return None

    def take_delta(self) -> StreamDelta | None:
        """What is new, or None. Tokens whose text is held back come with their text."""
        seq, text = self.seq, ""
        reason = seq.finish_reason
        if self._is_closed:
            return None
        self._is_closed = reason is not None
        if self._detokenizer is not None:
            if reason is not None:
                self.attempt(self._detokenizer.finish)
            text = self.attempt(self._detokenizer.take_delta) or ""
        if reason is None and not text and self._detokenizer is not None:
            return None
        if self.error is not None:
            reason = "error"
        token_ids = seq.completion_token_ids[self._num_streamed :].tolist()
        self._num_streamed += len(token_ids)
        return StreamDelta(
            request_id=self.request.request_id,
            index=self.request.index,
            sample=self.number,
            text=text,
            token_ids=token_ids,
            finish_reason=reason,
            stop_reason=seq.stop_reason,
        )

    def add_logprobs(self, token: int, logprob: float, rank: int, ids: Any, values: Any) -> None:
        """One more position; ids and values: [k] of the most probable tokens."""
        assert self.logprobs is not None, "logprobs of a sample that did not ask"
        num = self.seq.sampling_params.logprobs or 0
        args = self._tokenizer, token, logprob, rank, ids[:num], values[:num]
        if (found := self.attempt(token_logprobs, *args)) is not None:
            self.logprobs.append(found)

    def output(self) -> SampleOutput:
        seq, params = self.seq, self.seq.sampling_params
        token_ids = seq.completion_token_ids.tolist()
        reason: FinishReason = seq.finish_reason or "abort"
        text = ""
        if self._detokenizer is not None:
            self.attempt(self._detokenizer.finish)
            text = self._detokenizer.text
        elif params.detokenize:
            drops_last = self._drops_last if self.is_watched else _is_ended_by_token(seq)
            shown = token_ids[:-1] if drops_last else token_ids
            text = self.attempt(self._decode, shown) or ""
        if self.error is not None:
            reason, text = "error", ""
        return SampleOutput(
            text=text,
            token_ids=token_ids,
            finish_reason=reason,
            stop_reason=seq.stop_reason,
            logprobs=self.logprobs,
        )

    def _decode(self, token_ids: list[int]) -> str:
        skips = self.seq.sampling_params.skip_special_tokens
        return call_tokenizer(self._tokenizer.decode, token_ids, skip_special_tokens=skips)


def _is_ended_by_token(seq: Sequence) -> bool:
    """By an EOS or a stop token id, which is as little text as a stop string; asked before anything
    else has ended it."""
    return seq.finish_reason == "stop" and not seq.sampling_params.include_stop_str_in_output


class Request:
    def __init__(
        self, index: int, seqs: list[Sequence], tokenizer: Any, is_streamed: bool, called_at: float
    ) -> None:
        """index: of its prompt in the call. seqs: its samples, the first one leads.

        called_at: time.perf_counter() of the call.
        """
        self.index = index
        self.request_id = seqs[0].seq_id
        self.samples = [Sample(self, seq, i, tokenizer, is_streamed) for i, seq in enumerate(seqs)]
        self.num_running = len(seqs)
        self._tokenizer = tokenizer
        self._called_at = called_at
        self._prompt_ids = seqs[0].token_ids
        wanted = seqs[0].sampling_params.prompt_logprobs
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        if wanted is not None:
            self._prompt_logprobs = [None] * seqs[0].num_prompt_tokens

    def add_prompt_logprobs(self, start: int, logprobs: Any) -> None:
        """Those of the tokens after positions start, start + 1, ...: layers.logprobs.Logprobs."""
        assert self._prompt_logprobs is not None, "prompt_logprobs of a request that did not ask"
        num = self.samples[0].seq.sampling_params.prompt_logprobs or 0
        parts = (part.tolist() for part in logprobs)
        for position, (value, rank, ids, values) in enumerate(zip(*parts, strict=True), start + 1):
            if position < len(self._prompt_logprobs):
                token = int(self._prompt_ids[position])
                args = self._tokenizer, token, value, rank, ids[:num], values[:num]
                self._prompt_logprobs[position] = self.samples[0].attempt(token_logprobs, *args)

    def output(self) -> RequestOutput:
        """The result, once every sample has ended."""
        outputs = [sample.output() for sample in self.samples]
        first = self.samples[0].seq
        error = None
        if "error" in [output["finish_reason"] for output in outputs]:
            errors = [sample.error for sample in self.samples if sample.error is not None]
            what = "the model's logits were not finite, or nothing was left to draw from"
            error = next(iter(errors), what)
        return RequestOutput(
            **outputs[0],
            prompt_token_ids=self._prompt_ids.tolist(),
            num_cached_tokens=first.num_hit_tokens or 0,
            prompt_logprobs=self._prompt_logprobs,
            outputs=outputs,
            metrics=self._metrics(sum([len(output["token_ids"]) for output in outputs])),
            error=error,
        )

    def _metrics(self, num_tokens: int) -> RequestMetrics | None:
        first = self.samples[0].seq
        end = max([sample.seq.finished_at for sample in self.samples])
        if not first.admitted_at or not first.first_token_at:
            return None  # aborted before
        return RequestMetrics(
            queue=first.admitted_at - self._called_at,
            prefill=first.first_token_at - first.admitted_at,
            decode=end - first.first_token_at,
            tokens_per_second=num_tokens / max(end - first.admitted_at, 1e-9),
        )


def refused(prompt_ids: list[int], error: Exception) -> RequestOutput:
    """The result of a request that was not run."""
    return RequestOutput(
        text="",
        token_ids=[],
        finish_reason="error",
        stop_reason=None,
        logprobs=None,
        prompt_token_ids=prompt_ids,
        num_cached_tokens=0,
        prompt_logprobs=None,
        outputs=[],
        metrics=None,
        error=str(error),
    )


def token_logprobs(
    tokenizer: Any, token: int, logprob: float, rank: int, ids: list[int], values: list[float]
) -> TokenLogprobs:
    """Of the token itself, then of the k most probable; params as Logprobs has them."""

    def entry(token_id: int, value: float, rank: int) -> Logprob:
        return Logprob(value, rank, call_tokenizer(tokenizer.decode, [token_id]))

    found = {token: entry(token, logprob, rank)}
    for i, (token_id, value) in enumerate(zip(ids, values, strict=True), 1):
        if token_id != token:
            found[token_id] = entry(token_id, value, i)
    return found
