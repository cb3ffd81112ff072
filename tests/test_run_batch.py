"""run-batch: what lines mean, what becomes of bad ones, and that a killed job loses nothing."""

import gzip
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc

import pytest

from nanovllm import LLM, SamplingParams, run_batch
from nanovllm.__main__ import main
from nanovllm.batch_files import (
    MAX_LINE_BYTES,
    Held,
    ResultFile,
    TextSet,
    open_file,
    read_lines,
    whole_lines,
)
from nanovllm.batch_lines import LineReader
from nanovllm.batch_results import known_result, result_line
from tests import batch_program
from tests.test_bundled import BUNDLED, ROOT

NUM_KILLS = 20
NUM_LINES = 100_000
MAX_GROWTH_MB = 50
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
MAX_MICROSECONDS = 30  # of CPU time for a line
REAL = ["--model", str(BUNDLED), "--device", "cpu"]


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setattr(run_batch, "open_engine", lambda config: batch_program.StubEngine(0))


def run(source, target, *options, model="stub"):
    return main(["run-batch", "-i", str(source), "-o", str(target), "--model", model, *options])


def write(path, lines):
    """Strings are written as they are, others as JSON."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_bytes("".join(f"{text}\n" for text in texts).encode())
    return path


def read(path):
    """The results in the order of their lines, without the time at which they came."""
    opened = gzip.open(path) if path.suffix == ".gz" else open(path, "rb")
    with opened as file:
        results = [json.loads(line) for line in file]
    for result in results:
        if result.get("response"):
            del result["response"]["body"]["created"]
    return sorted(results, key=lambda result: known_result(json.dumps(result).encode())[0])


def errors(path):
    return {r["line"]: r["error"] for r in read(path) if "line" in r and r["error"]}


def openai(custom_id, **body):
    return {"custom_id": custom_id, "method": "POST", "body": {"model": "m", **body}}


def mixed_lines(num):
    """Every kind: plain and OpenAI's, greedy and not, good and bad, unique and not."""
    lines = []
    for i in range(num):
        plain = {"prompt": f"number {i}", "temperature": i % 3 / 2, "max_tokens": 4}
        kinds = [plain, {**plain, "custom_id": f"p{i}"}, openai(f"o{i}", prompt=f"number {i}")]
        kinds += [{"prompt_token_ids": [i, 2]}, "{bad", openai("o2", prompt="twice"), ""]
        lines.append(kinds[i % len(kinds) if i % 5 else 0])
    return lines


# -- what is in a line -----------------------------------------------------------------------------


def good(line):
    read = LineReader({}).read(1, json.dumps(line).encode())
    assert read.error is None, read.error
    return read


@pytest.mark.parametrize(
    "body, params",
    [
        ({}, SamplingParams()),
        ({"max_completion_tokens": 7, "user": "me", "stream": False}, SamplingParams(max_tokens=7)),
        ({"logprobs": True, "top_logprobs": 3}, SamplingParams(logprobs=3)),
        ({"logprobs": True}, SamplingParams(logprobs=0)),
        ({"logprobs": False, "stop": None}, SamplingParams()),
        ({"logit_bias": {"17": 3}}, SamplingParams(logit_bias={17: 3})),
        ({"response_format": {"type": "text"}}, SamplingParams()),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "null"}},
                }
            },
            SamplingParams(structured_outputs={"json_schema": {"type": "null"}}),
        ),
        ({"n": 2, "top_k": 5, "stop": ["a"]}, SamplingParams(n=2, top_k=5, stop=["a"])),
    ],
)
def test_fields_of_openai_become_sampling_params(body, params):
    line = good(openai("a", messages=[{"role": "user", "content": "Hi"}], **body))
    assert line.params == params
    assert (line.custom_id, line.model, line.chat) == ("a", "m", {})


@pytest.mark.parametrize(
    "prompt, expected",
    [
        ("Hi", "Hi"),
        (["Hi"], "Hi"),
        ([1, 2], {"prompt_token_ids": [1, 2]}),
        ([[1, 2]], {"prompt_token_ids": [1, 2]}),
    ],
)
def test_prompts_of_completions(prompt, expected):
    assert good(openai("a", prompt=prompt)).prompt == expected


def test_options_of_the_chat_template_are_kept_apart():
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    line = good({"messages": [{"role": "user", "content": "Hi"}], **options, "max_tokens": 3})
    assert line.chat == options and line.params == SamplingParams(max_tokens=3)


def test_defaults_are_for_lines_that_do_not_say():
    reader = LineReader({"max_tokens": 9, "temperature": 0})
    lines = [b'{"prompt": "x"}', b'{"prompt": "x", "max_tokens": 2}', b'{"prompt": "x"}']
    params = [reader.read(i, raw).params for i, raw in enumerate(lines)]
    assert [(p.max_tokens, p.temperature) for p in params] == [(9, 0), (2, 0), (9, 0)]
    assert params[0] is params[2]


def test_keys_of_logit_bias_are_strings_in_json():
    plain = {"prompt": "x", "logit_bias": {"5": 3.0}}
    wanted = SamplingParams(logit_bias={5: 3.0})
    assert good(plain).params == good(openai("a", **plain)).params == wanted
    as_default = LineReader({"logit_bias": {"5": 3.0}}).read(1, b'{"prompt": "x", "n": 2}')
    assert as_default.params == SamplingParams(n=2, logit_bias={5: 3.0})
    assert LineReader({}).read_row(1, {**plain, "logit_bias": {5: 3.0}}).params == wanted


BAD = [
    ('{"prompt": "x"', "not JSON in UTF-8"),
    ('{"prompt": "x"} {"prompt": "y"}', "not JSON in UTF-8: more after its end"),
    ('{"prompt": "a\0b"}', "not JSON in UTF-8: Invalid control character"),
    ("\0" * 50, "not JSON in UTF-8"),
    ("[" * 100_000, "not JSON in UTF-8"),
    ("9" * 5_000, "not JSON in UTF-8"),
    ("[1, 2]", "got list, needs an object"),
    ("3", "got int, needs an object"),
    ("{}", "got none of prompt, messages and prompt_token_ids"),
    ({"prompt": "x", "messages": []}, "got messages and prompt of"),
    ({"prompt": 3}, "prompt: got int, needs a string"),
    ({"prompt": [1]}, "prompt: got list, needs a string"),
    ({"prompt": None}, "got none of"),
    ({"prompt_token_ids": "x"}, "prompt_token_ids: got str"),
    ({"messages": "Hi"}, "messages: needs a list"),
    ({"messages": ["Hi"]}, "messages: needs a list"),
    ({"prompt": "x", "temprature": 0}, "temprature: not a field that this engine knows, try temp"),
    ({"prompt": "x", "temperature": "0"}, "temperature: got '0', needs a number"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens: got True, needs an integer"),
    ({"prompt": "x", "temperature": float("nan")}, "temperature: got nan, needs a finite number"),
    ({"prompt": "x", "tools": []}, "tools: not a field"),  # of messages
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias key: got 'a', needs a token id"),
    ({"prompt": "x", "custom_id": 3}, "custom_id: got int, needs a string"),
    ({"prompt": "x", "custom_id": "\ud800"}, "custom_id: got a lone surrogate"),
]
BAD_BODIES = [
    ("body", "body: got str, needs an object"),
    ({}, "body: got none of messages and prompt"),
    ({"prompt": "x", "messages": []}, "body: got both of messages and prompt"),
    ({"prompt": ["x", "y"]}, "prompt: got list, needs one string or one list of token ids"),
    ({"prompt": "x", "stream": True}, "stream: needs false"),
    ({"prompt": "x", "suffix": "y"}, "suffix: not a field"),
    ({"prompt": "x", "model": 3}, "body.model: got int"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias key: got 'a', needs a token id"),
    ({"prompt": "x", "max_tokens": 1, "max_completion_tokens": 1}, "max_tokens: got max_compl"),
    ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format: needs type"),
    ({"messages": [], "logprobs": 3}, "logprobs: needs true or false"),
    ({"messages": [], "top_logprobs": 3}, "logprobs: needs true or false"),
]


@pytest.mark.parametrize("line, error", BAD)
def test_bad_line_says_why(line, error):
    raw = line if isinstance(line, str) else json.dumps(line)
    read = LineReader({}).read(7, raw.encode())
    assert read.error.startswith(error)
    result = json.loads(result_line(read, run_batch.error_output(read.error)))
    assert result["line"] == 7 and result["error"] == read.error


@pytest.mark.parametrize("body, error", BAD_BODIES)
def test_bad_line_of_openai_gets_an_error_in_its_format(body, error):
    read = LineReader({}).read(7, json.dumps({"custom_id": "a", "body": body}).encode())
    assert read.error.startswith(error)
    result = json.loads(result_line(read, run_batch.error_output(read.error)))
    assert (result["id"], result["custom_id"], result["response"]) == ("batch_req_7", "a", None)
    assert result["error"]["message"] == f"line 7: {read.error}"


def test_line_of_openai_needs_an_id_and_a_fitting_url():
    for line, error in [
        ({"body": {"prompt": "x"}}, "custom_id: got none"),
        ({**openai("a", prompt="x"), "url": "/v1/embeddings"}, "url: got '/v1/embeddings'"),
        ({**openai("a", prompt="x"), "method": "GET"}, "method: got 'GET'"),
        ({**openai("a", prompt="x"), "more": 1}, "more: not a field"),
    ]:
        assert LineReader({}).read(1, json.dumps(line).encode()).error.startswith(error)


# -- files -----------------------------------------------------------------------------------------


def test_marks_line_ends_and_long_lines():
    long = b"x" * (MAX_LINE_BYTES + 1)
    stream = io.BytesIO(b"\xef\xbb\xbfa\r\n\r\n \n" + long + b"\nb\n" + 2 * long + b"\nc")
    assert list(read_lines(stream)) == [(1, b"a"), (4, None), (5, b"b"), (6, None), (7, b"c")]


def test_a_file_with_every_kind_of_bad_line(tmp_path, stub, capsys):
    lines = [line for line, _ in BAD] + ["\r", "é\udcff"]
    data = "\ufeff" + "\r\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines)
    source = tmp_path / "in.jsonl"
    source.write_bytes(data.encode("utf-8", "surrogateescape") + b'\r\n{"prompt": "ok"}')
    assert run(source, tmp_path / "out.jsonl") == run_batch.SOME_FAILED
    results = read(tmp_path / "out.jsonl")
    assert len(results) == len(BAD) + 2  # one was blank
    assert set(errors(tmp_path / "out.jsonl")) == {*range(1, len(BAD) + 1), len(BAD) + 2}
    assert results[-1]["text"].startswith("ko")
    assert f"{len(results)} lines, {len(BAD) + 1} of them failed" in capsys.readouterr().err


def test_ten_megabytes_in_one_line(tmp_path, stub):
    lines = [{"prompt": 10 * 2**20 * "x"}, "y" * (MAX_LINE_BYTES + 9), {"prompt": "short"}]
    source = write(tmp_path / "in.jsonl", lines)
    assert run(source, tmp_path / "out.jsonl") == run_batch.SOME_FAILED
    assert errors(tmp_path / "out.jsonl") == {2: f"longer than {MAX_LINE_BYTES:,} bytes"}


def test_second_use_of_a_custom_id_is_an_error(tmp_path, stub):
    lines = [openai("a", prompt="x"), openai("b", prompt="x"), openai("a", prompt="y")]
    assert run(write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl") == run_batch.SOME_FAILED
    first, second, third = read(tmp_path / "out.jsonl")
    assert first["error"] is None and second["error"] is None
    assert third["error"]["message"] == "line 3: custom_id: got 'a' a second time, needs its own"


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_file_starts_no_engine(tmp_path, content):
    source = tmp_path / "in.jsonl"
    source.write_text(content)
    assert run(source, tmp_path / "out.jsonl") == run_batch.ALL_DONE
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_results_are_never_overwritten_or_mixed(tmp_path, stub, capsys):
    source = write(tmp_path / "in.jsonl", [{"prompt": "x", "custom_id": "a"}])
    target = tmp_path / "out.jsonl"
    assert run(source, target) == run_batch.ALL_DONE
    before = target.read_bytes()
    assert run(source, target) == run_batch.NOT_FINISHED
    assert "needs --resume" in capsys.readouterr().err
    other = write(tmp_path / "other.jsonl", [{"prompt": "x", "custom_id": "b"}])
    assert run(other, target, "--resume") == run_batch.NOT_FINISHED
    assert "line 1: got custom_id 'b'" in capsys.readouterr().err
    with open(target, "ab") as file:
        file.write(b'{"prompt": "not a result"}\n')
    assert run(source, target, "--resume") == run_batch.NOT_FINISHED
    assert "cannot go on with it" in capsys.readouterr().err
    assert target.read_bytes().startswith(before)


@pytest.mark.parametrize("number", [4, 10**9, 99999999999999])
def test_result_of_a_line_that_the_input_has_not(tmp_path, stub, capsys, number):
    source = write(tmp_path / "in.jsonl", [{"prompt": "x"}] * 3)
    target = tmp_path / "out.jsonl"
    write(target, [{"line": number, "custom_id": None, "error": None}])
    before = target.read_bytes()
    assert run(source, target, "--resume") == run_batch.NOT_FINISHED
    said = f"cannot go on with it, it has line {number:,} of an input of 3\n"
    assert capsys.readouterr().err.endswith(said)
    assert target.read_bytes() == before


def test_memory_of_held_lines_is_by_their_count():
    tracemalloc.start()
    held = Held()
    for number in [*range(1, 20_001), 10**9, 10**14]:
        held.add(number, None, False)
    assert tracemalloc.get_traced_memory()[0] < 300_000
    tracemalloc.stop()
    assert held.has(10**14, None) and held.has(20_000, None) and not held.has(20_001, None)


def test_file_that_cannot_be_opened_is_said_and_leaves_none(tmp_path, stub, capsys):
    good_source = write(tmp_path / "in.jsonl", [{"prompt": "x"}])
    no_gzip = write(tmp_path / "in.gz", [{"prompt": "x"}])
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for source, target, error in [
        ("nope.jsonl", "x.jsonl", "nope.jsonl: got No such file or directory, needs a file"),
        ("nope.gz", "x.jsonl", "nope.gz: got No such file or directory, needs a file"),
        ("folder", "x.jsonl", "folder: got Is a directory, needs a file that can be read"),
        (no_gzip.name, "x.jsonl", "in.gz: got Not a gzipped file (b'{\"'), needs a file"),
        (good_source.name, "nope/x.jsonl", "x.jsonl: got No such file or directory, needs a file"),
        (good_source.name, "folder", "folder: got Is a directory, needs a file that can be writ"),
    ]:
        for options in [], ["--resume"]:
            status = run(tmp_path / source, tmp_path / target, *options)
            assert status == run_batch.NOT_FINISHED
            said = capsys.readouterr().err
            assert error in said and said.count("\n") == 1 and "what is written" not in said
            assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_output_that_is_a_link_stays_one(tmp_path, stub, name):
    lines = [{"prompt": "x"}, {"prompt": "y"}]
    (tmp_path / "folder").mkdir()
    link, real = tmp_path / name, tmp_path / "folder" / f"real.{name}"
    link.symlink_to(real)
    assert run(write(tmp_path / "in.jsonl", lines[:1]), link) == run_batch.ALL_DONE
    assert run(write(tmp_path / "in.jsonl", lines), link, "--resume") == run_batch.ALL_DONE
    assert link.is_symlink() and not real.is_symlink()
    assert len(read(real)) == 2
    assert [path.name for path in real.parent.iterdir()] == [real.name]


def test_one_job_at_a_time_writes_a_file(tmp_path):
    first = ResultFile(str(tmp_path / "out"), False, known_result)
    with pytest.raises(ValueError, match="another run-batch"):
        ResultFile(str(tmp_path / "out"), False, known_result)
    first.close()


def test_damaged_gzip_input_is_said(tmp_path, stub, capsys):
    source = tmp_path / "in.jsonl.gz"
    data = gzip.compress(b'{"prompt": "x"}\n' * 5)
    source.write_bytes(data[:-9])
    assert run(source, tmp_path / "out.jsonl") == run_batch.NOT_FINISHED
    assert "error: " in capsys.readouterr().err


def test_text_set_and_held_lines():
    texts = TextSet()
    assert all(texts.add(f"text {i}") for i in range(5_000))
    assert not any(texts.add(f"text {i}") for i in range(5_000))
    held = Held()
    held.add(3, None, False)
    held.add(5, "five", True)
    found = [held.has(1, None), held.has(3, None), held.has(5, "five"), held.has(99, None)]
    assert found == [False, True, True, False]
    for number, custom_id in [(3, "three"), (5, None), (5, "six")]:
        with pytest.raises(ValueError, match=f"line {number}: got custom_id"):
            held.has(number, custom_id)
    with pytest.raises(ValueError, match="two results for line 5"):
        held.add(5, "five", False)


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, error",
    [
        (["--max-tokens", "0"], "max_tokens: got 0"),
        (["--temperature", "hot"], "temperature: got 'hot'"),
        (["--logit-bias", '{"a": 3}'], "logit_bias key: got 'a'"),
        (["--tp", "9"], "tensor_parallel_size: got 9"),
        (["--replicas", "2"], "--replicas: needs --ray"),
        (["--no-such-field", "2"], "unrecognized arguments"),
    ],
)
def test_bad_option_is_refused_before_anything_starts(options, error, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path / "in", tmp_path / "out", *options)
    assert error in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_options_by_the_names_of_fields(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("nanovllm.__main__.run_batch", lambda job: seen.append(job) or 0)
    options = "--tp 2 --max_model_len=99 --no-overlap --dtype float32 --ignore-eos --top_p 0.5"
    more = ["--stop", "5", "--logit-bias", '{"1": 2}', "--max-tokens", "null"]
    assert run("in", "out", *options.split(), *more) == 0
    config, defaults = seen[0].config, seen[0].defaults
    assert (config.tensor_parallel_size, config.max_model_len, config.overlap) == (2, 99, False)
    plain = {"ignore_eos": True, "top_p": 0.5, "stop": "5", "max_tokens": None}
    assert defaults == {**plain, "logit_bias": {"1": 2}}


def test_command_needs_no_torch_to_start():
    code = "import sys, nanovllm.__main__; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_pipe_and_gzip(tmp_path):
    data = b'{"prompt": "x"}\n{"prompt": "y fail"}\n'
    command = [sys.executable, "-m", "tests.batch_program", "0", "run-batch", "--model", "stub"]
    done = subprocess.run(
        [*command, "-i", "-", "-o", "-"], input=data, cwd=ROOT, capture_output=True, timeout=60
    )
    assert done.returncode == run_batch.SOME_FAILED
    piped = sorted(done.stdout.splitlines(keepends=True))
    source, target = tmp_path / "in.gz", tmp_path / "out.gz"
    source.write_bytes(gzip.compress(data))
    args = ["-i", str(source), "-o", str(target)]
    subprocess.run([*command, *args], cwd=ROOT, capture_output=True, timeout=60)
    with gzip.open(target) as file:
        assert sorted(file) == piped and len(piped) == 2


def test_same_results_as_generate(tmp_path):
    """Greedy or drawn, and in both formats."""
    prompts = [f"Once upon a time there were {n} animals" for n in range(30)]
    params = [SamplingParams(temperature=n % 2, max_tokens=12, n=1 + n % 2) for n in range(30)]
    lines = []
    for n, prompt in enumerate(prompts):
        body = {"prompt": prompt, "temperature": n % 2, "max_tokens": 12, "n": 1 + n % 2}
        lines.append(body if n % 3 else openai(f"id {n}", **body))
    lines.append({"messages": [{"role": "user", "content": "introduce yourself"}]})
    lines.append({"prompt": ""})
    source = write(tmp_path / "in.jsonl", lines)
    status = run(source, tmp_path / "out.jsonl", *REAL[2:], "--temperature", "0", model=REAL[1])
    assert status == run_batch.SOME_FAILED
    results = read(tmp_path / "out.jsonl")
    with LLM(str(BUNDLED), device="cpu") as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        (chat,) = llm.chat([{"role": "user", "content": "introduce yourself"}], SamplingParams(
            temperature=0
        ))  # fmt: skip
    for n, (result, output) in enumerate(zip(results, outputs, strict=False)):
        texts = [sample["text"] for sample in output["outputs"]]
        if n % 3:
            found = result.get("outputs", [result])
            assert result["token_ids"] == output["token_ids"]
        else:
            found = result["response"]["body"]["choices"]
            assert result["custom_id"] == f"id {n}"
            usage = result["response"]["body"]["usage"]
            assert usage["completion_tokens"] == sum(len(s["token_ids"]) for s in output["outputs"])
        assert [sample["text"] for sample in found] == texts
    assert results[30]["text"] == chat["text"]
    assert results[31]["error"] == "prompt: got an empty prompt, needs at least one token"


def test_logprobs_in_both_formats(tmp_path):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}
    lines = [
        openai("a", **chat, logprobs=True, top_logprobs=2),
        {**chat, "logprobs": 2, "prompt_logprobs": 1},
        openai("b", prompt="Hi", max_tokens=3, temperature=0, logprobs=1),
    ]
    source = write(tmp_path / "in.jsonl", lines)
    status = run(source, tmp_path / "out.jsonl", *REAL[2:], model=REAL[1])
    assert status == run_batch.ALL_DONE
    theirs, ours, text = read(tmp_path / "out.jsonl")
    (choice,) = theirs["response"]["body"]["choices"]
    for position, found in zip(choice["logprobs"]["content"], ours["logprobs"], strict=True):
        drawn = next(iter(found.values()))
        assert position["token"] == drawn["decoded_token"] and len(position["top_logprobs"]) == 2
        assert position["logprob"] == position["top_logprobs"][0]["logprob"] == drawn["logprob"]
    assert len(ours["prompt_logprobs"]) == ours["num_prompt_tokens"]
    assert len(text["response"]["body"]["choices"][0]["logprobs"]["tokens"]) == 3


# -- killed ----------------------------------------------------------------------------------------


def count_results(path):
    if not path.exists():
        return 0
    with open_file(str(path)) as file:
        return sum(1 for _ in whole_lines(file))


def kill_at(command, target, num_results):
    """Start the job, and kill it as soon as it has so many results; False: it had ended."""
    job = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        while job.poll() is None and count_results(target) < num_results:
            time.sleep(0.001)
        was_running = job.poll() is None
        job.send_signal(signal.SIGKILL)
        return was_running
    finally:
        job.wait()


@pytest.mark.slow
@pytest.mark.parametrize("name, num_kills", [("out.jsonl", NUM_KILLS), ("out.jsonl.gz", 4)])
def test_killed_job_goes_on_without_loss_or_duplicate(tmp_path, stub, name, num_kills):
    """At random moments, by the number of results; half of the times a part of the last result
    is lost as well, as it would be by a write that was cut."""
    source = write(tmp_path / "in.jsonl", mixed_lines(900))
    whole, target = tmp_path / "whole.jsonl", tmp_path / name
    assert run(source, whole) == run_batch.SOME_FAILED
    expected = read(whole)
    rng = random.Random(8)
    moments = sorted(rng.sample(range(1, len(expected) - 50), num_kills))
    command = [sys.executable, "-m", "tests.batch_program", "0.002", "run-batch", "--model", "stub"]
    command += ["-i", str(source), "-o", str(target), "--resume"]
    for kill, moment in enumerate(moments):
        assert kill_at(command, target, max(moment, count_results(target) + 1))
        if kill % 2:
            os.truncate(target, target.stat().st_size - rng.randrange(1, 40))
    assert run(source, target, "--resume") == run_batch.SOME_FAILED
    assert read(target) == expected
    assert run(source, target, "--resume") == run_batch.SOME_FAILED  # nothing is left to do
    assert read(target) == expected


@pytest.mark.slow
def test_killed_engine_goes_on_with_the_same_answers(tmp_path):
    """The real one, twice, half of the answers drawn at random."""
    lines = [
        {"prompt": f"count from {i} to {i + 5}", "max_tokens": 8, "temperature": i % 2}
        for i in range(150)
    ]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "nanovllm", "run-batch", *REAL, "--max-num-seqs", "8"]
    command += ["-i", str(source), "-o"]
    whole = tmp_path / "whole.jsonl"
    subprocess.run([*command, str(whole)], cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
    resumed = [*command, str(target), "--resume"]
    for moment in random.Random(8).sample(range(10, 100), 2):
        kill_at(resumed, target, moment)
    subprocess.run(resumed, cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
    assert read(target) == read(whole)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "openai"])
def test_long_file_in_constant_memory_at_little_cost(tmp_path, kind):
    """CPU time of the 10,000 lines that other processes disturbed least."""
    question = "This is the prompt number {}, about as long as a short question is."
    with open(tmp_path / "in.jsonl", "w") as file:
        for i in range(NUM_LINES):
            prompt = question.format(i)
            line = openai(f"request-{i}", prompt=prompt, max_tokens=64)
            file.write(json.dumps(line if kind == "openai" else {"prompt": prompt}) + "\n")
    command = [sys.executable, "-m", "tests.batch_program", "0", "run-batch", "--model", "stub"]
    costs = []
    for i in range(3):
        args = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / f"out{i}.jsonl")]
        done = subprocess.run([*command, *args], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == run_batch.ALL_DONE, done.stderr[-2000:]
        figures = json.loads(done.stderr.splitlines()[-1])
        resident = figures["resident"]
        assert len(resident) == NUM_LINES // batch_program.EVERY
        growth = max(resident) - resident[0]
        assert growth <= MAX_GROWTH_MB
        costs += figures["microseconds"]
        if min(costs) <= MAX_MICROSECONDS:
            break
    middle = sorted(costs)[len(costs) // 2]
    print(f"{kind}: {min(costs):.1f} us a line, median {middle:.1f}, {growth:.1f} MB more")
    assert min(costs) <= MAX_MICROSECONDS, costs
