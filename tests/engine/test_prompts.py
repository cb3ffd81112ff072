"""What callers may pass as prompts, and how each mistake is named."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanovllm.engine.params import bad_word_ids, check_params, default_sampling_params
from nanovllm.engine.prompts import (
    PromptReader,
    find_eos_token_ids,
    load_tokenizer,
    read_sampling_params,
)
from nanovllm.sampling_params import SamplingParams

TINY_QWEN3 = Path(__file__).parents[1] / "assets" / "tiny-qwen3"
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


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ({"prompt": "AB"}, [65, 66]),
        ({"prompt_token_ids": [1, 2]}, [1, 2]),
        ({"prompt_token_ids": np.array([1, 2])}, [1, 2]),
        ({"prompt_token_ids": torch.tensor([1, 2])}, [1, 2]),
    ],
)
def test_dict_of_vllm_is_one_prompt_alone_and_in_lists(prompt, ids):
    assert read(prompt) == [ids]
    assert read(["C", prompt, [3], prompt]) == [[67], ids, [3], ids]


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text for this")


class Index:
    """An integer to Python and to nobody else."""

    def __index__(self):
        return 5


def test_lists_of_every_kind_of_integer_are_read_as_numpy_reads_them():
    """Lists are packed together at first; 0 and 1 are where a bool could hide."""
    rng = random.Random(0)
    kinds = [int, np.int8, np.int64, np.uint64, np.int32]
    for _ in range(200):
        prompts = [
            [rng.choice(kinds)(rng.randrange(4)) for _ in range(rng.randrange(1, MAX_LEN))]
            for _ in range(rng.randrange(1, 9))
        ]
        assert read(prompts) == [np.array(x).tolist() for x in prompts]
    assert read([[Index(), 0]]) == [[5, 0]]


@pytest.mark.parametrize("bad", [True, False, np.True_, np.False_, 1.0, -1, 128, 2**31, 2**32, "A"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_bad_element_is_found_in_any_place_of_any_list(bad, place):
    for i in range(3):
        prompts = [[0, 1, 2], [0, 1, 2], [127, 0, 1]]
        prompts[i][place] = bad
        with pytest.raises((TypeError, ValueError), match=rf"^prompts\[{i}\]: got "):
            read(prompts)


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
        {1, 2},
        object(),
        Unprintable(),
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
    ("bad", "message"),
    [
        ({}, "got none of 'prompt' and 'prompt_token_ids'"),
        ({"prompt": "A", "prompt_token_ids": [1]}, "got both of 'prompt' and"),
        ({"prompt": "A", "prompts": "B"}, "got the key 'prompts' that is unknown"),
        ({1: "A"}, "got the key 1 that is unknown"),
        ({"multi_modal_data": {}, "prompt": "A"}, "'multi_modal_data' that this engine cannot"),
        ({"prompt": "A", "cache_salt": "B"}, "got the key 'cache_salt' that this engine cannot"),
        ({"prompt_embeds": 1}, "got the key 'prompt_embeds' that this engine cannot honour"),
        ({"prompt": [1]}, "got list as 'prompt', needs a string"),
        ({"prompt": None}, "got NoneType as 'prompt', needs a string"),
        ({"prompt_token_ids": "A"}, "got str as 'prompt_token_ids', needs a list"),
        ({"prompt_token_ids": None}, "got NoneType, needs"),
        ({"prompt_token_ids": {"prompt": "A"}}, "got dict, needs"),
        ({"prompt": ""}, "got an empty prompt"),
        ({"prompt": "A\ud800"}, "got a string with a lone surrogate at 1"),
    ],
)
def test_dict_with_other_keys_or_values_is_named_by_its_position(bad, message):
    with pytest.raises((ValueError, TypeError), match=rf"^prompts\[1\]: .*{message}"):
        read(["A", bad])
    with pytest.raises((ValueError, TypeError), match=rf"^prompts\[0\]: .*{message}"):
        read(bad)


# -- one bad prompt beside good ones ---------------------------------------------------------------


class BrokenTokenizer(FakeTokenizer):
    """Fails on a whole batch for one text in it, with what only the Rust tokenizers raise."""

    def __call__(self, texts):
        if any("!" in text for text in texts):
            raise Exception("no exclamations")
        return super().__call__(texts)


def test_bad_prompts_get_their_errors_and_the_others_their_ids():
    bad = [None, [True], [-1], "", [1] * 99, "A!", "A\ud800", {"x": 1}, [0, [1]], 5, [[2**70]]]
    reader = PromptReader(BrokenTokenizer(1), VOCAB_SIZE, MAX_LEN)
    good = ["AB", [0, 1], {"prompt": "C"}, np.array([7]), {"prompt_token_ids": [3]}]
    prompts = [item for pair in zip(bad, good * 3, strict=False) for item in pair]
    results = reader.read(prompts, on_error="return")
    assert len(results) == len(prompts)
    for i, result in enumerate(results):
        if i % 2 == 0 and bad[i // 2] != "":  # BOS alone is a prompt
            assert isinstance(result, (ValueError, TypeError)), prompts[i]
            assert str(result).startswith(f"prompts[{i}]: "), result
        else:
            assert result.tolist() == reader.read([prompts[i]])[0].tolist()


def test_first_bad_prompt_is_the_one_that_is_raised():
    for prompts, i in ((["A", [True], "A!", None], 1), (["A", "A!", [True]], 1), (["A!"], 0)):
        with pytest.raises((ValueError, TypeError), match=rf"^prompts\[{i}\]: "):
            PromptReader(BrokenTokenizer(), VOCAB_SIZE, MAX_LEN).read(prompts)


def test_what_is_no_list_of_prompts_is_raised_in_any_case():
    with pytest.raises(TypeError, match="^prompts: got int"):
        make_reader().read(5, on_error="return")
    with pytest.raises(ValueError, match="^on_error: got 'skip', needs 'raise' or 'return'"):
        make_reader().read(["A"], on_error="skip")


@pytest.mark.parametrize("bad", [None, 5, 1.5, object(), {1}, iter("A"), torch.ones(2, 2)])
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


def test_bad_sampling_params_get_their_errors_and_the_others_are_kept():
    good = SamplingParams(max_tokens=3)
    results = read_sampling_params([good, 5, None, good], 4, on_error="return")
    assert results[0] is results[3] is good
    assert [str(x).partition(":")[0] for x in results[1:3]] == [
        "sampling_params[1]",
        "sampling_params[2]",
    ]
    with pytest.raises(ValueError, match="^sampling_params: got 1 for 2 prompts"):
        read_sampling_params([good], 2, on_error="return")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"logit_bias": {127: 1.0, 128: 1.0}}, "logit_bias: got token id 128, needs 0 <= id < 128"),
        ({"allowed_token_ids": [5, 500]}, "allowed_token_ids: got token id 500"),
        ({"stop_token_ids": [128]}, "stop_token_ids: got token id 128"),
        ({"logprobs": 100}, "logprobs: got 100, needs at most 50"),
        ({"prompt_logprobs": 51}, "prompt_logprobs: got 51, needs at most 50"),
    ],
)
def test_params_that_do_not_fit_the_vocabulary_are_named(kwargs, message):
    vocab_size = 50 if "needs at most" in message else VOCAB_SIZE
    params, good = SamplingParams(**kwargs), SamplingParams()
    with pytest.raises(ValueError, match=rf"^sampling_params\[1\]\.{message}"):
        read_sampling_params([good, params], 2, vocab_size)
    with pytest.raises(ValueError, match=rf"^sampling_params\.{message}"):
        read_sampling_params(params, 2, vocab_size)
    first, second = read_sampling_params([good, params], 2, vocab_size, on_error="return")
    assert first is good and isinstance(second, ValueError)
    assert read_sampling_params(params, 2) == [params] * 2


def test_params_that_fit_the_vocabulary_are_kept():
    ids = [0, VOCAB_SIZE - 1]
    params = SamplingParams(
        logit_bias=dict.fromkeys(ids, 1.0), allowed_token_ids=ids, stop_token_ids=ids, logprobs=50
    )
    assert check_params("params", params, VOCAB_SIZE) is params


# -- bad words -------------------------------------------------------------------------------------


class WordTokenizer:
    """The longest known piece first; a leading space belongs to its word, as in BPE of GPT-2."""

    PIECES = ("?", " dog", "dog", " he", "hel", "lo", " ", "\n", "cat")

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        ids = []
        while text:
            piece = max((p for p in self.PIECES if text.startswith(p)), key=len, default="?")
            ids.append(self.PIECES.index(piece))
            text = text[len(piece) :]
        return ids


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), []),
        (("dog",), [(2,), (1,)]),  # two tokens for it
        ((" dog",), [(2,), (1,)]),
        (("cat",), [(8,)]),  # " cat" is " ", "cat": banned by "cat" alone
        (("hello",), [(4, 5), (3, 0, 5)]),  # " he", "?", "lo": another length, banned all the same
        (("dog", " dog", "dog"), [(2,), (1,)]),
        (("\n", " "), [(7,), (6,), (6, 6)][:2]),
    ],
)
def test_bad_word_is_banned_with_and_without_a_space_before_it(words, expected):
    assert bad_word_ids(WordTokenizer(), words) == expected


def test_bad_word_without_tokens_of_the_model_is_refused():
    with pytest.raises(ValueError, match=r"^bad_words\[1\]: got 'cat', .*in the vocabulary"):
        bad_word_ids(WordTokenizer(), ("dog", "cat"), vocab_size=8)
    with pytest.raises(ValueError, match=r"^bad_words\[0\]: got ''"):
        bad_word_ids(SimpleNamespace(encode=lambda *a, **k: []), ("",))


def test_bad_words_of_the_bundled_tokenizer_are_those_that_it_writes():
    tokenizer = load_tokenizer(TINY_QWEN3)
    for ids in bad_word_ids(tokenizer, ("the", "Привет")):
        assert tokenizer.decode(ids).strip() in ("the", "Привет")
    with pytest.raises(ValueError, match=r"^bad_words\[0\]: the tokenizer failed on"):
        bad_word_ids(tokenizer, ("\ud800",))


# -- the checkpoint's defaults ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {}),
        ({"min_p": 0.1, "repetition_penalty": 1.1}, {}),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": 0}, {}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": False}, {}),
        ({"max_new_tokens": 2048}, {"max_tokens": 2048}),
        ({"temperature": None, "top_k": None, "eos_token_id": 3, "max_length": 9}, {}),
        ({}, {}),
    ],
)
def test_defaults_are_what_generation_config_says(tmp_path, listed, expected):
    """do_sample does not count, as in vLLM."""
    (tmp_path / "generation_config.json").write_text(json.dumps(listed))
    names = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
    same = {k: v for k, v in listed.items() if k in names and v is not None}
    assert default_sampling_params(tmp_path) == same | expected
    SamplingParams(**default_sampling_params(tmp_path))


def test_no_generation_config_gives_no_defaults(tmp_path):
    assert default_sampling_params(tmp_path) == {}
    assert default_sampling_params(TINY_QWEN3) == {"temperature": 0.6}


@pytest.mark.parametrize(
    "text", ["{", "[1]", "7", "null", '{"temperature": "hot"}', '{"top_p": NaN}', '{"top_k": 1.5}']
)
def test_defaults_that_make_no_sense_are_named_with_their_file(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match="generation_config.json cannot be read"):
        default_sampling_params(tmp_path)


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
