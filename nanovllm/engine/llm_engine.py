"""LLMEngine: prompts in, completions out. It owns the scheduler and every rank's model runner."""

import logging
import numbers
import struct
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import torch
import xxhash
from tqdm.auto import tqdm

import nanovllm
from nanovllm.attention import select_backend
from nanovllm.config import Config, load_hf_config, resolve_checkpoint
from nanovllm.engine.model_runner import ModelRunner, StepHandle, select_device, select_dtype
from nanovllm.engine.precompile import start_compiling
from nanovllm.engine.prompts import (
    PromptReader,
    find_eos_token_ids,
    load_tokenizer,
    read_sampling_params,
)
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import ScheduledBatch, Sequence
from nanovllm.engine.worker import WorkerGroup
from nanovllm.layers.attention import Attention
from nanovllm.models import get_model_class
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils import distributed
from nanovllm.utils.loader import check_checkpoint

logger = logging.getLogger("nanovllm")


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
        _show_log()
        self.config = config = Config.from_kwargs(model, **kwargs)
        _check_alone(config)
        checkpoint = resolve_checkpoint(config.model)
        hf_config = load_hf_config(checkpoint)
        self.max_model_len, head_dim = _check_model(config, hf_config, checkpoint)
        compilation = start_compiling(config, hf_config, self.max_model_len)
        try:
            _check_backend(config, hf_config, head_dim)
            self.tokenizer = load_tokenizer(checkpoint)
        finally:
            if compilation is not None:
                compilation.wait()
        eos_token_ids = find_eos_token_ids(checkpoint, self.tokenizer, hf_config)
        start = time.perf_counter()
        _open_engines.add(self)
        workers = WorkerGroup(config, checkpoint, self.max_model_len)
        # Runs at close(), when the engine is collected, or at exit, whichever comes first. It must
        # not hold the engine itself, or the engine would never be collected.
        parts: list[Any] = [workers]
        self._finalizer = weakref.finalize(self, _close, parts)
        try:
            self._runner = ModelRunner(
                config, hf_config, checkpoint, self.max_model_len, 0, workers.init_method
            )
            parts.append(self._runner)
            workers.wait()
        except BaseException:
            self.close()
            raise
        self._workers = workers
        self._num_requests = 0
        # Steps launched and not read back, oldest first: at most one between two calls.
        self._inflight: deque[tuple[ScheduledBatch, StepHandle]] = deque()
        self.scheduler = Scheduler(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            self.max_model_len,
            config.kvcache_block_size,
            self._runner.num_blocks,
            eos_token_ids,
        )
        self._reader = PromptReader(self.tokenizer, hf_config.vocab_size, self.scheduler.max_len)
        self._log_start(time.perf_counter() - start)

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def device_name(self) -> str:
        """The device as a person would name it."""
        device = self._runner.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"

    def add_request(self, prompt: Any, sampling_params: SamplingParams | None = None) -> int:
        """Queue one prompt (a string or token ids) and return its request id.

        Raises ValueError or TypeError, with nothing queued, when the prompt cannot be served.
        """
        self._check_open()
        if isinstance(prompt, numbers.Integral):
            raise TypeError(f"prompt: got {prompt!r}, needs a string or a list of token ids")
        token_ids = self._reader.read([prompt])[0]
        params = read_sampling_params(sampling_params, 1)[0]
        seq = self._make_sequence(token_ids, params)
        self.scheduler.add(seq)
        return seq.seq_id

    def step(self) -> list[tuple[int, RequestOutput]]:
        """Compute one step; the requests it finished, each as (request id, result).

        An exception from the device drops every queued request; the engine stays usable.
        """
        self._check_open()
        _, finished = self._step()
        return list(zip([seq.seq_id for seq in finished], self._outputs(finished), strict=True))

    def is_finished(self) -> bool:
        """Whether no request is waiting or running."""
        return self.scheduler.is_finished()

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; results come in the order of the prompts.

        prompts: one prompt or a list of them, each a string or a list of token ids.
        sampling_params: one for all prompts, or one for each; None: the defaults.
        use_tqdm: show finished requests and tokens per second while it runs.
        Raises ValueError or TypeError, before anything is computed, naming the bad argument.
        """
        self._check_open()
        if not self.is_finished():
            raise RuntimeError(
                "generate: requests from add_request are unfinished, needs an idle engine, try"
                " step() until is_finished()"
            )
        prompt_ids = self._reader.read(prompts)
        params = read_sampling_params(sampling_params, len(prompt_ids))
        seqs = [self._make_sequence(ids, p) for ids, p in zip(prompt_ids, params, strict=True)]
        outputs: dict[int, RequestOutput] = {}
        try:
            for seq in seqs:
                self.scheduler.add(seq)
            with _Progress(len(seqs), use_tqdm) as progress:
                while not self.is_finished():
                    batch, finished = self._step()
                    for seq, output in zip(finished, self._outputs(finished), strict=True):
                        outputs[seq.seq_id] = output
                    progress.update(batch, len(finished))
        except BaseException:  # an interrupt too: no request and no block may stay behind
            self._reset()
            raise
        return [outputs[seq.seq_id] for seq in seqs]

    def close(self) -> None:
        """Free the device and end the other ranks; later calls do nothing."""
        _open_engines.discard(self)
        self._finalizer()

    exit = close

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("this engine was closed, needs an open one, make a new LLM")

    def _make_sequence(self, token_ids: Any, params: SamplingParams) -> Sequence:
        """A request with its own random numbers: they depend on the engine's seed and its turn."""
        key = struct.pack("<QQ", self.config.seed, self._num_requests)
        self._num_requests += 1
        seed = xxhash.xxh64_intdigest(key) >> 1
        return Sequence(token_ids, params, self.scheduler.max_len, seed)

    def _step(self) -> tuple[ScheduledBatch | None, list[Sequence]]:
        """Launch the next step, then read back the one before it, or this one without overlap.

        While the host does the second, stores the tokens and makes their text, the device works
        on the first.
        """
        try:
            batch = self.scheduler.schedule()
            if batch is not None:
                self._workers.send_batch(batch)
                self._inflight.append((batch, self._runner.launch(batch)))
                self._workers.wait()
            num_kept = 1 if self.config.overlap and batch is not None else 0
            finished: list[Sequence] = []
            # Once every request has ended, the step still in flight holds nothing but surplus.
            while len(self._inflight) > num_kept or (self._inflight and self.is_finished()):
                launched, handle = self._inflight.popleft()
                finished += self.scheduler.update(launched, handle.token_ids())
            return batch, finished
        except BaseException:
            # How far the step got is unknown, so nothing of it is kept.
            self._reset()
            raise

    def _reset(self) -> None:
        self._inflight.clear()
        self.scheduler.reset()

    def _outputs(self, seqs: list[Sequence]) -> list[RequestOutput]:
        if not seqs:
            return []
        token_ids = [seq.completion_token_ids.tolist() for seq in seqs]
        texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        return [
            RequestOutput(text=text, token_ids=ids, finish_reason=seq.finish_reason)
            for text, ids, seq in zip(texts, token_ids, seqs, strict=True)
            if seq.finish_reason is not None
        ]

    def _log_start(self, seconds: float) -> None:
        runner, size = self._runner, self.config.kvcache_block_size
        reason = f"; {runner.backend_reason}" if runner.backend_reason else ""
        logger.info(
            "nanovllm %s on %s: %s, attention %s, %.1fM parameters%s, %d KV blocks of %d tokens"
            " (%d tokens), ready in %.1f s%s",
            nanovllm.__version__,
            self.device_name,
            str(runner.dtype).removeprefix("torch."),
            runner.backend.name,
            runner.num_parameters / 1e6,
            f" on each of {distributed.tp_size()} ranks" if distributed.tp_size() > 1 else "",
            runner.num_blocks,
            size,
            runner.num_blocks * size,
            seconds,
            reason,
        )


class _Progress:
    """The bar over finished requests, with the speed of the last steps of each kind."""

    def __init__(self, num_requests: int, is_shown: bool) -> None:
        self._bar = tqdm(total=num_requests, desc="Generating", disable=not is_shown)
        self._speeds = {"prefill": "0 tok/s", "decode": "0 tok/s"}
        self._last = time.perf_counter()

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()

    def update(self, batch: ScheduledBatch | None, num_finished: int) -> None:
        if self._bar.disable or batch is None:
            return
        now = time.perf_counter()
        speed = batch.num_tokens / (now - self._last)
        self._last = now
        self._speeds["prefill" if batch.is_prefill else "decode"] = f"{speed:.0f} tok/s"
        self._bar.set_postfix(self._speeds, refresh=False)
        self._bar.update(num_finished)


# Ranks are a property of the process (utils/distributed.py), so an engine that has several of them
# shares the process with no other.
_open_engines: weakref.WeakSet[LLMEngine] = weakref.WeakSet()


def _check_alone(config: Config) -> None:
    others = [engine.config.tensor_parallel_size for engine in _open_engines]
    if others and max(*others, config.tensor_parallel_size) > 1:
        raise RuntimeError(
            f"tensor_parallel_size: got {config.tensor_parallel_size} beside engines of {others}"
            " ranks, needs a process of its own where there are several ranks, try close() on the"
            " others first"
        )


def _check_model(config: Config, hf_config: Any, checkpoint: Path) -> tuple[int, int]:
    """Refuse what cannot work before the device is touched; (longest sequence, head_dim)."""
    model_class = get_model_class(hf_config)
    positions = getattr(hf_config, "max_position_embeddings", None) or config.max_model_len
    max_model_len = min(config.max_model_len, positions)
    model_class.check_config(hf_config, config.tensor_parallel_size, max_model_len)
    with torch.device("meta"):
        skeleton = model_class(hf_config)
    if config.load_format == "auto":
        check_checkpoint(skeleton, checkpoint)
    head_dim = next(m.head_dim for m in skeleton.modules() if isinstance(m, Attention))
    return max_model_len, head_dim


def _check_backend(config: Config, hf_config: Any, head_dim: int) -> None:
    """Refuse a device, dtype or attention backend that cannot be had."""
    device = select_device(config, 0)
    dtype = select_dtype(config, hf_config, device)
    select_backend(config.attention_backend, device, dtype, head_dim, config.kvcache_block_size)


def _close(parts: list[Any]) -> None:
    """Close a WorkerGroup and, where the start got that far, a ModelRunner."""
    workers, *runners = parts
    # Ranks leave the process group together, so the workers are told before rank 0 leaves.
    workers.ask_to_close()
    for runner in runners:
        runner.close()
    workers.close()
    parts[1:] = []


def _show_log() -> None:
    """Let the log line be seen when the program has not set up logging itself."""
    if not logging.getLogger().handlers and not logger.handlers:
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)
