"""Public bug reports about engines like this one, each as a behaviour with the right outcome.

The scheduler's are in tests/engine, the loader's in tests/utils, equalities of tokens in
test_llm.py; here is what needs a whole engine.
"""

import copy
import gc
import json
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.test_bundled import BUNDLED

CANARY = [3, 1, 4, 1, 5, 9, 2, 6]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    return tiny_checkpoint(heads=4, kv_heads=2, head_dim=16, hidden=64)


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(
        str(checkpoint),
        kvcache_block_size=16,
        num_kvcache_blocks=64,
        max_model_len=128,
        device="cpu",
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def canary(llm):
    """What the canary prompt gives in an engine that nothing has gone wrong in."""
    return llm.generate([CANARY], GREEDY, use_tqdm=False)[0]["token_ids"]


def run(llm, prompts):
    """What each prompt gives, without the clock's part of it."""
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [{k: o[k] for k in ("text", "token_ids", "finish_reason")} for o in outputs]


def assert_unharmed(llm, canary):
    assert llm.is_finished()
    assert llm.scheduler.block_manager.num_free_blocks == 64
    assert llm.generate([CANARY], GREEDY, use_tqdm=False)[0]["token_ids"] == canary


BAD_PROMPTS = [
    ("empty string among others", ["a", "", "b"], ValueError, r"prompts\[1\].*empty"),
    ("empty ids", [[1], []], ValueError, r"prompts\[1\].*empty"),
    ("negative id", [[1, -1]], ValueError, r"prompts\[0\].*-1"),
    ("id past the vocabulary", [[1], [10**6]], ValueError, r"prompts\[1\].*1000000"),
    ("id past int32", [[2**40]], ValueError, r"prompts\[0\]"),
    ("id past int64", [[2**70]], (TypeError, ValueError), r"prompts\[0\]"),
    ("as long as max_model_len", [[1] * 128], ValueError, r"prompts\[0\].*128"),
    ("longer than max_model_len", [[1] * 3, [1] * 500], ValueError, r"prompts\[1\].*500"),
    ("float ids", [[1.5]], TypeError, r"prompts\[0\]"),
    ("bool ids", [[True]], TypeError, r"prompts\[0\]"),
    ("None", None, TypeError, "prompts"),
    ("None inside", ["a", None], TypeError, r"prompts\[1\]"),
    ("a number", 7, TypeError, "prompts"),
    ("nested ids", [[[1, 2]]], TypeError, r"prompts\[0\]"),
    ("ragged ids", [[1, [2]]], TypeError, r"prompts\[0\]"),
    ("bytes", [b"abc"], TypeError, r"prompts\[0\]"),
]


@pytest.mark.parametrize(
    "prompts, error, message",
    [pytest.param(*case[1:], id=case[0]) for case in BAD_PROMPTS],
)
def test_bad_prompt_is_named_and_harms_nothing(prompts, error, message, llm, canary):
    """R19, R21, R52: checked before any work, so the good prompts beside it are not queued."""
    with pytest.raises(error, match=message):
        run(llm, prompts)
    assert_unharmed(llm, canary)


@pytest.mark.parametrize(
    "params, error",
    [
        ([GREEDY], ValueError),  # R21: a short list dropped prompts in silence
        ([GREEDY] * 3, ValueError),
        ([GREEDY, {"temperature": 1}], TypeError),
        ({"temperature": 1}, TypeError),
        (0.7, TypeError),
    ],
)
def test_bad_sampling_params_harm_nothing(params, error, llm, canary):
    with pytest.raises(error, match="sampling_params"):
        llm.generate([[1], [2]], params, use_tqdm=False)
    assert_unharmed(llm, canary)


def test_shapes_of_arguments_that_mean_one_prompt(llm):
    """R21: a bare string was read as a list of one-letter prompts."""
    text = "hello"
    ids = llm.tokenizer(text)["input_ids"]
    expected = run(llm, [ids])
    for prompt in (text, [text], ids, np.array(ids), torch.tensor(ids), [np.array(ids, np.uint8)]):
        assert run(llm, prompt) == expected
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_unknown_keyword_names_the_nearest(checkpoint):
    with pytest.raises(TypeError, match="max_model_length.*max_model_len"):
        LLM(str(checkpoint), max_model_length=1)


@pytest.mark.parametrize("limit", [33, 100])
def test_generation_stops_at_max_model_len(limit, checkpoint):
    """R15, R45: the limit is neither passed nor rounded up to a whole block."""
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    with LLM(str(checkpoint), max_model_len=limit, kvcache_block_size=16, device="cpu") as llm:
        output = llm.generate([[1] * (limit - 10)], params, use_tqdm=False)[0]
        assert len(output["token_ids"]) == 10 and output["finish_reason"] == "length"
        with pytest.raises(ValueError, match=str(limit)):
            llm.generate([[1] * limit], params, use_tqdm=False)
        assert len(llm.generate([[1] * (limit - 1)], params)[0]["token_ids"]) == 1


def test_pool_too_small_for_a_request(checkpoint):
    """R07: a prompt of exactly the pool, one token to follow, asserted in the scheduler."""
    with LLM(str(checkpoint), kvcache_block_size=16, num_kvcache_blocks=2, device="cpu") as llm:
        good = llm.add_request([1, 2, 3], GREEDY)
        for length in (32, 48):
            with pytest.raises(ValueError, match=f"{length} tokens.*32"):
                llm.add_request([1] * length, SamplingParams(max_tokens=4))
        results = {}
        while not llm.is_finished():
            results.update(llm.step())
        assert list(results) == [good] and len(results[good]["token_ids"]) == 12


@pytest.mark.parametrize("listed, ends", [(5, {5}), ([5, 6], {5, 6}), (None, set())])
def test_eos_is_the_union_of_both_files(listed, ends, checkpoint, tmp_path):
    """R18: chat models list several end ids; with one known, answers ran on to max_tokens."""
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    with LLM(str(folder), kvcache_block_size=16, device="cpu") as llm:
        assert set(llm.scheduler.eos_token_ids) == ends | {llm.tokenizer.eos_token_id}


def test_eos_stops_and_stays_out_of_the_text(llm):
    """The EOS ends the request with "stop", is kept in token_ids and not shown in text."""
    eos = llm.tokenizer.eos_token_id
    free_run = llm.generate([CANARY], GREEDY, use_tqdm=False)[0]["token_ids"]
    stop_at = free_run[4]
    llm.scheduler.eos_token_ids.append(stop_at)
    try:
        params = SamplingParams(temperature=0, max_tokens=12)
        output = llm.generate([CANARY], params, use_tqdm=False)[0]
        ignoring = llm.generate([CANARY], GREEDY, use_tqdm=False)[0]
    finally:
        llm.scheduler.eos_token_ids.remove(stop_at)
    assert output["token_ids"] == free_run[: free_run.index(stop_at) + 1]
    assert output["finish_reason"] == "stop"
    assert ignoring["token_ids"] == free_run and ignoring["finish_reason"] == "length"
    assert llm.tokenizer.decode([eos]) not in output["text"]


@pytest.mark.parametrize("step", [0, 1, 5])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_exception_in_a_step_leaves_nothing_behind(step, kind, llm, canary, monkeypatch):
    """R20: the next call ran the old requests too and returned more results than prompts."""
    run, calls = llm._runner.launch, []

    def failing_run(batch):
        calls.append(batch)
        if len(calls) == step + 1:
            raise kind("injected")
        return run(batch)

    monkeypatch.setattr(llm._runner, "launch", failing_run)
    with pytest.raises(kind):
        llm.generate([[i + 1] * 20 for i in range(8)], GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert_unharmed(llm, canary)


def test_interrupt_by_signal_leaves_nothing_behind(llm, canary, monkeypatch):
    """R20, by a real SIGINT that arrives in the middle of a step."""
    run, calls = llm._runner.launch, []

    def run_and_interrupt(batch):
        calls.append(batch)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return run(batch)

    assert threading.current_thread() is threading.main_thread()
    monkeypatch.setattr(llm._runner, "launch", run_and_interrupt)
    # A shell's background jobs begin with SIGINT ignored, and so do these tests as one of them.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[7] * 20] * 4, GREEDY, use_tqdm=False)
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    assert_unharmed(llm, canary)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_logits_that_are_not_finite_end_that_request_only(bad, llm, canary, monkeypatch):
    """R36: argmax over NaN is the first index, so broken numerics read as endless token 0."""
    sample = llm._runner.sampler.forward
    calls = []

    def sample_broken(logits, *args):
        calls.append(len(logits))
        if len(calls) == 4 and len(logits) == 3:
            logits = logits.clone()
            if bad == float("inf"):
                logits[0, 5] = bad  # longest first: the second prompt
            else:
                logits[0] = bad
        return sample(logits, *args)

    prompts = [CANARY, [9] * 40, [8] * 5]
    expected = run(llm, prompts)
    monkeypatch.setattr(llm._runner.sampler, "forward", sample_broken)
    outputs = run(llm, prompts)
    monkeypatch.undo()
    assert outputs[0] == expected[0] and outputs[2] == expected[2]
    assert outputs[1]["finish_reason"] == "error"
    assert outputs[1]["token_ids"] == expected[1]["token_ids"][:3]
    assert_unharmed(llm, canary)
    assert run(llm, prompts) == expected


def test_nan_left_in_recycled_blocks_reaches_nobody(checkpoint):
    """A slot past the context is masked, but 0 x NaN is NaN: its value must not be used at all."""
    with LLM(str(checkpoint), kvcache_block_size=16, num_kvcache_blocks=32, device="cpu") as llm:
        prompts = [CANARY, [9] * 20, [8] * 5, [7] * 31]
        expected = run(llm, prompts)
        llm.scheduler.reset()
        llm._runner.pool.fill_(float("nan"))
        assert run(llm, prompts) == expected


def test_bos_is_not_doubled(tiny_checkpoint, checkpoint, tmp_path):
    """R50: a chat template writes BOS, then the tokenizer adds it again."""

    class AddsBos:
        bos_token_id = 1

        def __call__(self, texts):
            return {"input_ids": [[1, *([1] if t.startswith("<s>") else []), 7] for t in texts]}

    from nanovllm.engine.prompts import PromptReader

    reader = PromptReader(AddsBos(), vocab_size=10, max_len=10)
    ids = [x.tolist() for x in reader.read(["<s>templated", "plain", [1, 1, 7]])]
    assert ids == [[1, 7], [1, 7], [1, 1, 7]]


class TestClosing:
    """R34: closing is idempotent, gives everything back, and another engine can start."""

    def test_close_twice_then_use(self, checkpoint):
        llm = LLM(str(checkpoint), num_kvcache_blocks=2, device="cpu")
        llm.exit()
        llm.close()
        with pytest.raises(RuntimeError, match="closed"):
            llm.generate([[1]], GREEDY)

    def test_deleting_the_engine_frees_it(self, checkpoint):
        """The exit hook must not keep the engine alive."""
        llm = LLM(str(checkpoint), num_kvcache_blocks=2, device="cpu")
        engine, runner = weakref.ref(llm), weakref.ref(llm._runner)
        del llm
        gc.collect()
        assert engine() is None and runner() is None

    def test_ten_engines_in_a_row(self, checkpoint):
        for _ in range(10):
            with LLM(str(checkpoint), num_kvcache_blocks=8, device="cpu") as llm:
                llm.generate([[1]], GREEDY, use_tqdm=False)

    def test_two_engines_at_once(self, checkpoint):
        """R32: a fixed port made two one-GPU engines on a host collide."""
        with (
            LLM(str(checkpoint), num_kvcache_blocks=8, device="cpu") as a,
            LLM(str(checkpoint), num_kvcache_blocks=8, device="cpu") as b,
        ):
            first = run(a, [CANARY])
            assert run(b, [CANARY]) == first


def test_imports_without_flash_attn_or_torch():
    """R14: the package imports with nothing but the standard library until an LLM is made."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "import nanovllm; nanovllm.SamplingParams()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_start_is_logged_in_one_line(checkpoint, caplog):
    with caplog.at_level("INFO", logger="nanovllm"):
        LLM(str(checkpoint), num_kvcache_blocks=8, kvcache_block_size=16, device="cpu").close()
    lines = [r.getMessage() for r in caplog.records if r.name == "nanovllm"]
    assert len(lines) == 1
    for part in ("CPU", "float32", "torch", "parameters", "8 KV blocks", "128 tokens"):
        assert part in lines[0], lines[0]


@pytest.mark.parametrize(
    "dtype, expected",
    [("float32", torch.float32), ("float16", torch.float16), ("bfloat16", torch.bfloat16)],
)
def test_dtype_override_is_honoured(dtype, expected, checkpoint):
    """R24: every dtype runs on the CPU, whatever the checkpoint was saved in."""
    with LLM(str(checkpoint), num_kvcache_blocks=8, dtype=dtype, device="cpu") as llm:
        assert llm._runner.dtype == expected
        assert all(p.dtype == expected for p in llm._runner.model.parameters())
        assert len(llm.generate([CANARY], GREEDY, use_tqdm=False)[0]["token_ids"]) == 12


def test_what_is_read_after_close_says_so():
    """A stream, and generate itself, whose callback closes the engine."""
    with LLM(str(BUNDLED), device="cpu", max_model_len=64) as llm:
        stream = llm.stream(["a", "b"], GREEDY)
        next(stream)
        llm.close()
        assert llm.is_finished()
        with pytest.raises(RuntimeError, match="this engine was closed, needs an open one"):
            list(stream)
    with LLM(str(BUNDLED), device="cpu", max_model_len=64) as llm:
        params = [SamplingParams(max_tokens=n) for n in (1, 9)]
        with pytest.raises(RuntimeError, match="this engine was closed, needs an open one"):
            llm.generate(["a", "b"], params, use_tqdm=False, on_result=lambda i, o: llm.close())


def test_engine_is_not_pickled(llm):
    for copy_of in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="pickle: got an engine.* needs to be made where"):
            copy_of(llm)


@pytest.mark.parametrize("sizes", [(10**9, 256), (None, 10**9)])
def test_pool_that_nothing_could_hold_is_refused(sizes):
    settings = dict(num_kvcache_blocks=sizes[0], kvcache_block_size=sizes[1])
    with pytest.raises(ValueError, match="^num_kvcache_blocks: got .* GiB, needs what the device"):
        LLM(str(BUNDLED), device="cpu", **settings)


def test_failed_start_says_nothing_after_its_reason():
    """Frozen objects that were still there at exit looked like leaks to Triton's bindings."""
    code = f"from nanovllm import LLM; LLM({str(BUNDLED)!r}, tensor_parallel_size=3, device='cpu')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stderr.splitlines()[-1].startswith("ValueError: tensor_parallel_size: got 3")


def test_aborting_all_does_not_search_the_queue_for_each(llm, monkeypatch):
    """First come, first found: the queue is asked for its head, however long it is."""
    ids = [llm.add_request([5, 6, 7], GREEDY) for _ in range(50)]
    scanned = []

    class Queue(type(llm.scheduler.waiting)):
        def __iter__(self):
            scanned.append(len(self))
            return super().__iter__()

    monkeypatch.setattr(llm.scheduler, "waiting", Queue(llm.scheduler.waiting))
    scanned.clear()
    for request_id in ids:
        llm.abort(request_id)
    assert not scanned
    assert [output["finish_reason"] for _, output in llm.step()] == ["abort"] * 50
