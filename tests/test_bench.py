"""bench.py's floor, trace and per-step records; test_bundled.py runs the script plainly."""

import argparse
import gzip
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from nanovllm import LLM

ROOT = Path(__file__).parents[1]
SMALL = ("--num-seqs", "4", "--input-len", "4", "8", "--output-len", "4", "8")


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench", ROOT / "bench.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dummy_config(bench, size, folder):
    from transformers import AutoConfig

    bench.write_dummy(size, folder)
    return AutoConfig.from_pretrained(folder)


def nano_vllm_requests(bench):
    num_seqs, input_len, output_len = bench.NANO_VLLM
    args = argparse.Namespace(seed=0, num_seqs=num_seqs, input_len=input_len, output_len=output_len)
    return bench.make_requests(args, bench.VOCAB_SIZE)


def test_floor_of_the_default_workload(bench, tmp_path):
    """Against figures computed apart from this code, for an H200's rates."""
    config = dummy_config(bench, "0.6B", tmp_path)
    work = bench.count_work(config, 2, nano_vllm_requests(bench), 512)
    assert work.kv_bytes == pytest.approx(13.85e12, rel=5e-4)
    assert work.weight_bytes == pytest.approx(1.22e12, rel=5e-3)
    assert work.prompt_flops == pytest.approx(137e12, rel=5e-3)
    assert work.seconds(4.3e12, 790e12) == pytest.approx(3.68, abs=5e-3)


@pytest.mark.parametrize(("num_tokens", "tflop"), [(4096, 5.5), (8192, 14.9), (32768, 152)])
def test_floor_of_a_long_prompt_counts_causal_attention(bench, tmp_path, num_tokens, tflop):
    config = dummy_config(bench, "0.6B", tmp_path)
    work = bench.count_work(config, 2, ([[0] * num_tokens], [1]), 1)
    assert work.prompt_flops == pytest.approx(tflop * 1e12, rel=1e-2)
    assert work.kv_bytes == work.weight_bytes == 0  # the prompt's step gives the only token


def test_floor_reads_only_the_rows_of_an_untied_embedding_that_are_looked_up(bench, tmp_path):
    work = bench.count_work(dummy_config(bench, "8B", tmp_path), 2, ([[0]], [2]), 1)
    assert work.weight_bytes == pytest.approx(2 * (8.191e9 - bench.VOCAB_SIZE * 4096), rel=1e-3)


def test_floor_of_experts(bench, tmp_path):
    """3.3B of 30.5B weights are a token's; of 64 sequences each expert has some with 98.4 %."""
    config = dummy_config(bench, "30B-A3B", tmp_path)
    embedding = bench.VOCAB_SIZE * 2048
    one = bench.count_work(config, 2, ([[0]], [2]), 1)
    assert one.weight_bytes == pytest.approx(2 * (3.345e9 - embedding), rel=5e-3)
    many = bench.count_work(config, 2, ([[0]] * 512, [2] * 512), 512)
    assert many.weight_bytes == pytest.approx(2 * (30.53e9 - embedding), rel=1e-3)
    experts = 48 * 128 * 3 * 2048 * 768
    half = bench.count_work(config, 2, ([[0]] * 64, [2] * 64), 64).weight_bytes
    assert (many.weight_bytes - half) / 2 == pytest.approx(experts * (15 / 16) ** 64, rel=1e-3)
    prompt = bench.count_work(config, 2, ([[0] * 100], [1]), 1)
    attention = 4 * 48 * 4096 * 100 * 101 / 2
    expected = 2 * 100 * (3.345e9 - 2 * embedding) + attention
    assert prompt.prompt_flops == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(
    ("max_num_seqs", "num_steps"),
    [
        (1, 2 + 6 + 3 + 1),
        (2, 6),  # the third request takes the first one's place, and the fourth the third one's
        (3, 6),
        (9, 6),
    ],
)
def test_floor_reads_the_weights_once_per_step_of_the_batch(
    bench, tmp_path, max_num_seqs, num_steps
):
    config = dummy_config(bench, "0.6B", tmp_path)
    requests = [[0] * 5] * 4, [3, 7, 4, 2]
    one_step = bench.count_work(config, 2, ([[0]], [2]), 1).weight_bytes
    work = bench.count_work(config, 2, requests, max_num_seqs)
    assert work.weight_bytes == num_steps * one_step
    one_token = 2 * 28 * 8 * 128 * 2  # K and V, layers, KV heads, head dim, bytes
    contexts = [6, 7, *range(6, 12), 6, 7, 8, 6]
    assert work.kv_bytes == sum(contexts) * one_token


def test_floor_and_profile_of_a_small_run(bench, tmp_path, monkeypatch, capsys):
    file = tmp_path / "trace.json.gz"
    flags = ["--model", str(bench.BUNDLED), *SMALL, "--floor", "--profile", str(file)]
    monkeypatch.setattr(sys, "argv", ["bench.py", *flags])
    assert bench.main() == 0
    out = capsys.readouterr().out
    assert str(file) in out
    figures = json.loads(out.splitlines()[-1])
    assert f"floor_seconds: {figures['floor_seconds']}" in out
    share = figures["floor_seconds"] / figures["seconds"]
    assert figures["share_of_floor_reached"] == pytest.approx(share, rel=1e-2)
    speed = figures["output_tokens"] / figures["floor_seconds"]
    assert figures["floor_output_tokens_per_second"] == pytest.approx(speed, rel=1e-2)
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    steps = [e for e in events if e["name"] == "step" and e["cat"] == "user_annotation"]
    assert len(steps) == 10


def test_history_ends_with_every_token_counted_and_every_block_free(bench):
    """Also while requests are preempted: four blocks cannot hold what four requests need."""
    with LLM(str(bench.BUNDLED), kvcache_block_size=16, num_kvcache_blocks=4) as llm:
        history = []
        figures = bench.measure(llm, ([[i] * 8 for i in range(4)], [40] * 4), history)
        assert llm.scheduler.num_preemptions > 0
    seconds, num_tokens, num_running, num_used = zip(*history, strict=True)
    assert list(seconds) == sorted(seconds) and list(num_tokens) == sorted(num_tokens)
    assert num_tokens[-1] == figures["output_tokens"] == 160
    assert max(num_running) > 1 and max(num_used) == 4
    assert num_running[-1] == num_used[-1] == 0


def test_plot_draws_a_file(bench, tmp_path):
    pytest.importorskip("matplotlib")
    history = [(0.5, 2, 2, 1), (1.0, 4, 2, 1), (1.5, 5, 0, 0)]
    bench.draw(history, 8, "title", str(tmp_path / "run.png"))
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--plot", "run.png"], "nano-vllm[plot]"),
        (["--plot", "run.bmp"], "run.bmp"),
        (["--profile", "no-such-folder/trace.json"], "no-such-folder"),
        (["--profile", "trace.txt"], ".json"),
    ],
)
def test_file_that_could_not_be_written_is_refused_before_any_work(
    bench, monkeypatch, capsys, flags, message
):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(bench, "LLM", None)
    monkeypatch.setattr(sys, "argv", ["bench.py", *flags])
    with pytest.raises(SystemExit) as exit_info:
        bench.main()
    assert exit_info.value.code != 0
    assert message in capsys.readouterr().err
