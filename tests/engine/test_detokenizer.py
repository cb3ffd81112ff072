"""Text that comes token by token equals the text decoded at once, whatever the tokenizer does."""

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.prompts import load_tokenizer

SAMPLES = [
    "Hello world, it's a test. ",
    "don't we 've ? I 'm ' here ' ! n't",
    "你好，世界。",
    "日本語テキスト",
    "😀👩‍👩‍👧‍👦🏳️‍🌈",
    "e\u0301n\u0303 a\u030a\u0323",  # combining marks
    "שלום עולם مرحبا",
    "\ufffd \ufffd\ufffd",
    "zero\u200bwidth\u200d\ufeff",
    "  two  spaces\n\n\ttab ",
    "\U0001f600\U000e0041 \x00\x7f",
]
SPECIAL = ["<s>", "</s>", "<unk>"]


def byte_level():
    """Byte-level BPE whose few merges cross the borders of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLES * 3, trainer)
    tokenizer.add_tokens(["<tool>", "né"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback(decoder):
    """BPE over characters, the rest in bytes; a run of bytes is one U+FFFD each if any is wrong."""
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [
        "▁",
        "▁▁",
        "a",
        "b",
        "ab",
        "▁a",
        "▁ab",
        "l",
        "o",
        "lo",
        ",",
        "'",
        "n",
        "t",
        "é",
        "\ufffd",
    ]
    merges = [("▁", "▁"), ("a", "b"), ("▁", "a"), ("▁", "ab"), ("l", "o")]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def llama2():
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return byte_fallback(decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)]))


def metaspace():
    return byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


def word_piece():
    """Its spaces are cleaned: those before punctuation and n't go, when it has come."""
    words = "hello world don n t ve m s re do it test a . ? ! , '".split()
    names = ["<unk>", "<s>", "</s>", *words, *(f"##{w}" for w in words), "你", "##好", "\ufffd"]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=True)


def tiny_qwen3():
    return load_tokenizer(Path(__file__).parents[1] / "assets" / "tiny-qwen3")


class SlowTokenizer:
    """As sentencepiece decodes: each byte of an incomplete character is a U+FFFD of its own."""

    all_special_ids = [256]

    def __len__(self):
        return 257

    def __call__(self, text, **_):
        return {"input_ids": list(text.encode())}

    def convert_tokens_to_ids(self, tokens):
        return [256] * len(tokens)

    def decode(self, ids, skip_special_tokens=False):
        special = b"" if skip_special_tokens else b"</s>"
        data = b"".join(bytes([i]) if i < 256 else special if i == 256 else b"" for i in ids)
        return "".join(
            "\ufffd" if "\udc80" <= char <= "\udcff" else char
            for char in data.decode("utf-8", "surrogateescape")
        )


TOKENIZERS = {
    make.__name__: make()
    for make in (byte_level, llama2, metaspace, word_piece, tiny_qwen3, SlowTokenizer)
}
each_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)
some_examples = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)


@st.composite
def token_ids(draw, tokenizer):
    """Random ids, ids of text, special ones, some beyond the table, and many of one kind."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    ids = []
    for _ in range(draw(st.integers(1, 4))):
        kind = rng.randrange(5)
        if kind == 0:
            ids += [rng.randrange(len(tokenizer) + 20) for _ in range(rng.randrange(30))]
        elif kind == 1:
            text = "".join(rng.choices(SAMPLES, k=2))
            part = tokenizer(text, add_special_tokens=False)["input_ids"]
            start = rng.randrange(len(part) + 1)
            ids += part[start : start + 30]
        elif kind == 2:
            ids += rng.choices(range(len(tokenizer)), k=3) * rng.randrange(8)
        elif kind == 3:
            ids += rng.choices([*tokenizer.all_special_ids, len(tokenizer) + 1], k=1) * 20
        else:  # the first ids are bytes in most of these tokenizers
            ids += [rng.randrange(min(259, len(tokenizer))) for _ in range(rng.randrange(12))]
    return ids


def visible(tokenizer, ids):
    """The decoded text without what may be the beginning of a character."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    if tokenizer not in (TOKENIZERS["llama2"], TOKENIZERS["metaspace"]):
        return text[: max(len(text.rstrip("\ufffd")), len(text) - 3)]
    run = []
    for i in reversed(ids):
        if 3 <= i < 259:
            run.insert(0, i - 3)
        elif tokenizer.decode([i, i], skip_special_tokens=True):
            break
    while run:
        try:
            bytes(run).decode()
            break
        except UnicodeDecodeError:
            run.pop()
            last = max(k for k, i in enumerate(ids) if 3 <= i < 259)
            ids = ids[:last]
    return tokenizer.decode(ids, skip_special_tokens=True)


def expect(tokenizer, ids, stop, include_stop, min_tokens):
    """stop string, tokens and text, from decoding all tokens so far after each one."""
    num_barred = len(visible(tokenizer, ids[:min_tokens]))
    for n in range(min_tokens + 1, len(ids) + 1):
        text = visible(tokenizer, ids[:n])
        found = [(text.find(s, max(0, num_barred + 1 - len(s))), s) for s in stop]
        found = [(start + len(s), rank) for rank, (start, s) in enumerate(found) if start >= 0]
        if found:
            end, rank = min(found)
            return stop[rank], n, text[: end if include_stop else end - len(stop[rank])]
    return None, len(ids), tokenizer.decode(ids, skip_special_tokens=True)


def feed(detokenizer, ids, rng, take=0.7):
    """(stop string, deltas): groups of random size, deltas taken now and then."""
    deltas, found, start = [], None, 0
    while start < len(ids):
        size = rng.choice([1, 1, 1, 2, 5, 30])
        stop = detokenizer.append(ids[start : start + size])
        assert not (stop and found)
        found = found or stop
        start += size
        if rng.random() < take:
            deltas.append(detokenizer.take_delta())
    detokenizer.finish()
    deltas.append(detokenizer.take_delta())
    assert detokenizer.take_delta() == ""
    return found, deltas


# -- without stop strings --------------------------------------------------------------------------


@each_tokenizer
@pytest.mark.parametrize("skip", [True, False])
def test_joined_deltas_are_the_decoded_text(name, skip):
    tokenizer = TOKENIZERS[name]

    @some_examples
    @given(token_ids(tokenizer), st.randoms())
    def check(ids, rng):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
        _, deltas = feed(detokenizer, ids, rng)
        assert detokenizer.text == tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(deltas) == detokenizer.text
        assert detokenizer.num_tokens == len(ids)

    check()


@each_tokenizer
def test_text_comes_as_soon_as_it_can_no_longer_change(name):
    """Held back is at most a character, a run of bytes, or a word that cleaning may still move."""
    tokenizer = TOKENIZERS[name]

    @some_examples
    @given(token_ids(tokenizer))
    def check(ids):
        detokenizer = Detokenizer(tokenizer)
        given_out = ""
        for n, token_id in enumerate(ids, 1):
            detokenizer.append([token_id])
            given_out += detokenizer.take_delta()
            text = tokenizer.decode(ids[:n], skip_special_tokens=True)
            assert text.startswith(given_out)
            if name in ("llama2", "metaspace"):
                if not 3 <= token_id < 259 and tokenizer.decode([token_id] * 2).strip("<s/unk>"):
                    assert given_out == text
            elif name == "word_piece":
                assert len(text) - len(given_out) <= 6
            else:
                assert len(text) - len(given_out) <= 3 and not text[len(given_out) :].strip(
                    "\ufffd"
                )

    check()


@pytest.mark.parametrize("name", ["byte_level", "tiny_qwen3", "SlowTokenizer"])
def test_a_character_is_never_handed_out_in_part(name):
    tokenizer = TOKENIZERS[name]
    text = "".join(s for s in SAMPLES if "\ufffd" not in s)
    detokenizer = Detokenizer(tokenizer)
    deltas = []
    for token_id in tokenizer(text)["input_ids"]:
        detokenizer.append([token_id])
        deltas.append(detokenizer.take_delta())
    assert "\ufffd" not in "".join(deltas)
    assert "".join(deltas) == text  # before finish(): nothing is held back for good


def test_incomplete_last_character_is_what_decode_makes_of_it():
    tokenizer = TOKENIZERS["tiny_qwen3"]
    ids = tokenizer("ok 😀")["input_ids"][:-1]
    detokenizer = Detokenizer(tokenizer)
    detokenizer.append(ids)
    assert detokenizer.take_delta() == "ok "
    detokenizer.finish()
    assert detokenizer.take_delta() == "\ufffd"
    assert detokenizer.text == "ok \ufffd"


def test_byte_that_spoils_a_run_is_not_too_late():
    """The ByteFallback decoder turns all of 41 42 FF into U+FFFD, so "AB" must not be out yet."""
    detokenizer = Detokenizer(TOKENIZERS["llama2"])
    for byte in b"AB":
        detokenizer.append([3 + byte])
        assert detokenizer.take_delta() == ""
    detokenizer.append([3 + 0xFF])
    detokenizer.finish()
    assert detokenizer.take_delta() == "\ufffd" * 3


@pytest.mark.parametrize("num_before", range(20))
def test_skipped_tokens_inside_a_character_do_not_break_it(num_before):
    """Where the window then begins inside it, stray bytes must not pass for text already out."""
    tokenizer = TOKENIZERS["byte_level"]
    before, skipped = tokenizer.convert_tokens_to_ids(["a", "</s>"])
    *head, last = tokenizer("\U00010001")["input_ids"]
    assert len(head) == 3
    ids = [before] * num_before + head + [skipped] * 16 + [last, before, before]
    detokenizer = Detokenizer(tokenizer)
    deltas = []
    for token_id in ids:
        detokenizer.append([token_id])
        deltas.append(detokenizer.take_delta())
    detokenizer.finish()
    deltas.append(detokenizer.take_delta())
    assert "".join(deltas) == detokenizer.text == tokenizer.decode(ids, skip_special_tokens=True)


def test_three_bytes_that_become_one_replacement_character_take_nothing_back():
    """U+FFFD itself, in a decoder that shows one for each byte: six of them become four."""
    detokenizer = Detokenizer(TOKENIZERS["SlowTokenizer"])
    deltas = []
    for byte in b"\xf5\xbf\xbd\xef\xbf\xbd_":
        detokenizer.append([byte])
        deltas.append(detokenizer.take_delta())
    assert "".join(deltas) == "\ufffd" * 4 + "_"


def test_nothing_at_all():
    detokenizer = Detokenizer(TOKENIZERS["tiny_qwen3"], stop=("a",))
    assert detokenizer.append([]) is None
    assert detokenizer.take_delta() == ""
    detokenizer.finish()
    assert (detokenizer.text, detokenizer.num_tokens) == ("", 0)


# -- stop strings ----------------------------------------------------------------------------------


@st.composite
def stop_case(draw, tokenizer):
    """(ids, stop, include_stop, min_tokens), the stop strings mostly cut from the text itself."""
    ids = draw(token_ids(tokenizer))
    text = tokenizer.decode(ids, skip_special_tokens=True) or "x"
    stop = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text) - 1))
        stop.append(text[start : start + draw(st.integers(1, 8))])
        if draw(st.integers(0, 3)) == 0:
            stop[-1] += draw(st.sampled_from(["x", " ", "\n", stop[-1][0]]))
    return ids, tuple(stop), draw(st.booleans()), draw(st.sampled_from([0, 0, 1, 2, 5, 20]))


@each_tokenizer
def test_stop_string_cuts_the_text_at_the_token_that_completes_it(name):
    tokenizer = TOKENIZERS[name]

    @some_examples
    @given(stop_case(tokenizer), st.randoms(), st.sampled_from([0, 0.5, 1]))
    def check(case, rng, take):
        ids, stop, include_stop, min_tokens = case
        detokenizer = Detokenizer(tokenizer, True, stop, include_stop, min_tokens)
        found, deltas = feed(detokenizer, ids, rng, take)
        result = found, detokenizer.num_tokens, detokenizer.text
        assert result == expect(tokenizer, ids, stop, include_stop, min_tokens)
        assert "".join(deltas) == detokenizer.text

    check()


def run_text(text, stop, **options):
    """(stop string, text, number of tokens, deltas): one token for each byte of the text."""
    detokenizer = Detokenizer(TOKENIZERS["SlowTokenizer"], stop=stop, **options)
    deltas, found = [], None
    for byte in text.encode():
        found = found or detokenizer.append([byte])
        deltas.append(detokenizer.take_delta())
    detokenizer.finish()
    return found, detokenizer.text, detokenizer.num_tokens, deltas + [detokenizer.take_delta()]


def test_beginning_of_a_stop_string_is_held_back_until_it_is_not_one():
    assert run_text("aSTOb", ("STOP",)) == (None, "aSTOb", 5, ["a", "", "", "", "STOb", ""])
    assert run_text("aSTOPb", ("STOP",)) == ("STOP", "a", 5, ["a", "", "", "", "", "", ""])
    assert run_text("aST", ("STOP",)) == (None, "aST", 3, ["a", "", "", "ST"])
    assert run_text("ababac", ("abac",))[:3] == ("abac", "ab", 6)
    assert run_text("é, è", ("è",))[:3] == ("è", "é, ", 6)


def test_included_stop_string_ends_the_text():
    found = run_text("aSTOPb", ("STOP",), include_stop=True)
    assert found == ("STOP", "aSTOP", 5, ["a", "", "", "", "STOP", "", ""])


def test_stop_string_inside_one_token_cuts_the_rest_of_it():
    tokenizer = TOKENIZERS["word_piece"]
    ids = tokenizer("test hello world", add_special_tokens=False)["input_ids"]
    for include, text in ((False, "test h"), (True, "test hell")):
        detokenizer = Detokenizer(tokenizer, stop=("ell",), include_stop=include)
        assert detokenizer.append(ids) == "ell"
        assert (detokenizer.text, detokenizer.num_tokens) == (text, 2)
        assert detokenizer.append(ids) is None
        assert detokenizer.num_tokens == 2


@pytest.mark.parametrize(
    "stop, found, text",
    [
        (("lo", "ell"), "ell", "h"),  # ends first
        (("ello", "hello"), "ello", "h"),  # end together: the first listed
        (("hello", "ello"), "hello", ""),
        (("hello", "l"), "l", "he"),
    ],
)
def test_of_two_stop_strings_in_one_token_the_first_to_end_counts(stop, found, text):
    """As one character after the other would have found them (vLLM since its #49391)."""
    tokenizer = TOKENIZERS["word_piece"]
    detokenizer = Detokenizer(tokenizer, stop=stop)
    assert detokenizer.append(tokenizer("hello", add_special_tokens=False)["input_ids"]) == found
    assert detokenizer.text == text


def test_stop_string_must_end_after_the_first_min_tokens():
    assert run_text("a.b.c", (".",), min_tokens=2)[:3] == (".", "a.b", 4)
    assert run_text("a..", ("..",), min_tokens=2)[:3] == ("..", "a", 3)  # it may begin in them
    assert run_text("a.", (".",), min_tokens=9)[:3] == (None, "a.", 2)


def test_newline_of_llama_2_stops_at_once_though_its_run_of_bytes_may_go_on():
    tokenizer = TOKENIZERS["llama2"]
    ids = [*tokenizer("ab")["input_ids"], 3 + 0x0A]
    detokenizer = Detokenizer(tokenizer, stop=("\n",))
    assert detokenizer.append(ids) == "\n"
    assert (detokenizer.text, detokenizer.num_tokens) == ("ab", len(ids))


def test_first_space_that_the_decoder_drops_is_no_part_of_a_stop_string():
    ids = [3 + byte for byte in b" a a"]
    detokenizer = Detokenizer(TOKENIZERS["llama2"], stop=(" a",))
    assert detokenizer.append(ids) == " a"
    assert (detokenizer.text, detokenizer.num_tokens) == ("a", 4)


# -- cost ------------------------------------------------------------------------------------------


class CountingTokenizer:
    """Adds up the tokens that are decoded."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.clean_up_tokenization_spaces = False
        self.convert_tokens_to_ids = tokenizer.convert_tokens_to_ids
        self.num_decoded = 0
        self.num_calls = 0

    def decode(self, ids, **options):
        self.num_calls += 1
        self.num_decoded += len(ids)
        return self.tokenizer.decode(ids, **options)


ENDLESS = {
    "text": ("tiny_qwen3", lambda t: t("a cat sat on 你好 😀 ")["input_ids"]),
    "invalid": ("byte_level", lambda t: t("é")["input_ids"][-1:]),
    "incomplete": ("byte_level", lambda t: t("\U00010001")["input_ids"][:3]),
    "special": ("tiny_qwen3", lambda t: t.all_special_ids[:1]),
    "unknown": ("tiny_qwen3", lambda t: [len(t) + 5]),
    "run of valid bytes": ("llama2", lambda t: [3 + 0x0A]),
    "run of spoiled bytes": ("llama2", lambda t: [3 + 0x41, 3 + 0xFF]),
    "run of bytes and specials": ("llama2", lambda t: [3 + 0x41, 1]),
    "spaces": ("metaspace", lambda t: t.convert_tokens_to_ids(["▁"])),
}


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("stop", [(), ("\n\nUser:", "zz", "\ufffd.")])
def test_cost_of_a_token_does_not_grow_with_those_before_it(kind, stop):
    name, make = ENDLESS[kind]
    pattern = make(TOKENIZERS[name])
    ids = (pattern * 5000)[:5000]
    tokenizer = CountingTokenizer(TOKENIZERS[name])
    detokenizer = Detokenizer(tokenizer, stop=stop)
    deltas = []
    for token_id in ids:
        detokenizer.append([token_id])
        deltas.append(detokenizer.take_delta())
    detokenizer.finish()
    deltas.append(detokenizer.take_delta())
    assert "".join(deltas) == TOKENIZERS[name].decode(ids, skip_special_tokens=True)
    assert tokenizer.num_calls <= 3 * len(ids)
    assert tokenizer.num_decoded <= 64 * len(ids)


def test_text_that_nobody_asks_for_early_is_decoded_once():
    tokenizer = CountingTokenizer(TOKENIZERS["tiny_qwen3"])
    detokenizer = Detokenizer(tokenizer)
    before = tokenizer.num_calls
    for token_id in range(100):
        detokenizer.append([token_id])
    detokenizer.finish()
    assert tokenizer.num_calls == before + 1
