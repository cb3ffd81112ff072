"""LLMEngine: prompts in, completions out. It owns the scheduler and every rank's model runner."""

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NoReturn

import torch

from nanovllm.config import Config, load_hf_config, resolve_checkpoint
from nanovllm.engine.chat import render_chat
from nanovllm.engine.checks import check_backend, check_model
from nanovllm.engine.faults import check_flag, naming
from nanovllm.engine.feed import Item, feed
from nanovllm.engine.intake import Intake, Prepared, known_prompt_ids
from nanovllm.engine.log import log_start, show_log
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.params import default_sampling_params
from nanovllm.engine.precompile import start_compiling
from nanovllm.engine.progress import Progress
from nanovllm.engine.prompts import check_one, find_eos_token_ids
from nanovllm.engine.request import refused
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step_loop import StepLoop
from nanovllm.engine.tokenizer import open_tokenizer, whole_tokenizer
from nanovllm.engine.worker_group import WorkerGroup
from nanovllm.errors import EngineDeadError
from nanovllm.outputs import RequestOutput, StreamDelta
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.garbage import collected_rarely


class LLMEngine:
    """An offline engine over one checkpoint.

    One request goes through add_request, some step()s and comes out of the step that finished it;
    generate() does this for many and keeps their order. Not thread-safe.
    """

    def __init__(self, model: str, **kwargs: Any) -> None:
        """Load `model` (a directory or a hub id) and get ready to generate.

        kwargs are the fields of Config. Raises ValueError or TypeError, before any device work,
        for settings or a checkpoint that cannot work.
        """
        show_log()
        self.config = config = Config.from_kwargs(model, **kwargs)
        _check_alone(config)
        checkpoint = resolve_checkpoint(config.model)
        hf_config = load_hf_config(checkpoint)
        self.max_model_len, head_dim = check_model(config, hf_config, checkpoint)
        compilation = start_compiling(config, hf_config, self.max_model_len)
        try:
            check_backend(config, hf_config, head_dim)
            self._tokenizer = open_tokenizer(checkpoint)
        finally:
            if compilation is not None:
                compilation.wait()
        eos_token_ids = find_eos_token_ids(checkpoint, self._tokenizer, hf_config)
        self._defaults = default_sampling_params(checkpoint)
        start = time.perf_counter()
        workers = WorkerGroup(config, checkpoint, self.max_model_len)
        # Runs at close(), when the engine is collected, or at exit, whichever comes first. It must
        # not hold the engine itself, or the engine would never be collected.
        parts: list[Any] = [workers]
        self._finalizer = weakref.finalize(self, _close, parts)
        _open_engines.add(self)
        # New objects by the thousand set off the garbage collector. It is not to walk through all
        # of torch's each time, a tenth of a second in which the device waits. Until _close: what
        # were frozen at the program's end would look like leaks.
        gc.freeze()
        try:
            meeting = workers.init_method, workers.has_failed
            self._runner = ModelRunner(
                config, hf_config, checkpoint, self.max_model_len, 0, *meeting
            )
            parts.append(self._runner)
            workers.wait_for_start(self._runner.facts())
        except BaseException as error:
            self._give_up(workers, error)
            raise
        limits = config.max_num_seqs, config.max_num_batched_tokens, self.max_model_len
        blocks = config.kvcache_block_size, self._runner.num_blocks
        policy = config.schedule_policy, config.cascade_attention
        self.scheduler = Scheduler(*limits, *blocks, eos_token_ids, *policy)
        self._loop = StepLoop(
            self.scheduler, self._runner, workers, config.overlap, self._finalizer
        )
        ends = self.scheduler.max_len, self.scheduler.eos_token_ids
        self._intake = Intake(config.seed, self._tokenizer, hf_config.vocab_size, *ends)
        log_start(self._runner, self.device_name, time.perf_counter() - start)

    def _give_up(self, workers: WorkerGroup, error: BaseException) -> None:
        """After a failed start; raises what another rank failed with, where that was the reason."""
        fault = workers.explain(error) if workers.has_failed() else None
        self.close()
        if fault is not None and not isinstance(error, EngineDeadError):
            raise fault from error

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "pickle: got an engine, which holds a device and other processes, needs to be made"
            " where it is used, try LLM(...) there"
        )

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def device_name(self) -> str:
        """The device as a person would name it."""
        device = self._runner.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's, of transformers, which is imported now if nothing needed it before."""
        return whole_tokenizer(self._tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """The checkpoint's own, from its generation_config.json; SamplingParams() without one."""
        return SamplingParams(**self._defaults)

    def add_request(self, prompt: Any, sampling_params: SamplingParams | None = None) -> int:
        """Queue one prompt (a string, token ids or a dict) and return its request id.

        Raises ValueError or TypeError, with nothing queued, when the prompt cannot be served.
        """
        self._check_open()
        with naming("prompt"):
            check_one("prompt", prompt)
        prepared = self._intake.read([prompt], sampling_params)[0]
        with self._loop.turn:
            self._check_not_serving("add_request")
            request = self._intake.make(prepared)
            self._loop.add(request)
        return request.request_id

    def step(self) -> list[tuple[int, RequestOutput]]:
        """Compute one step; the requests it finished, each as (request id, result).

        An exception from the device drops every queued request; the engine stays usable. Other
        threads may add requests, and abort them, meanwhile.
        """
        self._check_open()
        with self._loop.turn:
            self._check_not_serving("step")
            outcome = self._loop.step()
        try:
            return [(request.request_id, request.output()) for request in outcome.ended]
        except BaseException:
            self._loop.reset()
            raise

    def abort(self, request_id: int) -> None:
        """End a request between two steps; it comes out with what it has and reason "abort".

        A request that has ended already is left alone. While a stream is read, ids are those of its
        pieces.
        """
        self._loop.abort(request_id)

    def is_finished(self) -> bool:
        """Whether no request is waiting or running."""
        return not self._finalizer.alive or self._loop.is_finished()

    @collected_rarely()
    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        on_error: str = "raise",
        on_result: Callable[[int, RequestOutput], object] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; results come in the order of the prompts.

        prompts: one prompt or a list of them, each a string, a list of token ids, or a dict with
            "prompt" or "prompt_token_ids".
        sampling_params: one for all prompts, or one for each; None: the defaults.
        use_tqdm: show finished requests and tokens per second while it runs.
        on_error: "raise" raises the ValueError or TypeError of the first bad request, naming its
            index, before anything is computed; "return" gives that one a result with finish_reason
            "error" and runs the others.
        on_result: called with each request's index and result when it has ended.
        """
        self._check_idle("generate")
        check_flag("use_tqdm", use_tqdm)
        if on_result is not None and not callable(on_result):
            raise TypeError(f"on_result: got {type(on_result).__name__}, needs a function or None")
        prepared = self._intake.read(prompts, sampling_params, on_error)
        outputs: dict[int, RequestOutput] = {}

        def deliver(index: int, output: RequestOutput) -> None:
            outputs[index] = output
            if on_result is not None:
                on_result(index, output)

        todo = (self._intake.make(p) for p in prepared if p.error is None)
        with (
            Progress(len(prepared), use_tqdm) as progress,
            contextlib.closing(self._loop.serve(todo)) as outcomes,
        ):
            for p in prepared:
                if p.error is not None:
                    deliver(p.index, refused(known_prompt_ids(p), p.error))
            progress.update(None, len(outputs))
            for outcome in outcomes:
                for request in outcome.ended:
                    deliver(request.index, request.output())
                progress.update(outcome.batch, len(outcome.ended))
        progress.log_end(outputs.values())
        return [outputs[p.index] for p in prepared]

    def generate_each(
        self, requests: Iterable[Item | None]
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """As generate, of any number of prompts: yields (key, result) as each request ends.

        requests: (key, prompt, SamplingParams or None), taken as the engine has room for them, so
            that neither they nor the results need fit in memory. The key, an integer from 0, tells
            results apart, and what is drawn depends on it as on a prompt's index in generate. None
            among them says that there are none for now: the next is asked for after the next step.
        A bad request gets a result with finish_reason "error". Leaving the iterator early aborts
        what is unfinished.
        """
        self._check_idle("generate_each")
        return feed(self._loop, self._intake, lambda: self._check_idle("generate_each"), requests)

    def stream(
        self, prompts: Any, sampling_params: SamplingParams | list[SamplingParams] | None = None
    ) -> Iterator[StreamDelta]:
        """As generate, but yields what is new of each completion as it comes.

        The texts of a completion's pieces are the text that generate would give. Leaving the
        iterator early aborts what is unfinished. Errors are raised by this call.
        """
        self._check_idle("stream")
        return self._deltas(self._intake.read(prompts, sampling_params))

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Any = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        on_error: str = "raise",
        on_result: Callable[[int, RequestOutput], object] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many through the chat template; else as generate.

        messages: a list of {"role", "content"} dicts, or a list of such lists; the template's
        options are described at render_chat.
        """
        self._check_idle("chat")
        prompts = render_chat(
            self.tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            on_error=on_error,
        )
        return self.generate(
            prompts, sampling_params, use_tqdm, on_error=on_error, on_result=on_result
        )

    def close(self) -> None:
        """Free the device and end the other ranks; later calls do nothing."""
        _open_engines.discard(self)
        self._finalizer()

    exit = close

    def _check_open(self) -> None:
        self._loop.check_open()

    def _check_not_serving(self, call: str) -> None:
        if self._loop.is_serving:
            raise RuntimeError(
                f"{call}: generate or a stream is running, needs it to end first, try to call it"
                " outside of on_result and of the loop over a stream"
            )

    def _check_idle(self, call: str) -> None:
        self._check_open()
        if not self.is_finished():
            raise RuntimeError(
                f"{call}: requests from add_request or a stream are unfinished, needs an idle"
                " engine, try step() until is_finished(), or read or close() the stream"
            )

    def _deltas(self, prepared: list[Prepared]) -> Generator[StreamDelta, None, None]:
        self._check_idle("stream")  # again: another one may have been begun meanwhile
        todo = (self._intake.make(p, is_streamed=True) for p in prepared)
        with contextlib.closing(self._loop.serve(todo)) as outcomes:
            for outcome in outcomes:
                # Aborted ones were not touched, and those that were give nothing a second time.
                for sample in outcome.touched + [s for r in outcome.ended for s in r.samples]:
                    delta = sample.take_delta()
                    if delta is not None:
                        yield delta


# Ranks are a property of the process (utils/distributed.py), so an engine that has several of them
# shares the process with no other.
_open_engines: weakref.WeakSet[LLMEngine] = weakref.WeakSet()


def _check_alone(config: Config) -> None:
    others = [e.config.tensor_parallel_size for e in _open_engines if e._finalizer.alive]
    if others and max(*others, config.tensor_parallel_size) > 1:
        raise RuntimeError(
            f"tensor_parallel_size: got {config.tensor_parallel_size} beside engines of {others}"
            " ranks, needs a process of its own where there are several ranks, try close() on the"
            " others first"
        )


def _close(parts: list[Any]) -> None:
    """Close a WorkerGroup and, where the start got that far, a ModelRunner."""
    workers, *runners = parts
    # Ranks leave the process group together, so the workers are told before rank 0 leaves.
    workers.ask_to_close()
    for runner in runners:
        runner.close()
    workers.close()
    parts[1:] = []
    gc.unfreeze()
