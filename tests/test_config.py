"""Every engine knob: its default, its range, and the name of what is wrong with it."""

import json
import math
import random
import time
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import numpy as np
import pytest

from nanovllm.config import Config, load_hf_config, resolve_checkpoint
from tests.test_isolation import JUNK

INTEGERS = {  # field -> (default, lowest, highest)
    "max_num_batched_tokens": (16384, 1, None),
    "max_num_seqs": (512, 1, 65_535),
    "max_model_len": (4096, 2, None),
    "tensor_parallel_size": (1, 1, 8),
    "kvcache_block_size": (256, 1, None),
    "num_kvcache_blocks": (None, 1, None),
    "seed": (0, 0, 2**63 - 1),
}
CHOICES = {
    "dtype": ("auto", "float32", "float16", "bfloat16"),
    "device": ("auto", "cpu", "cuda"),
    "load_format": ("auto", "dummy"),
    "schedule_policy": ("fcfs", "prefix"),
}
# field -> default
FLAGS = {
    "enforce_eager": False,
    "overlap": True,
    "deterministic": False,
    "cascade_attention": True,
}
SECONDS = {"step_timeout": 60.0, "start_timeout": 600.0}


def test_no_knob_is_missing_here():
    others = {"model", "gpu_memory_utilization", "attention_backend"}
    assert {field.name for field in fields(Config)} == others.union(
        INTEGERS, CHOICES, FLAGS, SECONDS
    )


@pytest.mark.parametrize("name", SECONDS)
def test_seconds(name):
    assert getattr(Config("m"), name) == SECONDS[name]
    assert getattr(Config("m", **{name: np.float32(2)}), name) == 2.0
    for bad in (0, -1, float("nan"), float("inf"), 1e6):
        with pytest.raises(ValueError, match=f"^{name}: got"):
            Config("m", **{name: bad})
    for bad in (True, "60", None):
        with pytest.raises(TypeError, match=f"^{name}: got"):
            Config("m", **{name: bad})


def test_defaults():
    config = Config("m")
    assert {name: getattr(config, name) for name in INTEGERS} == {
        name: default for name, (default, _, _) in INTEGERS.items()
    }
    assert {name: getattr(config, name) for name in CHOICES} == {
        name: choices[0] for name, choices in CHOICES.items()
    }
    assert config.attention_backend == "auto"
    assert {name: getattr(config, name) for name in FLAGS} == FLAGS
    assert config.gpu_memory_utilization == 0.9


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_taken_from_lowest_to_highest(name):
    _, low, high = INTEGERS[name]
    for value in (low, low + 1, np.int64(low), np.uint8(low), high or 10**9):
        stored = getattr(Config("m", **{name: value}), name)
        assert stored == value and type(stored) is int


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_out_of_range_are_value_errors(name):
    _, low, high = INTEGERS[name]
    for value in [low - 1, -5, np.int32(low - 1), *([high + 1, 2**70] if high else [])]:
        with pytest.raises(ValueError, match=f"^{name}: got {value}, needs an integer"):
            Config("m", **{name: value})


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize(
    "value", [True, 1.0, 2.5, "4", math.nan, math.inf, [4], {}, np.float64(4), np.True_]
)
def test_integers_of_another_type_are_type_errors(name, value):
    with pytest.raises(TypeError, match=f"^{name}: got .*, needs an integer"):
        Config("m", **{name: value})


@pytest.mark.parametrize("name", [name for name in INTEGERS if name != "num_kvcache_blocks"])
def test_none_is_no_integer_except_for_a_pool_to_be_measured(name):
    assert Config("m", num_kvcache_blocks=None).num_kvcache_blocks is None
    with pytest.raises(TypeError, match=f"^{name}: got None"):
        Config("m", **{name: None})


@pytest.mark.parametrize("value", [1, 0.05, 1.0, np.float32(0.5)])
def test_utilization_is_a_share(value):
    assert Config("m", gpu_memory_utilization=value).gpu_memory_utilization == value


@pytest.mark.parametrize("value", [0, 0.0, -0.1, 1.0001, 90, math.nan, math.inf, -math.inf])
def test_utilization_that_is_no_share_is_a_value_error(value):
    with pytest.raises(ValueError, match="^gpu_memory_utilization: got .*, needs 0 < x <= 1, try"):
        Config("m", gpu_memory_utilization=value)


@pytest.mark.parametrize("value", [True, None, "0.9", 1j, [0.9]])
def test_utilization_of_another_type_is_a_type_error(value):
    with pytest.raises(TypeError, match="^gpu_memory_utilization: got .*, needs a number, try"):
        Config("m", gpu_memory_utilization=value)


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_bools(name):
    for value in (True, False):
        assert getattr(Config("m", **{name: value}), name) is value
    for value in (0, 1, None, "no", np.False_):
        with pytest.raises(TypeError, match=f"^{name}: got .*, needs True or False"):
            Config("m", **{name: value})


@pytest.mark.parametrize("name", CHOICES)
def test_choices_are_taken_and_others_are_named_with_all_of_them(name):
    for value in CHOICES[name]:
        assert getattr(Config("m", **{name: value}), name) == value
    for value in ("", "AUTO", "tpu"):
        with pytest.raises(ValueError, match=f"^{name}: got .*, needs one of {CHOICES[name][0]}"):
            Config("m", **{name: value})
    for value in (None, 1, True, ["auto"], float):
        with pytest.raises(TypeError, match=f"^{name}: got .*, needs a string"):
            Config("m", **{name: value})


@pytest.mark.parametrize("value", [None, 1, ["auto"]])
def test_attention_backend_is_a_name(value):
    with pytest.raises(TypeError, match="^attention_backend: got .*, needs a name"):
        Config("m", attention_backend=value)


def test_model_may_be_a_path():
    assert Config(Path("some") / "where").model == str(Path("some") / "where")


@pytest.mark.parametrize("value", [None, 5, b"m", ["m"]])
def test_model_of_another_type_is_a_type_error(value):
    with pytest.raises(TypeError, match="^model: got .*, needs a directory or a hub id"):
        Config(value)


@pytest.mark.parametrize("value", ["", "  "])
def test_empty_model_is_a_value_error(value):
    with pytest.raises(ValueError, match="^model: got an empty string"):
        Config(value)


@pytest.mark.parametrize(
    ("typo", "nearest"),
    [
        ("max_model_length", "max_model_len"),
        ("max_num_seq", "max_num_seqs"),
        ("tensor_parallel", "tensor_parallel_size"),
        ("block_size", "kvcache_block_size"),
        ("eager", "enforce_eager"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
    ],
)
def test_unknown_keyword_is_named_with_the_nearest_field(typo, nearest):
    """Unknown keywords vanished, so a typo in a limit went unseen (R21)."""
    with pytest.raises(TypeError, match=f"^{typo}: not a setting of LLM, .* try {nearest} "):
        Config.from_kwargs("m", **{typo: 1})


def test_unknown_keyword_that_resembles_nothing_still_lists_the_fields():
    with pytest.raises(TypeError, match="max_num_batched_tokens"):
        Config.from_kwargs("m", ζ=1)


def test_keywords_are_the_fields():
    assert Config.from_kwargs("m", max_num_seqs=3) == Config("m", max_num_seqs=3)


def test_config_cannot_be_changed_afterwards():
    with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
        Config("m").max_num_seqs = 7


# -- the checkpoint --------------------------------------------------------------------------------


def test_checkpoint_is_a_directory(tmp_path):
    assert resolve_checkpoint(str(tmp_path)) == tmp_path


def test_checkpoint_may_start_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve_checkpoint("~/model") == tmp_path / "model"


@pytest.mark.parametrize("name", ["no-such-model", "./a", "a/b/c", "~/no-such-model", "../a/b"])
def test_missing_directory_is_named_without_asking_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)  # a call would be a TypeError
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="^model: got .*, needs an existing checkpoint directory"):
        resolve_checkpoint(name)


def test_file_is_no_checkpoint(tmp_path):
    path = tmp_path / "model.gguf"
    path.touch()
    with pytest.raises(ValueError, match="^model: got .*, needs an existing checkpoint directory"):
        resolve_checkpoint(str(path))


def test_hub_id_is_downloaded_and_a_failure_says_what_to_try(tmp_path, monkeypatch):
    asked = []

    def download(name, allow_patterns, ignore_patterns):
        assert "*.safetensors" in allow_patterns and "consolidated*" in ignore_patterns
        asked.append(name)
        if name == "who/missing":
            raise OSError("offline")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("who/what") == tmp_path
    with pytest.raises(ValueError, match="^model: got 'who/missing', .* pass the directory"):
        resolve_checkpoint("who/missing")
    assert asked == ["who/what", "who/missing"]


def test_directory_without_config_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_hf_config(tmp_path)


@pytest.mark.parametrize("name", ["model-Q4_K_M.gguf", "pytorch_model.bin", "consolidated.00.pt"])
def test_directory_of_other_weights_without_config_is_one_clear_error(name, tmp_path):
    """As GGUF is published."""
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=rf"no config\.json but {name}, needs .*safetensors"):
        load_hf_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({"model_type": "no-such-model"})])
def test_config_file_that_cannot_be_read_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        load_hf_config(tmp_path)


def test_20000_random_settings_make_a_config_or_an_error_that_names_one():
    """R3: any value for any setting, known or not, in under 10 ms at the 99th percentile."""
    rng, names = random.Random(3), [field.name for field in fields(Config)]
    times, num_made = [], 0
    for _ in range(20_000):
        chosen = rng.sample([*names[1:], "max_seqs", "модель"], rng.randint(1, 4))
        kwargs = {name: rng.choice(JUNK) for name in chosen if rng.random() < 0.5}
        kwargs |= {name: rng.choice([1, 8, 0.5, "auto", "cpu", True]) for name in chosen[:1]}
        model = rng.choice(["m", Path("m"), rng.choice(JUNK)])
        start = time.thread_time()
        try:
            Config.from_kwargs(model, **kwargs)
            num_made += 1
        except (ValueError, TypeError) as error:
            assert str(error).startswith(("model", *chosen)), (error, kwargs)
            assert len(str(error)) < 1000
        times.append(time.thread_time() - start)
    assert num_made > 100 and sorted(times)[int(0.99 * len(times))] < 0.01
