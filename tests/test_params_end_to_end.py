"""Every request parameter through the engine: equal to transformers, and to itself in any batch."""

import collections
import copy
import functools
import json
import shutil
import struct
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xxhash
from transformers import SequenceBiasLogitsProcessor

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.sample import sample_ref
from nanovllm.outputs import RequestOutput, SampleOutput
from tests.hf_sampling import (
    OutputPenalties,
    assert_logprobs_equal,
    hf_generate,
    hf_logprobs,
    warp,
)
from tests.parity import load_hf

# One process for all: what the tests compare with is then computed once.
pytestmark = pytest.mark.xdist_group("params_end_to_end")

BUNDLED = Path(__file__).parent / "assets" / "tiny-qwen3"
BLOCK = 16
EOS = {"bundled": (2045, 2047), "random": (256, 258)}
NUM_TOKENS = 18


def make_llm(checkpoint, **kwargs):
    settings = dict(kvcache_block_size=BLOCK, max_model_len=256, device="cpu")
    return LLM(str(checkpoint), **{**settings, **kwargs})


@functools.cache
def cached_hf(checkpoint):
    return load_hf(checkpoint, torch.float32)


def chat_ids(tokenizer, question):
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )


def questions():
    return [
        "introduce yourself",
        "list all prime numbers within 100",
        "list all prime numbers within 30",
        *(f"count from {n} to {n + 6}" for n in range(1, 10)),
        *(f"what is {n} plus {n + 3}?" for n in range(1, 13)),
    ]


def varied_prompts(tokenizer):
    """24 of few lengths, as transformers runs those of one length together: chats that are soon
    answered, then stories, which go on."""
    chats = [chat_ids(tokenizer, q) for q in questions()]
    stories = [tokenizer.encode(f"Once upon a time there was a {x}") for x in "abcdefghijklmnop"]
    for prompts in chats, stories:
        most_common = collections.Counter(map(len, prompts)).most_common(1)[0][0]
        prompts.sort(key=lambda prompt: len(prompt) != most_common)
    return [*chats[:10], *stories[:14]]


def cut(token_ids, eos_token_ids):
    """Up to and with the first EOS."""
    ends = [i for i, token in enumerate(token_ids) if token in eos_token_ids]
    return token_ids[: ends[0] + 1] if ends else token_ids


def run(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def tokens_of(outputs):
    return [o["token_ids"] for o in outputs]


@pytest.fixture(scope="class")
def random_checkpoint(tiny_checkpoint):
    return tiny_checkpoint(heads=4, kv_heads=2, head_dim=16, hidden=64)


@pytest.fixture(scope="class", params=["bundled", "random"])
def pair(request, random_checkpoint):
    """An engine and transformers' model over one checkpoint, 24 prompts, their greedy tokens."""
    checkpoint = BUNDLED if request.param == "bundled" else random_checkpoint
    hf, eos = cached_hf(checkpoint), EOS[request.param]
    with make_llm(checkpoint) as llm:
        if request.param == "bundled":
            prompts = varied_prompts(llm.tokenizer)
        else:
            rng = np.random.default_rng(0)
            prompts = [rng.integers(0, 256, (1, 15, 16, 33)[i % 4]).tolist() for i in range(24)]
        endless = hf_generate(hf, prompts, NUM_TOKENS)
        yield SimpleNamespace(
            llm=llm,
            hf=hf,
            eos=eos,
            prompts=prompts,
            tokenizer=llm.tokenizer,
            vocab_size=hf.config.vocab_size,
            endless=endless,
            plain=[cut(ids, eos) for ids in endless],
        )


def common_tokens(pair, num):
    """The tokens that most of the greedy outputs have, no EOS among them."""
    counts = collections.Counter(t for ids in pair.endless for t in set(ids) - set(pair.eos))
    return [token for token, _ in counts.most_common(num)]


def find_words(pair, num_tokens, num_words):
    """Texts of that many tokens which the greedy outputs have, and which no prompt's end begins."""
    counts = collections.Counter()
    for ids in pair.plain:
        for i in range(len(ids) + 1 - num_tokens):
            window = tuple(ids[i : i + num_tokens])
            if set(window) & set(pair.eos):
                continue  # transformers never bans an EOS
            word = pair.tokenizer.decode(window).lstrip()
            sequences = word_sequences(pair.tokenizer, word) if word.isascii() and word else []
            begun = any(p[-k:] == s[:k] for p in pair.prompts for s in sequences for k in (1, 2))
            if list(window) in sequences and not (num_tokens > 1 and begun):
                counts[word] += 1
    assert len(counts) >= num_words
    return [word for word, _ in counts.most_common(num_words)]


def word_sequences(tokenizer, word):
    """As vLLM: the word at the start of a text and after a space."""
    return [tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word}")]


# -- each knob: (what our params have beside temperature=0, what transformers' generate gets) ------


def repetition_more(pair):
    return {"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}


def repetition_less(pair):
    return {"repetition_penalty": 0.3}, {"repetition_penalty": 0.3}


def presence(pair):
    make = functools.partial(OutputPenalties, 1.5, 0)
    return {"presence_penalty": 1.5}, {"make_processor": make}


def frequency(pair):
    make = functools.partial(OutputPenalties, 0, 1.2)
    return {"frequency_penalty": 1.2}, {"make_processor": make}


def presence_and_negative_frequency(pair):
    make = functools.partial(OutputPenalties, 2, -0.5)
    return {"presence_penalty": 2, "frequency_penalty": -0.5}, {"make_processor": make}


def bad_words_of_one_token(pair):
    words = find_words(pair, 1, 4)
    ids = [ids for word in words for ids in word_sequences(pair.tokenizer, word)]
    return {"bad_words": words}, {"bad_words_ids": ids}


def bad_words_of_two_tokens(pair):
    words = find_words(pair, 2, 3)
    ids = [ids for word in words for ids in word_sequences(pair.tokenizer, word)]
    return {"bad_words": words}, {"bad_words_ids": ids}


def bad_words_of_three_tokens(pair):
    words = find_words(pair, 3, 2)
    ids = [ids for word in words for ids in word_sequences(pair.tokenizer, word)]
    return {"bad_words": words}, {"bad_words_ids": ids}


def allowed_token_ids(pair):
    ids = list(range(0, pair.vocab_size, 2))
    return {"allowed_token_ids": ids}, {"prefix_allowed_tokens_fn": lambda row, prefix: ids}


def logit_bias(pair):
    biases = dict.fromkeys(common_tokens(pair, 6), -9.0) | {7: 1.5, pair.eos[0]: 2.0}
    listed = [[[token], bias] for token, bias in biases.items()]
    make = functools.partial(SequenceBiasLogitsProcessor, listed)
    return {"logit_bias": biases}, {"make_processor": make}


def min_tokens(pair):
    return {"min_tokens": 15}, {"min_new_tokens": 15}


def stop_token_ids(pair):
    ids = common_tokens(pair, 8)[::2]
    return {"stop_token_ids": ids}, {"eos_token_ids": (*pair.eos, *ids)}


def min_tokens_and_stop_token_ids(pair):
    ids = common_tokens(pair, 8)[::2]
    theirs = {"eos_token_ids": (*pair.eos, *ids), "min_new_tokens": 9}
    return {"stop_token_ids": ids, "min_tokens": 9}, theirs


def max_tokens(pair):
    return {"max_tokens": 5}, {"num_tokens": 5}


def ignore_eos(pair):
    return {"ignore_eos": True}, {"eos_token_ids": ()}


def ignore_eos_but_stop_token_ids(pair):
    ids = common_tokens(pair, 2)
    return {"ignore_eos": True, "stop_token_ids": ids}, {"eos_token_ids": tuple(ids)}


KNOBS = [
    repetition_more,
    repetition_less,
    presence,
    frequency,
    presence_and_negative_frequency,
    bad_words_of_one_token,
    bad_words_of_two_tokens,
    bad_words_of_three_tokens,
    allowed_token_ids,
    logit_bias,
    min_tokens,
    stop_token_ids,
    min_tokens_and_stop_token_ids,
    max_tokens,
    ignore_eos,
    ignore_eos_but_stop_token_ids,
]
FILTERS = [
    dict(temperature=0.7),
    dict(temperature=1.5, top_k=5),
    dict(temperature=1.3, top_p=0.8),
    dict(temperature=2.0, min_p=0.1),
    dict(temperature=1.7, top_k=20, top_p=0.9),
    dict(temperature=3.0, min_p=0.02, top_k=30, top_p=0.95),
    dict(temperature=1.0, top_k=100_000),
]


class TestEqualToTransformers:
    @pytest.mark.parametrize("knob", KNOBS, ids=lambda f: f.__name__)
    def test_greedy_tokens_with_one_knob(self, knob, pair):
        """24 prompts with it share their steps with 24 plain rows: every token of both equal."""
        ours, theirs = knob(pair)
        settings = dict(num_tokens=NUM_TOKENS, eos_token_ids=pair.eos)
        expected = hf_generate(pair.hf, pair.prompts, **{**settings, **theirs})
        plain = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
        asked = SamplingParams(**{"temperature": 0, "max_tokens": NUM_TOKENS, **ours})
        prompts = [prompt for prompt in pair.prompts for _ in range(2)]
        found = tokens_of(run(pair.llm, prompts, [asked, plain] * len(pair.prompts)))
        assert found[::2] == expected
        assert found[1::2] == pair.plain
        has_effect = expected != pair.plain
        assert has_effect or (pair.vocab_size < 300 and knob in (min_tokens, ignore_eos))

    @pytest.mark.parametrize("filters", FILTERS, ids=lambda f: "-".join(f))
    def test_draws_are_those_of_its_warpers(self, filters, pair):
        """Its logits through its warpers, and then the same draw, give each of our tokens."""
        asked = [
            SamplingParams(**filters, max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed)
            for seed in range(len(pair.prompts))
        ]
        other = SamplingParams(temperature=1, max_tokens=NUM_TOKENS, top_k=3, seed=5)
        params = [p for own in asked for p in (own, other)]
        outputs = run(pair.llm, [p for p in pair.prompts for _ in range(2)], params)[::2]
        num_different = 0
        for prompt, p, output in zip(pair.prompts, asked, outputs, strict=True):
            tokens = torch.tensor(output["token_ids"])
            logits = hf_logprobs(pair.hf, prompt + output["token_ids"])[len(prompt) - 1 : -1]
            warped = warp(logits, p)
            assert warped.gather(1, tokens[:, None]).isfinite().all()
            seeds = torch.full_like(tokens, draw_seed(p.seed))
            positions = torch.arange(len(prompt), len(prompt) + len(tokens))
            drawn = sample_ref(warped, torch.ones(len(tokens)), seeds, positions)
            num_different += int((drawn != tokens).sum())
        print(f"{num_different} of {len(outputs) * NUM_TOKENS} draws differ")
        assert num_different == 0

    @pytest.mark.parametrize("filters", [dict(top_k=1), dict(top_p=1e-9), dict(min_p=1)], ids=str)
    def test_tightest_filter_is_greedy(self, filters, pair):
        params = SamplingParams(temperature=1.5, max_tokens=NUM_TOKENS, seed=3, **filters)
        assert tokens_of(run(pair.llm, pair.prompts, params)) == pair.plain


def draw_seed(seed, sample=0):
    """The key of a sample's random numbers: what a seed means, from one version to the next."""
    key = b"request" + struct.pack("<q", seed) + (struct.pack("<Q", sample) if sample else b"")
    return xxhash.xxh64_intdigest(key) >> 1


# -- 24 requests, each with its own params ---------------------------------------------------------


def mixed_params(vocab_size=2048):
    asked = [
        dict(temperature=0),
        dict(temperature=0, repetition_penalty=1.3),
        dict(seed=1),
        dict(seed=2, top_k=7),
        dict(seed=3, top_p=0.8, temperature=1.4),
        dict(seed=4, min_p=0.05, temperature=1.7, logprobs=0),
        dict(seed=5, top_k=50, top_p=0.9, min_p=0.01, temperature=2.0, logprobs=3),
        dict(temperature=0, presence_penalty=1.5),
        dict(seed=6, frequency_penalty=0.9, repetition_penalty=1.1),
        dict(temperature=0, bad_words=["prime", " are", "3, 5"]),
        dict(seed=7, allowed_token_ids=range(0, vocab_size, 3)),
        dict(temperature=0, logit_bias={5: 4, 6: -100, 300: 2.5}),
        dict(seed=8, min_tokens=20, stop_token_ids=[11, 12, 13], temperature=1.5),
        dict(temperature=0, stop=[", 5", "numbers"], logprobs=1),
        dict(seed=9, stop=["e", "="], include_stop_str_in_output=True, min_tokens=5),
        dict(temperature=0, prompt_logprobs=2, logprobs=5),
        dict(seed=10, n=3, temperature=1.2),
        dict(seed=11, n=2, logprobs=2, prompt_logprobs=0, top_p=0.9, temperature=1.5),
        dict(seed=12, ignore_eos=True, skip_special_tokens=False),
        dict(temperature=0, detokenize=False, prompt_logprobs=1),
        dict(seed=13, structured_outputs={"choice": ["yes", "no", "maybe not"]}),
        dict(seed=14, n=2, structured_outputs={"regex": "[a-c]{3,9}"}, temperature=1.5),
        dict(temperature=0, max_tokens=1, logprobs=4),
        dict(
            seed=-15,
            temperature=1.3,
            top_k=40,
            top_p=0.95,
            min_p=0.01,
            repetition_penalty=1.1,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            min_tokens=4,
            bad_words=["the", "numbers within"],
            logit_bias={40: -5},
            stop=["7"],
            logprobs=2,
            n=2,
        ),
    ]
    return [SamplingParams(**{"max_tokens": 20, **a}) for a in asked]


def mixed_prompts(tokenizer):
    """Short ones, and each third one longer than a chunk of 48 tokens."""
    rng = np.random.default_rng(5)
    return [
        (rng.integers(0, 2045, 40 + i).tolist() if i % 3 == 0 else []) + chat_ids(tokenizer, q)
        for i, q in enumerate(questions())
    ]


@pytest.fixture(scope="module")
def alone():
    """The prompts, and what each of them gives as the only request of a cold engine."""
    with make_llm(BUNDLED) as llm:
        prompts, outputs = mixed_prompts(llm.tokenizer), []
        for prompt, params in zip(prompts, mixed_params(), strict=True):
            llm.scheduler.reset()
            outputs += run(llm, [prompt], params)
    return prompts, outputs


def assert_same(output, expected, tolerance=1e-5):
    assert output["prompt_token_ids"] == expected["prompt_token_ids"]
    assert output["error"] is None is expected["error"]
    assert_same_logprobs(output["prompt_logprobs"], expected["prompt_logprobs"], tolerance)
    for found, wanted in zip(output["outputs"], expected["outputs"], strict=True):
        for key in ("token_ids", "text", "finish_reason", "stop_reason"):
            assert found[key] == wanted[key], key
        assert_same_logprobs(found["logprobs"], wanted["logprobs"], tolerance)


def assert_same_logprobs(found, wanted, tolerance):
    assert (found is None) == (wanted is None)
    for ours, theirs in zip(found or (), wanted or (), strict=True):
        assert (ours is None) == (theirs is None)
        assert list(ours or ()) == list(theirs or ())
        for token, entry in (ours or {}).items():
            assert entry[1:] == theirs[token][1:]
            assert entry.logprob == pytest.approx(
                theirs[token].logprob, rel=tolerance, abs=tolerance
            )


MIXED = {
    "one_batch": {},
    "chunks": dict(max_num_batched_tokens=48),
    "no_overlap": dict(overlap=False),
    "small_pool": dict(num_kvcache_blocks=10),
    "small_pool_chunks_no_overlap": dict(
        num_kvcache_blocks=9, max_num_batched_tokens=20, overlap=False
    ),
    "three_rows": dict(max_num_seqs=3),
    "blocks_of_5": dict(kvcache_block_size=5, num_kvcache_blocks=60),
}


class TestMixedBatch:
    @pytest.mark.parametrize("kind", MIXED)
    def test_each_request_equals_itself_alone(self, kind, alone):
        prompts, expected = alone
        with make_llm(BUNDLED, **MIXED[kind]) as llm:
            for _ in range(2 if kind == "one_batch" else 1):  # then with a warm prefix cache
                outputs = run(llm, prompts, mixed_params())
                for output, wanted in zip(outputs, expected, strict=True):
                    assert_same(output, wanted)
            assert "pool" not in kind or llm.scheduler.num_preemptions > 0
            assert llm.scheduler.block_manager.num_free_blocks == llm.scheduler.num_blocks

    def test_two_ranks_equal_one(self, alone):
        prompts, expected = alone
        params = mixed_params()
        picked = [1, 4, 6, 8, 9, 13, 15, 17, 21, 23]
        with make_llm(BUNDLED, tensor_parallel_size=2) as llm:
            outputs = run(llm, [prompts[i] for i in picked], [params[i] for i in picked])
        for i, output in zip(picked, outputs, strict=True):
            assert_same(output, expected[i], tolerance=1e-4)

    def test_reversed_order(self, alone):
        prompts, expected = alone
        with make_llm(BUNDLED, max_num_seqs=5) as llm:
            outputs = run(llm, prompts[::-1], mixed_params()[::-1])
        for output, wanted in zip(outputs[::-1], expected, strict=True):
            assert_same(output, wanted)


# -- seeds and n > 1 -------------------------------------------------------------------------------


@pytest.fixture(scope="class")
def llm(random_checkpoint):
    with make_llm(random_checkpoint) as llm:
        yield llm


def random_prompt(num_tokens, seed=0):
    return np.random.default_rng(seed).integers(0, 256, num_tokens).tolist()


def record_prefills(llm, monkeypatch):
    """Tokens computed in each prefill from now on."""
    counts, launch = [], llm._runner.launch

    def record(batch):
        if batch.is_prefill:
            counts.append(int(batch.num_scheduled_tokens.sum()))
        return launch(batch)

    monkeypatch.setattr(llm._runner, "launch", record)
    return counts


class TestSeedsAndSamples:
    def test_same_seed_same_tokens_in_any_batch(self, llm):
        prompts = [random_prompt(3 + 7 * i, i) for i in range(9)]
        kinds = [{}, {"top_k": 9}, {"top_p": 0.7, "logprobs": 1}]
        params = [SamplingParams(seed=i, max_tokens=12, **kinds[i % 3]) for i in range(9)]
        alone = [run(llm, [p], x)[0]["token_ids"] for p, x in zip(prompts, params, strict=True)]
        assert tokens_of(run(llm, prompts, params)) == alone
        assert tokens_of(run(llm, prompts[::-1], params[::-1])) == alone[::-1]
        with_others = run(llm, prompts[:4] + prompts[:4], params[:4] + [SamplingParams()] * 4)
        assert tokens_of(with_others)[:4] == alone[:4]

    def test_different_seeds_differ(self, llm):
        seeds = [0, 1, 2, 3, -2, 2**63 - 1, -(2**63)]
        params = [SamplingParams(seed=s, max_tokens=16, ignore_eos=True) for s in seeds]
        tokens = tokens_of(run(llm, [random_prompt(9)] * len(seeds), params))
        assert len(set(map(tuple, tokens))) == len(seeds)

    def test_no_seed_differs_from_one_request_to_the_next(self, llm):
        params = SamplingParams(temperature=10, max_tokens=16, ignore_eos=True)
        tokens = tokens_of(run(llm, [random_prompt(9)] * 6, params))
        assert len(set(map(tuple, tokens))) == 6

    @pytest.mark.parametrize("num_tokens", [1, BLOCK, 40, 3 * BLOCK])
    def test_samples_are_the_same_of_any_n_cached_or_not(self, num_tokens, llm):
        prompt = random_prompt(num_tokens, 3)
        found = {}
        for n in (8, 4, 1):
            params = SamplingParams(seed=77, n=n, max_tokens=20, ignore_eos=True)
            llm.scheduler.reset()
            for _ in range(2):
                (output,) = run(llm, [prompt], params)
                samples = tokens_of(output["outputs"])
                assert found.setdefault(n, samples) == samples
            assert output["token_ids"] == samples[0]
        assert found[8][:4] == found[4] and found[4][:1] == found[1]
        assert len(set(map(tuple, found[8]))) == 8

    @pytest.mark.parametrize("budget", [16384, 24])
    @pytest.mark.parametrize("num_tokens", [5, 3 * BLOCK, 6 * BLOCK + 4])
    def test_samples_share_the_blocks_of_the_prompt(
        self, num_tokens, budget, random_checkpoint, monkeypatch
    ):
        """One copy of the prompt, and for each other sample what its last block needs."""
        prompt, n = random_prompt(num_tokens, 4), 5
        num_shared = (num_tokens - 1) // BLOCK * BLOCK
        params = SamplingParams(seed=1, n=n, max_tokens=12, ignore_eos=True)
        with make_llm(random_checkpoint, max_num_batched_tokens=budget) as llm:
            counts = record_prefills(llm, monkeypatch)
            (cold,) = run(llm, [prompt], params)
            assert sum(counts) == num_tokens + (n - 1) * (num_tokens - num_shared)
            assert cold["num_cached_tokens"] == 0
            counts.clear()
            (warm,) = run(llm, [prompt], params)
            assert sum(counts) == n * (num_tokens - num_shared)
            assert warm["num_cached_tokens"] == num_shared
            assert warm["outputs"] == cold["outputs"]
            manager = llm.scheduler.block_manager
            assert manager.num_free_blocks == llm.scheduler.num_blocks

    def test_samples_of_one_token(self, llm):
        """The first one has ended before the others start."""
        asked = dict(seed=5, n=6, ignore_eos=True)
        (longer,) = run(llm, [random_prompt(50)], SamplingParams(**asked, max_tokens=9))
        (output,) = run(llm, [random_prompt(50)], SamplingParams(**asked, max_tokens=1))
        assert tokens_of(output["outputs"]) == [ids[:1] for ids in tokens_of(longer["outputs"])]

    def test_more_samples_than_rows_or_blocks(self, llm, random_checkpoint):
        prompts = [random_prompt(n, n) for n in (30, 7, 50)]
        params = [SamplingParams(seed=i, n=10, max_tokens=20, ignore_eos=True) for i in range(3)]
        expected = [o["outputs"] for o in run(llm, prompts, params)]
        with make_llm(random_checkpoint, max_num_seqs=4, num_kvcache_blocks=9) as small:
            outputs = run(small, prompts, params)
            assert small.scheduler.num_preemptions > 0
            assert small.scheduler.block_manager.num_free_blocks == 9
        assert [o["outputs"] for o in outputs] == expected


# -- log-probabilities -----------------------------------------------------------------------------

ENGINES = {
    "plain": {},
    "chunks": dict(max_num_batched_tokens=37),
    "small_pool": dict(num_kvcache_blocks=48),
}


class TestLogprobs:
    @pytest.mark.parametrize("kind", ENGINES)
    def test_equal_transformers(self, kind, random_checkpoint):
        """All prompts, some of several chunks, twice: with a cold prefix cache and a warm one."""
        hf = cached_hf(random_checkpoint)
        prompts = [random_prompt(n, n) for n in (1, 15, 16, 17, 64, 100, 700)] * 2
        numbers = [(0, None), (5, 0), (None, 3), (20, 20), (3, 1), (1, 100), (2, 2)]
        params = [
            SamplingParams(
                seed=i,
                temperature=(0.0, 1.3)[i >= 7],
                n=(1, 3)[i >= 7],
                top_k=3,
                repetition_penalty=1.2,
                max_tokens=12,
                ignore_eos=True,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
            for i, (logprobs, prompt_logprobs) in enumerate(numbers * 2)
        ]
        with make_llm(random_checkpoint, max_model_len=800, **ENGINES[kind]) as llm:
            for _ in range(2):
                for output, p in zip(run(llm, prompts, params), params, strict=True):
                    self.check(output, p, hf, llm.tokenizer)
            assert llm.scheduler.num_preemptions > 0 or kind != "small_pool"

    def check(self, output, params, hf, tokenizer):
        prompt = output["prompt_token_ids"]
        rows = hf_logprobs(hf, prompt)
        found = output["prompt_logprobs"]
        if params.prompt_logprobs is None:
            assert found is None
        else:
            assert found[0] is None and len(found) == len(prompt)
            k = params.prompt_logprobs
            assert_logprobs_equal(found[1:], prompt[1:], rows[:-1], k, tokenizer)
            assert output["num_cached_tokens"] == 0
        assert len(output["outputs"]) == params.n
        for sample in output["outputs"]:
            tokens = sample["token_ids"]
            assert len(tokens) == 12
            if params.logprobs is None:
                assert sample["logprobs"] is None
            else:
                rows = hf_logprobs(hf, prompt + tokens)[len(prompt) - 1 : -1]
                k = params.logprobs
                assert_logprobs_equal(sample["logprobs"], tokens, rows, k, tokenizer)

    def test_prompt_logprobs_of_a_prompt_that_is_cached(self, llm):
        """The cache spares computing what they are made of, so such a prompt is computed again."""
        prompt = random_prompt(70, 8)
        plain = SamplingParams(temperature=0, max_tokens=3)
        asked = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
        (cold,) = run(llm, [prompt], asked)
        (warm,) = run(llm, [prompt], plain)
        assert warm["num_cached_tokens"] == 64 and warm["prompt_logprobs"] is None
        for _ in range(2):
            (again,) = run(llm, [prompt], asked)
            assert_same(again, cold)
            assert again["num_cached_tokens"] == 0


# -- results ---------------------------------------------------------------------------------------


@pytest.fixture(scope="class")
def bundled_llm():
    with make_llm(BUNDLED) as llm:
        yield llm


def greedy(**kwargs):
    return SamplingParams(**{"temperature": 0, "max_tokens": 64, **kwargs})


class TestResults:
    def test_every_key_and_its_type(self, bundled_llm):
        prompts = mixed_prompts(bundled_llm.tokenizer)
        start = time.perf_counter()
        outputs = run(bundled_llm, prompts, mixed_params())
        wall_time = time.perf_counter() - start
        for output, prompt, params in zip(outputs, prompts, mixed_params(), strict=True):
            assert type(output) is dict and set(output) == RequestOutput.__required_keys__
            assert output["prompt_token_ids"] == prompt
            assert type(output["num_cached_tokens"]) is int and output["error"] is None
            assert len(output["outputs"]) == params.n
            assert (output["prompt_logprobs"] is None) == (params.prompt_logprobs is None)
            for sample in output["outputs"]:
                assert type(sample) is dict and set(sample) == SampleOutput.__required_keys__
                assert type(sample["text"]) is str
                assert {type(token) for token in sample["token_ids"]} == {int}
                assert sample["finish_reason"] in ("stop", "length")
                assert type(sample["stop_reason"]) in (int, str, type(None))
                assert (sample["logprobs"] is None) == (params.logprobs is None)
                for entries in sample["logprobs"] or ():
                    for token, (logprob, rank, text) in entries.items():
                        types = [type(x) for x in (token, logprob, rank, text)]
                        assert types == [int, float, int, str]
            assert all(output[key] == output["outputs"][0][key] for key in output["outputs"][0])
            metrics = dict(output["metrics"])
            rate = metrics.pop("tokens_per_second")
            assert all(type(seconds) is float and seconds >= 0 for seconds in metrics.values())
            assert set(metrics) == {"queue", "prefill", "decode"}
            assert sum(metrics.values()) <= wall_time
            num_tokens = sum(len(sample["token_ids"]) for sample in output["outputs"])
            seconds = metrics["prefill"] + metrics["decode"]
            assert rate == pytest.approx(num_tokens / seconds)
        json.dumps(outputs)

    def test_queue_time_of_those_that_wait(self, bundled_llm):
        """With one row the last request waits for all the others."""
        prompts = [chat_ids(bundled_llm.tokenizer, q) for q in questions()[:3]]
        with make_llm(BUNDLED, max_num_seqs=1) as llm:
            metrics = [o["metrics"] for o in run(llm, prompts, greedy(max_tokens=16))]
        busy = [m["prefill"] + m["decode"] for m in metrics]
        # Not all of them have been made at the start: as many as rows, and one, wait at a time.
        assert metrics[1]["queue"] >= 0.9 * busy[0]
        assert all(m["queue"] > 0 for m in metrics)

    def test_ends_by_eos(self, bundled_llm):
        prompt = chat_ids(bundled_llm.tokenizer, "what is 3 plus 6?")
        (output,) = run(bundled_llm, [prompt], greedy())
        num_tokens = len(output["token_ids"])
        assert (output["finish_reason"], output["stop_reason"]) == ("stop", None)
        assert output["token_ids"][-1] == 2047 and output["text"] == "3 + 6 = 9"
        # With the last token that it may have it is still an EOS that ends it.
        (last,) = run(bundled_llm, [prompt], greedy(max_tokens=num_tokens))
        assert (last["finish_reason"], last["token_ids"]) == ("stop", output["token_ids"])
        (cut,) = run(bundled_llm, [prompt], greedy(max_tokens=num_tokens - 1))
        assert (cut["finish_reason"], cut["stop_reason"]) == ("length", None)
        assert cut["token_ids"] == output["token_ids"][:-1] and cut["text"] == output["text"]

    @pytest.mark.parametrize("overlap, keep", [(True, False), (True, True), (False, False)])
    def test_ends_by_a_stop_string(self, overlap, keep):
        with make_llm(BUNDLED, overlap=overlap) as llm:
            prompt = chat_ids(llm.tokenizer, "list all prime numbers within 100")
            (whole,) = run(llm, [prompt], greedy(max_tokens=40))
            stop = ["13, 1", "11,", "never"]
            asked = greedy(max_tokens=40, stop=stop, include_stop_str_in_output=keep)
            (output,) = run(llm, [prompt], asked)
            before = whole["text"][: whole["text"].index("11,")]
            assert output["text"] == before + ("11," if keep else "")
            assert (output["finish_reason"], output["stop_reason"]) == ("stop", "11,")
            num_tokens = len(output["token_ids"])
            assert output["token_ids"] == whole["token_ids"][:num_tokens]
            # Found in the last token there may be, and in none of those before it.
            asked = greedy(max_tokens=num_tokens, stop=stop, include_stop_str_in_output=keep)
            assert_same(run(llm, [prompt], asked)[0], output)
            asked = greedy(max_tokens=num_tokens - 1, stop=stop)
            (cut,) = run(llm, [prompt], asked)
            assert (cut["finish_reason"], cut["stop_reason"]) == ("length", None)
            assert llm.scheduler.block_manager.num_free_blocks == llm.scheduler.num_blocks

    def test_ends_by_a_stop_token_id(self, bundled_llm):
        decode = bundled_llm.tokenizer.decode
        prompt = chat_ids(bundled_llm.tokenizer, "list all prime numbers within 100")
        (whole,) = run(bundled_llm, [prompt], greedy())
        token = whole["token_ids"][9]
        end = whole["token_ids"].index(token) + 1
        for keep in (False, True):
            asked = greedy(stop_token_ids=[5, token], include_stop_str_in_output=keep)
            for extra in ({}, {"stop": ["never there"]}):
                params = SamplingParams(**{**as_kwargs(asked), **extra})
                (output,) = run(bundled_llm, [prompt], params)
                assert output["token_ids"] == whole["token_ids"][:end]
                assert (output["finish_reason"], output["stop_reason"]) == ("stop", token)
                assert output["text"] == decode(whole["token_ids"][: end - (not keep)])

    def test_ends_by_the_longest_sequence(self):
        with make_llm(BUNDLED, max_model_len=30) as llm:
            prompt = chat_ids(llm.tokenizer, "list all prime numbers within 100")
            (output,) = run(llm, [prompt], greedy(max_tokens=None))
        assert (output["finish_reason"], output["stop_reason"]) == ("length", None)
        assert len(prompt) + len(output["token_ids"]) == 30

    def test_text_of_special_tokens(self, bundled_llm):
        prompt = chat_ids(bundled_llm.tokenizer, "what is 3 plus 6?")
        shown = greedy(skip_special_tokens=False, ignore_eos=True, max_tokens=12)
        hidden = greedy(ignore_eos=True, max_tokens=12)
        with_stop = greedy(
            skip_special_tokens=False, ignore_eos=True, max_tokens=12, stop=["never there"]
        )
        a, b, c = run(bundled_llm, [prompt] * 3, [shown, hidden, with_stop])
        assert a["token_ids"] == b["token_ids"] == c["token_ids"]
        assert a["text"] == c["text"] == bundled_llm.tokenizer.decode(a["token_ids"])
        assert "<|im_end|>" in a["text"] and "<|im_end|>" not in b["text"]

    def test_stop_string_that_is_a_special_token(self, bundled_llm):
        """It is seen only where special tokens are part of the text."""
        prompt = chat_ids(bundled_llm.tokenizer, "what is 3 plus 6?")
        asked = dict(stop="<|im_end|>", ignore_eos=True, max_tokens=12)
        seen, unseen = run(
            bundled_llm, [prompt] * 2, [greedy(skip_special_tokens=False, **asked), greedy(**asked)]
        )
        assert (seen["stop_reason"], seen["text"]) == ("<|im_end|>", "3 + 6 = 9")
        assert (unseen["stop_reason"], unseen["finish_reason"]) == (None, "length")

    def test_without_detokenizing(self, bundled_llm):
        prompt = chat_ids(bundled_llm.tokenizer, "what is 3 plus 6?")
        bare, full = run(bundled_llm, [prompt] * 2, [greedy(detokenize=False), greedy()])
        assert bare["text"] == "" and bare["token_ids"] == full["token_ids"]

    def test_params_are_the_same_objects_with_the_same_values_afterwards(self, bundled_llm):
        params = mixed_params()
        before, hashes = copy.deepcopy(params), [hash(p) for p in params]
        texts = [repr(p) for p in params]
        run(bundled_llm, mixed_prompts(bundled_llm.tokenizer), params)
        assert params == before
        assert [hash(p) for p in params] == hashes == [hash(p) for p in before]
        assert [repr(p) for p in params] == texts


def as_kwargs(params):
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


# -- chat and defaults -----------------------------------------------------------------------------


class TestChat:
    CONVERSATIONS = [
        [{"role": "user", "content": "what is 3 plus 6?"}],
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "count from 3 to 9"},
            {"role": "assistant", "content": "3, 4, 5, 6, 7, 8, 9."},
            {"role": "user", "content": "introduce yourself"},
        ],
    ]

    def test_equals_generate_of_the_template_s_ids(self, bundled_llm):
        template = bundled_llm.tokenizer.apply_chat_template
        for add in (True, False):
            prompts = [
                template(c, tokenize=True, add_generation_prompt=add, return_dict=False)
                for c in self.CONVERSATIONS
            ]
            params = [greedy(), greedy(max_tokens=20, logprobs=1)]
            expected = run(bundled_llm, prompts, params)
            outputs = bundled_llm.chat(
                self.CONVERSATIONS, params, use_tqdm=False, add_generation_prompt=add
            )
            for output, wanted in zip(outputs, expected, strict=True):
                assert_same(output, wanted)
            (one,) = bundled_llm.chat(
                self.CONVERSATIONS[0], params[0], use_tqdm=False, add_generation_prompt=add
            )
            assert_same(one, expected[0])

    def test_template_and_its_variables_pass_through(self, bundled_llm):
        template = (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if enable_thinking %}<think>{% else %}{{ ending }}{% endif %}"
        )
        conversation = self.CONVERSATIONS[1]
        for variables in ({"enable_thinking": True}, {"enable_thinking": False, "ending": "so:"}):
            (output,) = bundled_llm.chat(
                conversation,
                greedy(max_tokens=4),
                use_tqdm=False,
                chat_template=template,
                chat_template_kwargs=variables,
            )
            assert output["prompt_token_ids"] == bundled_llm.tokenizer.apply_chat_template(
                conversation,
                chat_template=template,
                tokenize=True,
                add_generation_prompt=True,
                return_dict=False,
                **variables,
            )

    def test_default_params_are_those_of_the_checkpoint(
        self, bundled_llm, random_checkpoint, tmp_path
    ):
        assert bundled_llm.get_default_sampling_params() == SamplingParams(temperature=0.6)
        folder = shutil.copytree(random_checkpoint, tmp_path / "checkpoint")
        listed = dict(temperature=0.7, top_k=20, top_p=0.8, min_p=0.1, repetition_penalty=1.05)
        config = {"eos_token_id": [258, 256], "do_sample": True, **listed}
        (folder / "generation_config.json").write_text(json.dumps(config))
        with make_llm(folder) as llm:
            assert llm.get_default_sampling_params() == SamplingParams(**listed)
        (folder / "generation_config.json").unlink()
        with make_llm(folder) as llm:
            assert llm.get_default_sampling_params() == SamplingParams()
