"""What callers may pass as prompts, and how each mistake is named."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanovllm.engine.prompts import (
    PromptReader,
    find_eos_token_ids,
    load_tokenizer,
    read_sampling_params,
)
from nanovllm.sampling_params import SamplingParams

VOCAB_SIZE = 128
MAX_LEN = 16


class FakeTokenizer:
    """One token per character, its code; puts a BOS in front when it has one."""

    def __init__(self, bos_token_id=None, eos_token_id=None):
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id

    def __call__(self, texts):
        bos = [] if self.bos_token_id is None else [self.bos_token_id]
        return {"input_ids": [bos + [ord(c) for c in text] for text in texts]}


def make_reader(bos_token_id=None) -> PromptReader:
    return PromptReader(FakeTokenizer(bos_token_id), VOCAB_SIZE, MAX_LEN)


def read(prompts) -> list[list[int]]:
    return [ids.tolist() for ids in make_reader().read(prompts)]


# -- accepted --------------------------------------------------------------------------------------


def test_bare_string_is_one_prompt():
    """It used to be iterated by character, giving as many prompts as it had letters (R21)."""
    assert read("AB") == [[65, 66]]


@pytest.mark.parametrize(
    "ids", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), torch.tensor([1, 2, 3]), range(1, 4)]
)
def test_one_prompt_of_token_ids_is_one_prompt(ids):
    assert read(ids) == [[1, 2, 3]]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_integer_arrays_of_any_width_are_accepted(dtype):
    assert read([np.array([1, 127], dtype)]) == [[1, 127]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_integer_tensors_are_accepted(dtype):
    assert read([torch.tensor([1, 2], dtype=dtype)]) == [[1, 2]]


def test_numpy_scalars_are_accepted_as_ids():
    assert read([np.int64(1), np.int32(2)]) == [[1, 2]]
    assert read([[np.int64(1), 2]]) == [[1, 2]]


def test_list_may_mix_kinds_and_keeps_its_order():
    prompts = ["AB", [1, 2], torch.tensor([3]), "C", np.array([4]), (5, 6)]
    assert read(prompts) == [[65, 66], [1, 2], [3], [67], [4], [5, 6]]


def test_no_prompts_give_no_results():
    assert read([]) == []
    assert read(()) == []


def test_ids_are_int32_and_independent_of_what_was_passed():
    ids = np.array([1, 2], np.int32)
    result = make_reader().read([ids])[0]
    ids[0] = 9
    assert (result.dtype, result.tolist()) == (np.int32, [1, 2])


def test_longest_prompt_leaves_room_for_one_token():
    assert len(read([[1] * (MAX_LEN - 1)])[0]) == MAX_LEN - 1


@pytest.mark.parametrize(("text", "ids"), [("AB", [1, 65, 66]), ("\x01AB", [1, 65, 66])])
def test_bos_written_by_a_template_is_not_doubled(text, ids):
    """The template writes a BOS and the tokenizer adds another (R50)."""
    assert make_reader(bos_token_id=1).read(text)[0].tolist() == ids


def test_bos_in_token_ids_is_left_alone():
    assert make_reader(bos_token_id=1).read([[1, 1, 2]])[0].tolist() == [1, 1, 2]


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", ["", [], (), np.array([], np.int64), torch.tensor([])])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_empty_prompt_is_named_by_its_position(empty, position):
    """It was an IndexError while adding, and left its predecessors queued (R19)."""
    prompts = ["A", [1, 2]]
    prompts.insert(position, empty)
    with pytest.raises(ValueError, match=rf"prompts\[{position}\]: got an empty prompt"):
        read(prompts)


def test_string_that_is_no_unicode_is_named_by_its_position():
    """The tokenizer calls it a wrong type, and says neither which prompt nor why."""
    with pytest.raises(ValueError, match=r"prompts\[1\]: got a string with a lone surrogate at 2"):
        read(["A", "BC\ud800"])


@pytest.mark.parametrize(
    ("ids", "bad"),
    [([1, -1], "-1"), ([128], "128"), ([5, 10**6], "1000000"), ([-5, 300], "-5")],
)
def test_id_outside_the_vocabulary_is_named(ids, bad):
    with pytest.raises(ValueError, match=rf"prompts\[1\]: got token id {bad}, needs 0 <= id < 128"):
        read([[1], ids])


@pytest.mark.parametrize("bad", [2**63 - 1, 2**63, 2**64 - 1, -(2**63)])
def test_id_beyond_int32_does_not_wrap_into_the_vocabulary(bad):
    with pytest.raises(ValueError, match="token id"):
        read([[bad]])


@pytest.mark.parametrize("bad", [2**64, -(2**70)])
def test_id_beyond_64_bits_is_refused(bad):
    with pytest.raises(TypeError, match=r"prompts\[0\]"):
        read([[bad]])


@pytest.mark.parametrize("num_tokens", [MAX_LEN, MAX_LEN + 1, 1000])
@pytest.mark.parametrize("position", [0, 50, 99])
def test_one_long_prompt_in_a_hundred_is_found_before_any_work(num_tokens, position):
    """The whole call used to fail after minutes of work (R52), or never end (R07)."""
    prompts = [[1, 2]] * 100
    prompts[position] = [1] * num_tokens
    message = rf"prompts\[{position}\]: got {num_tokens} tokens, needs fewer than 16 "
    with pytest.raises(ValueError, match=message):
        read(prompts)


@pytest.mark.parametrize(
    "bad",
    [
        None,
        5,
        1.5,
        True,
        b"AB",
        bytearray(b"AB"),
        memoryview(b"AB"),
        {"prompt": "A"},
        {1, 2},
        object(),
        [1.0, 2.0],
        [1, 2.5],
        [1, None],
        [1, "A"],
        ["A", 1],
        ["A"],
        [[1, 2]],
        [[1], [2, 3]],
        [1, [2]],
        [True, False],
        [1, True],
        (1, True),
        [1, np.True_],
        [float("nan")],
        [float("inf")],
        np.array([1.0]),
        np.array([True]),
        np.array([[1, 2]]),
        np.array(5),
        torch.tensor([1.0]),
        torch.tensor([True]),
        torch.tensor([[1, 2]]),
        torch.tensor(5),
    ],
    ids=lambda bad: type(bad).__name__,
)
def test_prompt_of_another_type_is_named_by_its_position(bad):
    with pytest.raises(TypeError, match=r"^prompts\[1\]: got .*, needs a string or a list of"):
        read(["A", bad])


@pytest.mark.parametrize(
    "bad", [None, 5, 1.5, object(), {"A": 1}, {1}, iter("A"), torch.ones(2, 2)]
)
def test_argument_that_is_no_list_of_prompts_is_refused(bad):
    with pytest.raises(TypeError, match="^prompts: got "):
        read(bad)


@pytest.mark.parametrize("bad", [b"AB", bytearray(b"AB"), [True, 2], [1, "A"], [1, [2]]])
def test_single_prompt_of_a_wrong_type_is_refused(bad):
    with pytest.raises(TypeError, match=r"^prompts\[0\]: got "):
        read(bad)


# -- sampling_params -------------------------------------------------------------------------------


def test_one_sampling_params_is_for_all_prompts_and_none_means_the_defaults():
    params = SamplingParams(max_tokens=3)
    assert read_sampling_params(params, 2) == [params, params]
    assert read_sampling_params(None, 2) == [SamplingParams()] * 2
    assert read_sampling_params(params, 0) == []


@pytest.mark.parametrize("make_list", [list, tuple])
def test_list_of_sampling_params_is_taken_in_order(make_list):
    params = [SamplingParams(max_tokens=n) for n in (1, 2)]
    assert read_sampling_params(make_list(params), 2) == params


@pytest.mark.parametrize("size", [0, 1, 3])
def test_list_of_another_length_is_refused(size):
    """A short list used to drop prompts in silence (R21)."""
    with pytest.raises(ValueError, match=f"^sampling_params: got {size} for 2 prompts"):
        read_sampling_params([SamplingParams()] * size, 2)


@pytest.mark.parametrize("bad", [5, "greedy", {"temperature": 0}, True, SamplingParams])
def test_something_else_as_sampling_params_is_refused(bad):
    with pytest.raises(TypeError, match="^sampling_params: got "):
        read_sampling_params(bad, 2)
    with pytest.raises(TypeError, match=r"^sampling_params\[1\]: got "):
        read_sampling_params([SamplingParams(), bad], 2)


# -- the checkpoint's tokenizer --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "tokenizer_eos", "expected"),
    [
        (7, 9, {7, 9}),
        ([7, 8], 9, {7, 8, 9}),
        ([7, 8], None, {7, 8}),
        (None, 9, {9}),
        ([7, 9], 9, {7, 9}),
        (None, None, set()),
    ],
)
def test_eos_is_the_union_of_generation_config_and_tokenizer(
    tmp_path, listed, tokenizer_eos, expected
):
    """With one of several end ids known, chat answers ran on into turn markers (R18)."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    tokenizer = FakeTokenizer(eos_token_id=tokenizer_eos)
    config = SimpleNamespace(eos_token_id=99)
    assert find_eos_token_ids(tmp_path, tokenizer, config) == expected


@pytest.mark.parametrize(("listed", "expected"), [(7, {7, 9}), ([7, 8], {7, 8, 9}), (None, {9})])
def test_config_gives_the_eos_where_there_is_no_generation_config(tmp_path, listed, expected):
    tokenizer = FakeTokenizer(eos_token_id=9)
    config = SimpleNamespace(eos_token_id=listed)
    assert find_eos_token_ids(tmp_path, tokenizer, config) == expected
    assert find_eos_token_ids(tmp_path, tokenizer, SimpleNamespace()) == {9}


@pytest.mark.parametrize("text", ["{", "[1]", "7", '{"eos_token_id": "<end>"}'])
def test_broken_generation_config_is_named(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match="generation_config.json cannot be read"):
        find_eos_token_ids(tmp_path, FakeTokenizer(), SimpleNamespace())


def test_missing_tokenizer_is_a_value_error_that_names_the_folder(tmp_path):
    with pytest.raises(ValueError, match="has no tokenizer that loads") as error:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(error.value)
