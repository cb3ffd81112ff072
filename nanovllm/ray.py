"""Bulk jobs on many GPUs and machines: an engine in each actor of a Ray Data pipeline.

Ray owns machines, retries and progress; lines and files mean what they mean in run_batch. Inside
this module `ray` is the library. It is the extra `ray`: pip install "nano-vllm[ray]".
"""

import asyncio
import logging
import os
import queue
import random
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from nanovllm import run_batch
from nanovllm.batch_files import Held, ResultFile, open_input
from nanovllm.batch_lines import Line, LineReader
from nanovllm.batch_results import known_result, result_line
from nanovllm.config import Config
from nanovllm.outputs import RequestOutput, count_tokens

logger = logging.getLogger("nanovllm")

# Of one engine, each a task of Ray's: requests of the next one run while the last ones of this one
# end. With a quarter of max_num_seqs in each the engine always has as many again to choose from.
BATCHES_AT_ONCE = 8
ROWS_PER_READ = 256


class LLMPredictor:
    """For ray.data.Dataset.map_batches: one engine in each actor, which stays full as several
    batches are in it at once.

    dataset.repartition(target_num_rows_per_block=128).map_batches(
        LLMPredictor,
        fn_constructor_kwargs={"model": "Qwen/Qwen3-0.6B", "tensor_parallel_size": 2},
        num_gpus=2, batch_size=128, batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=4, max_concurrent_calls_per_actor=8),
    )

    Rows have one of the columns prompt, messages and prompt_token_ids, and any field of
    SamplingParams; null stands for the default. They get the columns text, token_ids,
    finish_reason, num_prompt_tokens and error, which is null where all went well.
    """

    def __init__(
        self, model: str, sampling_params: Mapping[str, Any] | None = None, **config: Any
    ) -> None:
        """sampling_params: of rows that do not say. config: fields of Config."""
        self._reader = LineReader(sampling_params or {})
        self._engine = _EngineThread(Config.from_kwargs(model, **config))

    async def __call__(self, batch: Any) -> AsyncIterator[Any]:
        import pyarrow as pa
        from ray.data.block import BlockAccessor

        if not isinstance(batch, pa.Table):
            batch = BlockAccessor.for_block(BlockAccessor.batch_to_block(batch)).to_arrow()
        # What another actor draws for the same prompt is to be another answer.
        draw = random.SystemRandom().getrandbits
        lines = [self._reader.read_row(draw(62) + 1, _known(row)) for row in batch.to_pylist()]
        outputs = await self._complete(lines)
        num_prompt_tokens = [len(output["prompt_token_ids"]) for output in outputs]
        columns = {
            "text": pa.array([output["text"] for output in outputs], pa.string()),
            "token_ids": pa.array([o["token_ids"] for o in outputs], pa.list_(pa.int32())),
            "finish_reason": pa.array([o["finish_reason"] for o in outputs], pa.string()),
            "num_prompt_tokens": pa.array(num_prompt_tokens, pa.int32()),
            "error": pa.array([output["error"] for output in outputs], pa.string()),
        }
        batch = batch.drop_columns([name for name in columns if name in batch.column_names])
        for name, column in columns.items():
            batch = batch.append_column(name, column)
        yield batch

    async def _complete(self, lines: list[Line]) -> list[RequestOutput]:
        futures = [asyncio.wrap_future(self._engine.submit(line)) for line in lines]
        outputs = await asyncio.gather(*futures)
        self._engine.has_done_a_batch = True
        return outputs


class LinePredictor(LLMPredictor):
    """The same for lines of a file: rows of `line`, its number, `raw`, its bytes, and `error`."""

    async def __call__(self, batch: Any) -> AsyncIterator[Any]:
        import pyarrow as pa

        lines = []
        for row in batch.to_pylist():
            line = self._reader.read(row["line"], row["raw"])
            lines.append(replace(line, error=row["error"]))
        outputs = await self._complete(lines)
        results = [result_line(*pair) for pair in zip(lines, outputs, strict=True)]
        tokens = [count_tokens(output) for output in outputs]
        yield pa.table(
            {
                "line": pa.array([line.number for line in lines], pa.int64()),
                "custom_id": pa.array([line.custom_id for line in lines], pa.string()),
                "is_failed": pa.array([o["finish_reason"] == "error" for o in outputs], pa.bool_()),
                "num_tokens": pa.array(tokens, pa.int64()),
                "result": pa.array([result.decode() for result in results], pa.string()),
            }
        )


def _known(row: dict[str, Any]) -> dict[str, Any]:
    """Of a row of any dataset, what a line would have; NaN is how pandas writes a null."""
    known = LineReader.ROW_FIELDS
    return {name: value for name, value in row.items() if name in known and value == value}


class _EngineThread:
    """An engine, which is for one thread only, for those of an actor."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._todo: queue.SimpleQueue[tuple[Line, Future[Any]]] = queue.SimpleQueue()
        self._running: dict[int, Future[Any]] = {}
        self._fault: BaseException | None = None
        self.has_done_a_batch = False
        is_ready: Future[None] = Future()
        threading.Thread(target=self._run, args=[is_ready], daemon=True).start()
        is_ready.result()

    def submit(self, line: Line) -> "Future[RequestOutput]":
        """line: its key is no other's that is in flight."""
        future: Future[RequestOutput] = Future()
        if line.error is not None:
            future.set_result(run_batch.error_output(line.error))
            return future
        self._todo.put((line, future))
        if self._fault is not None:  # nobody takes it from there
            raise self._fault
        return future

    def _run(self, is_ready: "Future[None]") -> None:
        try:
            engine = run_batch.open_engine(self._config)
        except BaseException as error:
            is_ready.set_exception(error)
            return
        is_ready.set_result(None)
        try:
            for key, output in engine.generate_each(self._items(engine)):
                self._running.pop(key).set_result(output)
        except BaseException as error:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        """Nothing can be expected of this process: Ray starts another and runs the rest there.

        If it has done so already, and that was of no use, one of the requests may be the cause.
        """
        import ray

        logger.critical("the engine of this actor failed", exc_info=error)
        is_second = ray.get_runtime_context().was_current_actor_reconstructed
        if not is_second or self.has_done_a_batch:
            logging.shutdown()
            os._exit(1)
        self._fault = error
        for future in self._running.values():
            future.set_exception(error)

    def _items(self, engine: "run_batch.LLM") -> Iterator[run_batch.Item | None]:
        while True:
            try:  # with nothing to run there is nothing to do but wait
                line, future = self._todo.get(block=not self._running)
            except queue.Empty:
                yield None
                continue
            try:
                prompt = run_batch.engine_prompt(engine, line)
            except (ValueError, TypeError) as error:
                future.set_result(run_batch.error_output(str(error)))
                continue
            self._running[line.key] = future
            yield line.key, prompt, line.params


# -- run-batch --ray -------------------------------------------------------------------------------


def run_on_ray(job: run_batch.Job) -> int:
    """Run a job on a cluster; its exit status."""
    return run_batch.ending(lambda: _run_on_ray(job))


def _run_on_ray(job: run_batch.Job) -> int:
    try:
        import ray
    except ImportError as error:
        need = 'needs Ray, try pip install "nano-vllm[ray]"'
        raise RuntimeError(f"--ray: {need} ({error})") from error
    if job.source == "-":
        raise ValueError("--ray: got - as input, needs a file")
    if not ray.is_initialized():
        ray.init(job.ray or None, log_to_driver=True)
    to_parquet = _is_parquet(job.target)
    if _is_parquet(job.source):
        if job.resume:
            raise ValueError("--resume: got Parquet, needs lines as input and output")
        rows = _predict(job, ray, ray.data.read_parquet(job.source), LLMPredictor)
        failure = "error"
    elif to_parquet:
        rows, failure = _predict_lines(job, ray, Held()), "is_failed"
    else:
        return _run_lines(job, ray)
    if to_parquet:
        rows.write_parquet(job.target, mode="create")
        results = ray.data.read_parquet(job.target, columns=[failure])
    else:
        rows.write_json(job.target, mode="create")
        results = ray.data.read_json(job.target)
    num_failed = results.filter(lambda row: bool(row[failure])).count()
    return run_batch.SOME_FAILED if num_failed else run_batch.ALL_DONE


def _is_parquet(path: str) -> bool:
    return path.rstrip("/").endswith(".parquet") or Path(path).is_dir()


def _run_lines(job: run_batch.Job, ray: Any) -> int:
    """The output is one file, written here, so that it can be gone on with."""
    open_input(job.source).close()  # before an output is made
    results = ResultFile(job.target, job.resume, known_result)
    with closing(results), run_batch.Progress(None, results.held, is_shown=False) as progress:
        for table in _predict_lines(job, ray, results.held).iter_batches(
            batch_size=None, batch_format="pyarrow"
        ):
            for row in table.to_pylist():
                results.write(row["result"].encode("utf-8", "backslashreplace"))
                progress.add(row["num_tokens"], row["is_failed"])
        progress.say_summary()
        return run_batch.SOME_FAILED if progress.num_failed else run_batch.ALL_DONE


def _predict_lines(job: run_batch.Job, ray: Any, held: Held) -> Any:
    # Small blocks, so that engines start on the first lines of a large file.
    ray.data.DataContext.get_current().target_max_block_size = 4 * 2**20
    lines = ray.data.from_items([{"path": os.path.abspath(job.source)}]).map_batches(
        _read_file,
        fn_kwargs={"defaults": job.defaults, "held": held},
        resources={f"node:{ray.util.get_node_ip_address()}": 0.001},  # where the file is
    )
    return _predict(job, ray, lines, LinePredictor)


def _read_file(batch: Any, defaults: Mapping[str, Any], held: Held) -> Iterator[Any]:
    import pyarrow as pa

    with open_input(str(batch["path"][0])) as stream:
        lines = run_batch.new_lines(stream, LineReader(defaults), held)
        while chunk := list(islice(lines, ROWS_PER_READ)):
            yield pa.table(
                {
                    "line": pa.array([line.number for line in chunk], pa.int64()),
                    "raw": pa.array([line.raw for line in chunk], pa.large_binary()),
                    "error": pa.array([line.error for line in chunk], pa.string()),
                }
            )


def _predict(job: run_batch.Job, ray: Any, rows: Any, predictor: type[LLMPredictor]) -> Any:
    has_gpus = job.config.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
    num_rows = max(1, job.config.max_num_seqs // 4)
    actors = ray.data.ActorPoolStrategy(
        size=job.replicas,
        max_tasks_in_flight_per_actor=BATCHES_AT_ONCE,
        max_concurrent_calls_per_actor=BATCHES_AT_ONCE,
    )
    return rows.repartition(target_num_rows_per_block=num_rows).map_batches(
        predictor,
        batch_size=num_rows,
        batch_format="pyarrow",
        compute=actors,
        fn_constructor_kwargs={**asdict(job.config), "sampling_params": dict(job.defaults)},
        num_gpus=job.config.tensor_parallel_size if has_gpus else None,
        # Half a CPU is left for Ray's other tasks, which would wait for ever for more.
        num_cpus=None if has_gpus else 0.5,
    )
