"""Bulk jobs through Ray, really started here: two replicas of the bundled checkpoint on the CPU."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from nanovllm import LLM, SamplingParams
from tests.test_bundled import BUNDLED, ROOT
from tests.test_run_batch import openai, read, write

pytest.importorskip("ray", reason='needs Ray: pip install "nano-vllm[ray]"')
# One cluster at a time: it takes all processors.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

NUM_LINES = 600


def command(source, target, *options):
    args = ["-i", str(source), "-o", str(target), "--model", str(BUNDLED), "--device", "cpu"]
    args += ["--max-num-seqs", "16", "--temperature", "0", "--max-tokens", "12", *options]
    return [sys.executable, "-m", "nanovllm", "run-batch", *args]


def run(source, target, *options):
    done = subprocess.run(
        command(source, target, *options), cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stderr


def replicas():
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "LinePredictor" in " ".join(process.info["cmdline"] or []):
            found.append(process)
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    lines = []
    for i in range(NUM_LINES):
        prompt = f"count from {i % 50} to {i % 50 + 5}"
        kinds = [{"prompt": prompt}, openai(f"id {i}", prompt=prompt), {"prompt": prompt}]
        kinds += [{"messages": [{"role": "user", "content": prompt}]}]
        lines.append(kinds[i % 4])
    lines[7] = lines[9] = "{bad"
    lines[11] = {"prompt": ""}
    lines[13] = lines[1]  # its custom_id again
    return write(tmp_path_factory.mktemp("ray") / "in.jsonl", lines)


def test_killed_replica_is_replaced_and_answers_are_those_of_one_engine(source, tmp_path):
    """Greedy. Then a job of which half is there already goes on."""
    whole, target = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert run(source, whole)[0] == 1
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(
            command(source, target, "--ray", "--replicas", "2"), cwd=ROOT, stderr=log, stdout=log
        )
    victim, deadline = None, time.monotonic() + 250
    while job.poll() is None and time.monotonic() < deadline:
        is_midway = target.exists() and target.read_bytes().count(b"\n") > NUM_LINES // 10
        if victim is None and is_midway and len(found := replicas()) == 2:
            victim = found[0]
            victim.kill()
        time.sleep(0.02)
    try:
        assert job.poll() == 1, (tmp_path / "log").read_text()[-3000:]
    finally:
        job.kill()
    assert victim is not None
    assert read(target) == read(whole) and len(read(whole)) == NUM_LINES

    lines = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(lines[: NUM_LINES // 2]) + lines[-1][:20])
    assert run(source, target, "--ray", "--resume")[0] == 1
    assert read(target) == read(whole)


def test_parquet_in_and_out(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    prompts = [f"count from {i} to {i + 5}" for i in range(20)] + [""]
    table = {"id": list(range(21)), "prompt": prompts, "max_tokens": [None, 3] * 10 + [None]}
    pq.write_table(pa.table(table), tmp_path / "in.parquet")
    status, log = run(tmp_path / "in.parquet", tmp_path / "out.parquet", "--ray")
    assert status == 1, log[-3000:]
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    rows.sort(key=lambda row: row["id"])
    lines = [{"prompt": p, "max_tokens": m} for p, m in zip(prompts, table["max_tokens"])]  # noqa: B905
    assert run(write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")[0] == 1
    for row, result in zip(rows, read(tmp_path / "out.jsonl"), strict=True):
        assert row["prompt"] == prompts[row["id"]]
        assert row["error"] == result["error"]
        assert row["error"] or row["text"] == result["text"]
        assert len(row["token_ids"]) <= (row["max_tokens"] or 12)


PIPELINE = """
import json, ray, sys
from nanovllm import LLM
from nanovllm.ray import LLMPredictor

class Failing(LLMPredictor):
    # The engine fails at its sixth answer: that of the first process, or every one.
    def __init__(self, fails_always, **settings):
        if fails_always or not ray.get_runtime_context().was_current_actor_reconstructed:
            whole = LLM.generate_each
            def some(self, items):
                for i, answer in enumerate(whole(self, items)):
                    if i == 5:
                        raise RuntimeError("the engine is broken")
                    yield answer
            LLM.generate_each = some
        super().__init__(**settings)

model, fails_always = sys.argv[1], sys.argv[2] == "always"
ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
rows = ray.data.from_items([{"prompt": f"count from {i}", "temperature": 0} for i in range(40)])
rows = rows.map_batches(
    Failing,
    fn_constructor_kwargs={"fails_always": fails_always, "model": model, "device": "cpu"},
    batch_size=8, num_cpus=0.5, compute=ray.data.ActorPoolStrategy(size=1),
)
print(json.dumps([[row["prompt"], row["text"], row["error"]] for row in rows.take_all()]))
"""


def run_pipeline(fails):
    return subprocess.run(
        [sys.executable, "-c", PIPELINE, str(BUNDLED), fails],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_failed_engine_is_replaced_in_a_pipeline_of_ones_own():
    """Batches in Ray's default format."""
    done = run_pipeline("once")
    assert done.returncode == 0, done.stderr[-3000:]
    (printed,) = (line for line in done.stdout.splitlines() if line.startswith("[["))
    rows = json.loads(printed)
    with LLM(str(BUNDLED), device="cpu") as llm:
        outputs = llm.generate([prompt for prompt, _, _ in rows], SamplingParams(temperature=0))
    assert sorted(prompt for prompt, _, _ in rows) == sorted(f"count from {i}" for i in range(40))
    assert [row[1:] for row in rows] == [[output["text"], None] for output in outputs]


def test_engine_that_always_fails_ends_the_pipeline():
    done = run_pipeline("always")
    assert done.returncode != 0 and "the engine is broken" in done.stderr


def test_pipe_as_input_is_refused(tmp_path):
    status, log = run("-", tmp_path / "out.jsonl", "--ray")
    assert status == 2 and "--ray: got - as input, needs a file" in log
