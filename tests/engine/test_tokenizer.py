"""The tokenizer without transformers: it is transformers' to the letter, or it is transformers'."""

import json
import logging
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, processors

from nanovllm import LLM, SamplingParams
from nanovllm.engine.chat import render_chat
from nanovllm.engine.prompts import find_eos_token_ids, load_tokenizer
from nanovllm.engine.tokenizer import QuickTokenizer, open_tokenizer, whole_tokenizer
from tests.conftest import write_tokenizer
from tests.engine.test_detokenizer import SAMPLES, TOKENIZERS
from tests.test_fuzz_files import Tokenizers, base  # noqa: F401

ROOT = Path(__file__).parents[2]
BUNDLED = ROOT / "tests" / "assets" / "tiny-qwen3"
MODEL = {"model_type": "qwen3", "transformers_version": "4.51.0", "vocab_size": 10**6}
CONFIG = {"clean_up_tokenization_spaces": False, "eos_token": "</s>", "unk_token": "<unk>"}
END = {"content": "</s>", "lstrip": False, "normalized": False, "rstrip": False}
END |= {"single_word": False, "special": True}


def write(folder, backend, config, model=MODEL):
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(model))
    return folder


def backend_of(name) -> Tokenizer:
    return Tokenizer.from_str(TOKENIZERS[name].backend_tokenizer.to_str())


def random_ids(rng, size):
    """Of all kinds: any, bytes, special ones, beyond the table, long and none."""
    kind = rng.randrange(4)
    num = rng.choice((0, 1, 2, 5, 40))
    high = (size + 20, min(size, 262), 5, size)[kind]
    return [rng.randrange(high) for _ in range(num)]


def check_equal(quick, whole, seed=0):
    """Ids to text, text to ids, and the ids of names."""
    rng, size = random.Random(seed), len(whole)
    special = list(whole.added_tokens_decoder)
    for _ in range(200):
        ids = random_ids(rng, size) + rng.choices(special or [0], k=rng.randrange(3))
        rng.shuffle(ids)
        for skip in (True, False):
            assert quick.decode(ids, skip_special_tokens=skip) == whole.decode(
                ids, skip_special_tokens=skip
            )
    names = [str(token) for token in whole.added_tokens_decoder.values()]
    texts = [*SAMPLES, *("".join(rng.choices(SAMPLES + names, k=4)) for _ in range(30)), "", " "]
    for add in (True, False):
        expected = whole(texts, add_special_tokens=add)["input_ids"]
        assert quick(texts, add_special_tokens=add)["input_ids"] == expected
        assert quick.encode(texts[3], add_special_tokens=add) == expected[3]
    tokens = [*names, "a", "<0x41>", "no such token"]
    assert quick.convert_tokens_to_ids(tokens) == whole.convert_tokens_to_ids(tokens)
    assert quick.bos_token_id == whole.bos_token_id
    assert quick.eos_token_id == whole.eos_token_id


# -- without transformers --------------------------------------------------------------------------

GENERATE = """
import sys
from nanovllm import LLM, SamplingParams
heavy = {"transformers", "huggingface_hub", "jinja2", "xgrammar", "jsonschema", "scipy", "pandas",
    "requests", "torch._dynamo", "torch._inductor", "sympy"}
with LLM(sys.argv[1], device="cpu", max_model_len=64, num_kvcache_blocks=4) as llm:
    params = SamplingParams(temperature=0, max_tokens=8, stop="no such text", logprobs=2)
    outputs = llm.generate([eval(sys.argv[2])], params, use_tqdm=False)
    list(llm.stream([eval(sys.argv[2])], SamplingParams(temperature=0, max_tokens=4)))
    print(repr(outputs[0]["text"]))
    assert not heavy & set(sys.modules), heavy & set(sys.modules)
    text = llm.tokenizer.decode(outputs[0]["token_ids"], skip_special_tokens=True)
    assert "transformers" in sys.modules and text == outputs[0]["text"] and text, text
"""


@pytest.mark.parametrize("prompt", [[1, 2, 3], "list all prime"])
def test_generating_never_imports_transformers(prompt):
    """It takes seconds of a start. In a process of its own, as the tests import it themselves."""
    command = [sys.executable, "-c", GENERATE, str(BUNDLED), repr(prompt)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=120)


# -- equal to transformers -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["byte_level", "llama2", "metaspace"])
@pytest.mark.parametrize("declares", [False, True])
def test_quick_tokenizer_is_transformers_to_the_letter(name, declares, tmp_path):
    """Byte-level BPE; metaspace with byte fallback; special tokens and added ones."""
    backend = backend_of(name)
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken(" x ", lstrip=True)])
    backend.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    config = CONFIG | {"bos_token": "<s>", "extra_special_tokens": ["<|end|>"]}
    if declares:  # as transformers 4 writes it
        tokens = json.loads(backend.to_str())["added_tokens"]
        config["added_tokens_decoder"] = {str(token.pop("id")): token for token in tokens}
    quick = open_tokenizer(write(tmp_path, backend, config))
    assert isinstance(quick, QuickTokenizer)
    check_equal(quick, load_tokenizer(tmp_path))


def test_bundled_tokenizer_and_that_of_the_tests_are_quick(tmp_path):
    write_tokenizer(tmp_path)  # as transformers 5 writes it
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    for folder in (BUNDLED, tmp_path):
        quick = open_tokenizer(folder)
        assert isinstance(quick, QuickTokenizer)
        check_equal(quick, load_tokenizer(folder))


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_bos_of_a_post_processor_is_the_one_that_transformers_adds(config, tmp_path):
    backend = backend_of("llama2")
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    config = CONFIG | {"bos_token": "<s>"} | config
    quick = open_tokenizer(write(tmp_path, backend, config))
    assert isinstance(quick, QuickTokenizer)
    check_equal(quick, load_tokenizer(tmp_path))


def test_whole_tokenizer_is_the_one_that_loads_by_itself_and_then_does_all(tmp_path):
    backend = backend_of("byte_level")
    write(tmp_path, backend, CONFIG | {"chat_template": "{{ messages[0].content }}"})
    quick, other = open_tokenizer(tmp_path), load_tokenizer(tmp_path)
    whole = whole_tokenizer(quick)
    assert whole is whole_tokenizer(quick) is quick.whole()
    assert whole_tokenizer(other) is other and type(whole) is type(other)
    assert whole.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
    assert whole.init_kwargs == other.init_kwargs
    assert vars(whole).keys() == vars(other).keys()
    messages = [{"role": "user", "content": "Hello"}]
    assert render_chat(whole, messages) == render_chat(other, messages)
    whole.pad_token = "</s>"
    whole(["a", "long text"], padding=True, pad_to_multiple_of=8)  # the backend now pads
    check_equal(quick, other)
    whole.add_tokens(["<new>"])  # whoever changes it changes what the engine uses
    assert quick.decode([len(whole) - 1]) == "<new>"


def test_engine_reads_text_after_its_tokenizer_was_asked_for_as_before(tmp_path):
    params = SamplingParams(temperature=0, max_tokens=4, bad_words=["the"])
    with LLM(str(BUNDLED), device="cpu", max_model_len=64, num_kvcache_blocks=4) as llm:
        (first,) = llm.generate("list all", params, use_tqdm=False)
        assert first["prompt_token_ids"] == llm.tokenizer("list all")["input_ids"]
        (second,) = llm.generate("list all", params, use_tqdm=False)
    assert (first["token_ids"], first["text"]) == (second["token_ids"], second["text"])


# -- left to transformers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "model"),
    [
        ({"clean_up_tokenization_spaces": True}, {}),
        ({"split_special_tokens": True}, {}),
        ({"eos_token": "a"}, {}),  # becomes an added token, which is skipped
        ({"pad_token": "<pad>"}, {}),  # is added
        ({"eos_token": END | {"__type": "AddedToken"}}, {}),
        ({"image_token": "a"}, {}),
        ({"extra_special_tokens": ["a"]}, {}),
        ({"additional_special_tokens": ["<new>"]}, {}),
        ({"extra_special_tokens": {"x_token": "a"}}, {}),
        ({"added_tokens_decoder": {"900": END | {"content": "<late>"}}}, {}),
        ({"added_tokens_decoder": {"1": END | {"lstrip": True}}}, {}),
        ({"padding_side": "left"}, {}),
        ({"some_new_setting": 1}, {}),
        ({}, {"model_type": "mistral3"}),
        ({}, {"transformers_version": "five"}),
    ],
)
def test_what_transformers_may_see_otherwise_is_left_to_it(change, model, tmp_path):
    folder = write(tmp_path, backend_of("byte_level"), CONFIG | change, MODEL | model)
    tokenizer = open_tokenizer(folder)
    assert type(tokenizer) is type(load_tokenizer(folder))


@pytest.mark.parametrize("key", ["truncation", "padding"])
def test_backend_that_cuts_or_pads_is_left_to_transformers(key, tmp_path):
    backend = backend_of("byte_level")
    backend.enable_truncation(3) if key == "truncation" else backend.enable_padding(length=9)
    tokenizer = open_tokenizer(write(tmp_path, backend, CONFIG))
    assert not isinstance(tokenizer, QuickTokenizer)
    assert len(tokenizer("a b c d e f g")["input_ids"]) > 3


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json"])
def test_older_files_beside_it_are_left_to_transformers(name, tmp_path):
    folder = write(tmp_path, backend_of("byte_level"), CONFIG)
    (folder / name).write_text('{"<late>": 900}' if name == "added_tokens.json" else "{}")
    assert not isinstance(open_tokenizer(folder), QuickTokenizer)
    declared = {str(i): END for i in [TOKENIZERS["byte_level"].convert_tokens_to_ids("</s>")]}
    write(folder, backend_of("byte_level"), CONFIG | {"added_tokens_decoder": declared})
    check_equal(open_tokenizer(folder), load_tokenizer(folder))  # then it does not read them


def test_another_transformers_is_trusted_with_all(tmp_path, monkeypatch):
    folder = write(tmp_path, backend_of("byte_level"), CONFIG)
    for number in ("4.57.1", "6.0.0", "50.0"):
        monkeypatch.setattr("nanovllm.engine.tokenizer.version", lambda _, n=number: n)
        assert not isinstance(open_tokenizer(folder), QuickTokenizer)


# -- damage ----------------------------------------------------------------------------------------


class Differential(Tokenizers):
    """The damaged files of test_fuzz_files, loaded by both."""

    def __init__(self, folder, sound):
        super().__init__(folder, sound)
        del self.files["special_tokens_map.json"]  # which is left to transformers

    def case(self, rng):
        result = super().case(rng)
        try:
            tokenizer = open_tokenizer(self.folder)
        except ValueError as error:
            assert result == "refused" and str(self.folder) in str(error)
            return result
        if not isinstance(tokenizer, QuickTokenizer):
            return f"left: {result}"
        # It may have been refused for the model's EOS, which is checked after it.
        whole = load_tokenizer(self.folder)
        if len({*whole.get_vocab().values()}) < len(whole.get_vocab()):
            whole = tokenizer.whole()  # an id of two tokens is now the one and now the other
        for _ in range(5):
            ids = random_ids(rng, 270)
            for skip in (True, False):
                text = whole.decode(ids, skip_special_tokens=skip)
                assert tokenizer.decode(ids, skip_special_tokens=skip) == text
        assert tokenizer.eos_token_id == whole.eos_token_id
        assert tokenizer.bos_token_id == whole.bos_token_id
        for text in ("Hello, wörld <|im_end|>", "a" * 40):
            assert encoded(tokenizer, text) == encoded(whole, text)
        assert vars(tokenizer.whole()).keys() == vars(whole).keys()
        return f"quick: {result}"


def encoded(tokenizer, text):
    try:
        return tokenizer([text])["input_ids"]
    except Exception as error:
        return str(error)


def test_damaged_tokenizers_are_refused_at_once_or_equal(base, tmp_path):  # noqa: F811
    """One that opens quickly must never turn out to be none when transformers is asked."""
    folder = tmp_path / "model"
    folder.mkdir()
    cases, counts = Differential(folder, base), Counter()
    for seed in range(400):
        shutil.rmtree(folder)
        folder.mkdir()
        try:
            counts[cases.case(random.Random(f"quick {seed}"))] += 1
        except BaseException as error:
            error.add_note(f"case {seed}")
            raise
    assert min(counts["refused"], counts["quick: loaded"], counts["left: loaded"]) > 10, counts


def test_decoder_that_panics_or_is_missing_is_no_different(tmp_path):
    backend = backend_of("byte_level")
    backend.decoder = decoders.Sequence([])
    quick = open_tokenizer(write(tmp_path, backend, CONFIG))
    check_equal(quick, load_tokenizer(tmp_path))
    assert find_eos_token_ids(tmp_path, quick, type("C", (), MODEL)) == {quick.eos_token_id}


def test_length_is_the_engine_s_to_complain_of(caplog):
    """transformers would warn of more tokens than its files name, once for each tokenizer."""
    quick = open_tokenizer(BUNDLED)
    logger, limit = logging.getLogger("transformers"), quick.whole().model_max_length
    logger.addHandler(caplog.handler)
    try:
        text = "hi " * limit
        render_chat(quick.whole(), [{"role": "user", "content": text}])
        for tokenizer in (quick, load_tokenizer(BUNDLED)):
            assert len(tokenizer([text])["input_ids"][0]) > limit
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.messages == []
