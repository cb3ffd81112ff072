"""Whatever a checkpoint's files hold, they load or are refused by a ValueError that names the file.

Weights, tokenizers and configs (reliability.md R4), each case drawn from its own seed: the number
in a failure gives the case again. By default 6,000 + 3,000 + 3,000 cases, about 45 s on one core;
FUZZ_FILES=20000 makes it 20,000 + 20,000 + 10,000. Below them, each bug that was found by name.

Not refused, on purpose: NaN weights, as in vLLM (a request that meets one ends with "error");
symbolic links out of the folder, which is how the hub's cache stores every file.
"""

import copy
import itertools
import json
import os
import random
import resource
import shutil
import struct
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config, load_hf_config
from nanovllm.engine.checks import check_backend, check_model
from nanovllm.engine.params import default_sampling_params
from nanovllm.engine.prompts import PromptReader, find_eos_token_ids, load_tokenizer
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils import loader, weight_files
from nanovllm.utils.loader import ModelLoadError, check_checkpoint, load_model
from tests.conftest import write_checkpoint

VOLUME = int(os.environ.get("FUZZ_FILES", 0))
NUM_WEIGHTS, NUM_TOKENIZERS, NUM_CONFIGS = (
    (VOLUME, VOLUME, VOLUME // 2) if VOLUME else (6000, 3000, 3000)
)
SHARDS = range(4)
MAX_SECONDS = 5  # of the processor, so that a busy machine does not fail the test
MAX_GROWTH = 200 * 2**20  # bytes, beside twice the files, which are tiny

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TINY = {"heads": 2, "kv_heads": 1, "head_dim": 4, "hidden": 8, "intermediate": 12, "layers": 1}
CPU = Config("m", device="cpu")

NAN, INF = float("nan"), float("inf")
EVIL = [
    *(None, True, False, 0, 1, -1, 2, 3, 100, 2**31, 2**63, 10**12, -(10**30), 0.5, 1e-300, 1e308),
    *(NAN, INF, -INF, "", "x", "8", "\ud800", "\x00", "x" * 10_000, [], [None], [[]], [1, "a"]),
    *({}, {"a": 1}, {"rope_type": "yarn"}, {"": {}}, [-1, 10**9], "@deep@", "@digits@", "@1e999@"),
]
DEPTHS = (50, 800, 950, 980, 100_000)


def dump(value, rng):
    """JSON text, with what json.dumps cannot write put in by hand."""
    text = json.dumps(value)
    depth = rng.choice(DEPTHS)
    text = text.replace('"@deep@"', "[" * depth + "]" * depth)
    text = text.replace('"@digits@"', "1" * 5000).replace('"@1e999@"', "1e999")
    return text.encode()


def nodes(tree):
    """Every (container, key) of a JSON tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(items):
        yield tree, key
        if isinstance(value, (dict, list)):
            yield from nodes(value)


def edit_json(data, rng, evil=EVIL):
    """The document with some values replaced, removed, swapped or given twice."""
    tree = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        # A level at random first, as most nodes are tokens of the vocabulary.
        places, here = [], tree
        while isinstance(here, (dict, list)) and here:
            key = rng.choice(list(here) if isinstance(here, dict) else range(len(here)))
            places.append((here, key))
            here = here[key]
        if not places:
            break
        parent, key = rng.choice(places)
        action = rng.randrange(6)
        if action == 0:
            del parent[key]
        elif action == 1:
            other, name = rng.choice(list(nodes(tree)))
            parent[key] = json.loads(json.dumps(other[name]))
        elif action == 2 and isinstance(parent, dict):
            parent[rng.choice(("", "x", "\ud800", "num_labels", "auto_map", "type"))] = parent[key]
        else:
            parent[key] = copy.deepcopy(rng.choice(evil))  # which a later edit may change
    data = dump(tree, rng)
    if rng.random() < 0.1 and isinstance(tree, dict) and tree:
        key = json.dumps(rng.choice(list(tree)))
        again = f"{key}: ".encode() + dump(rng.choice(evil), rng)
        data = b"{" + again + b", " + data[1:] if rng.random() < 0.5 else data[:-1] + b", " + again
        data = data if data.endswith(b"}") else data + b"}"
    return data


def damage(data, rng):
    """Bytes flipped, cut off, added or moved, more often near the start."""
    data = bytearray(data)
    action = rng.randrange(6)
    if action == 0:
        return bytes(data[: rng.randrange(len(data) + 1)])
    if action == 1:
        return bytes(data) + rng.randbytes(rng.choice((1, 8, 1000)))
    if action == 2:
        at = rng.randrange(len(data) + 1)
        return bytes(data[:at] + rng.choice((b"\xff\xfe", b"\x00", b"[", b'"', b"9")) + data[at:])
    for _ in range(rng.choice((1, 1, 2, 8))):
        if data:
            at = rng.randrange(min(len(data), rng.choice((8, 200, len(data)))))
            data[at] = rng.choice((rng.randrange(256), data[at] ^ 1 << rng.randrange(8)))
    return bytes(data)


def write(folder, files):
    """The folder holds these and nothing else; a function makes what is no plain file."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for name, content in files.items():
        if callable(content):
            content(folder / name)
        else:
            (folder / name).write_bytes(content)


def fuzz(kind, shard, num_cases, case):
    """Run case(rng), which returns what came of it, for this shard's share of the cases.

    What it raises is a failure, and so are long times and large memory.
    """
    counts: Counter[str] = Counter()
    slowest = 0.0
    case(random.Random(0))  # imports and first-time work
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(shard, num_cases, len(SHARDS)):
        start = time.process_time()
        try:
            counts[case(random.Random(f"{kind} {i}"))] += 1
        except BaseException as error:
            error.add_note(f"{kind} case {i}")
            raise
        seconds = time.process_time() - start
        slowest = max(slowest, seconds)
        assert seconds < MAX_SECONDS, f"{kind} case {i}"
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    print(f"{kind}: {dict(counts)}, slowest {slowest:.2f} s, memory +{growth / 2**20:.0f} MiB")
    assert growth < MAX_GROWTH
    return counts


# -- weights ---------------------------------------------------------------------------------------


def pack(header, body):
    return struct.pack("<Q", len(header)) + header + body


def edit_header(data, rng):
    """A header with a wrong type, shape, offset, name or length before the same data."""
    length = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = list(header)
    name, other = rng.choice(names), rng.choice(names)
    action = rng.randrange(9)
    if action == 0:
        header[name]["dtype"] = rng.choice(("F64", "BF16", "I8", "F8_E4M3", "F4", "C64", *EVIL))
    elif action == 1:
        shape = [2**32, 2**32], [2**63], [0], [0, 2**62], [-1], [1] * 100, [8.0], []
        header[name]["shape"] = rng.choice((*shape, *EVIL))
    elif action == 2:
        offsets = [0, 2**63], [2**64 - 1, 2**64 - 1], [8, 0], [0, len(body) + 1], [-1, 8], [0]
        header[name]["data_offsets"] = rng.choice((*offsets, *EVIL))
    elif action == 3:
        header[name] = header[other]
    elif action == 4:
        header["__metadata__"] = rng.choice(EVIL)
    elif action == 5:
        return edit_json(data[8 : 8 + length], rng)
    text = dump(header, rng)
    if action == 6:  # the same name twice in the text
        text = text.replace(json.dumps(name).encode(), json.dumps(other).encode())
    if action == 7:
        wrong = 0, 1, length - 1, length + 1, 10**8, 10**8 + 1, 2**31, 2**63, 2**64 - 1
        return struct.pack("<Q", rng.choice(wrong)) + text + body
    if action == 8:
        return pack(edit_json(text, rng), body)
    return pack(text, body)


def edit_tensors(data, rng):
    """A sound file of other tensors: missing, extra, of another shape or type, NaN."""
    tensors = load(data)
    name, other = rng.choice(list(tensors)), rng.choice(list(tensors))
    action = rng.randrange(8)
    if action == 0:
        del tensors[name]
    elif action == 1:
        extra = "model.layers.9.mlp.up_proj.weight", "x", "", "lm_head.weight", "é" * 200
        tensors[rng.choice(extra)] = torch.randn(rng.choice(((), (0,), (3,), (259, 8))))
    elif action == 2:
        tensors[name] = torch.zeros(rng.choice(((), (0,), (8,), (259, 9), (4, 4, 4))))
    elif action == 3:
        tensors[name] = tensors[other].clone()
    elif action == 4:
        tensors[name] = (
            tensors[name].t().contiguous() if tensors[name].dim() == 2 else tensors[name]
        )
    elif action == 5:
        tensors[name].fill_(rng.choice((NAN, INF, -INF, 3e38)))
    else:
        types = torch.int8, torch.bool, torch.float64, torch.bfloat16, torch.float8_e4m3fn
        tensors[name] = tensors[name].to(rng.choice((*types, torch.complex64)))
    return save(tensors)


FILE_NAMES = [
    *("../a.safetensors", "/etc/passwd", "..", ".", "", "a\\b", "x/a.safetensors", "x" * 300),
    *("a\x00.safetensors", "\ud800", "none.safetensors", INDEX, 7, None, [], ["a"], {}, 1.5, True),
]


def edit_index(data, rng):
    index = json.loads(data)
    names = list(index["weight_map"])
    action = rng.randrange(5)
    if action == 0:
        index["weight_map"][rng.choice(names)] = rng.choice(FILE_NAMES)
    elif action == 1:
        index["weight_map"] = rng.choice([*EVIL, names, dict.fromkeys(names, "a.safetensors")])
    elif action == 2:
        return dump(rng.choice((*EVIL, [index], {"weight_map": "@deep@"})), rng)
    else:
        return edit_json(data, rng)
    return dump(index, rng)


def no_plain_file(outside, rng):
    """Something else under a file's name: a link that leads out, nowhere or to itself, a pipe."""
    return rng.choice(
        (
            lambda path: path.symlink_to(outside),
            lambda path: path.symlink_to(outside.parent / "missing"),
            lambda path: path.symlink_to(path),
            lambda path: path.symlink_to(outside.parent),
            lambda path: path.mkdir(),
            os.mkfifo,
        )
    )


class Weights:
    """A tiny checkpoint as one file and as two with an index, to be damaged and loaded."""

    def __init__(self, folder, base):
        self.folder = folder
        self.outside = base / SINGLE
        self.hf_config = load_hf_config(base)
        single = self.outside.read_bytes()
        tensors = load(single)
        names = sorted(tensors)
        parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
        weight_map = {name: file for file, part in parts.items() for name in part}
        index = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
        shards = {file: save({n: tensors[n] for n in part}) for file, part in parts.items()}
        self.bases = [{SINGLE: single}, {**shards, INDEX: index}]
        with torch.device("meta"):
            self.skeleton = Qwen3ForCausalLM(self.hf_config)
        self.model = Qwen3ForCausalLM(self.hf_config)

    def case(self, rng):
        files = dict(rng.choice(self.bases))
        for _ in range(rng.choice((1, 1, 1, 2))):
            name = rng.choice([name for name, content in files.items() if not callable(content)])
            action = rng.randrange(20)
            if action == 0:
                files[name] = no_plain_file(self.outside, rng)
                break
            elif action == 1:
                del files[name]
                break
            elif action == 2:
                files[rng.choice((SINGLE, "a.safetensors", "c.safetensors"))] = files[name]
                break
            elif action < 8:
                files[name] = damage(files[name], rng)
                break
            elif name == INDEX:
                files[name] = edit_index(files[name], rng)
                break
            else:
                edit = rng.choice((edit_header, edit_tensors))
                files[name] = edit(files[name], rng)
                if edit is edit_header:
                    break
        write(self.folder, files)
        try:
            check_checkpoint(self.skeleton, self.folder)
            load_model(self.model, self.folder, torch.device("cpu"))
        except ModelLoadError as error:
            assert str(self.folder) in str(error) or ".safetensors" in str(error)
            return "refused"
        if self.model.lm_head.weight is not self.model.model.embed_tokens.weight:
            self.model = Qwen3ForCausalLM(self.hf_config)
        return "loaded"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint small enough to be loaded thousands of times."""
    folder = tmp_path_factory.mktemp("base")
    write_checkpoint(folder, **TINY)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("shard", SHARDS)
def test_damaged_weights_load_or_are_refused(shard, base, tmp_path, monkeypatch):
    """By the CPU's way of reading them and, in turn, by the GPU's."""
    readers = itertools.cycle((weight_files.read_tensors, weight_files.read_ahead))
    monkeypatch.setattr(loader, "read_tensors", lambda *args: next(readers)(*args))
    counts = fuzz("weights", shard, NUM_WEIGHTS, Weights(tmp_path, base).case)
    assert min(counts["refused"], counts["loaded"]) > 0


# -- tokenizers ------------------------------------------------------------------------------------

TEXTS = ["Hello, wörld 東京 <|im_end|>\n 12 'll", "<|im_start|>", " a\u0300\U0001f600"]
PARTS = [
    {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Removed", "invert": True},
    {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
    {"type": "Replace", "pattern": {"String": ""}, "content": "xx"},
    {"type": "Replace", "pattern": {"Regex": "$|^"}, "content": "東"},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="},
    {"type": "Sequence", "pretokenizers": []},
    {"type": "Metaspace", "replacement": "__", "prepend_scheme": "always", "split": True},
    {"type": "FixedLength", "length": 0},
    {"type": "Digits", "individual_digits": True},
    {"type": "Strip", "strip_left": True, "strip_right": True, "content": "a", "start": -1},
    {"type": "Prepend", "prepend": ""},
    {"type": "ByteFallback"},
    {"type": "NFKC"},
    {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "?", "type_id": 0}}]},
    {"type": "BPE", "vocab": {"a": 10**9, "b": 1}, "merges": [["a", "b"]]},
    {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 7}, "merges": ["a b", "b a"], "dropout": 2.0},
    {"type": "WordLevel", "vocab": {"Hello": 2**32 - 1}, "unk_token": "none"},
    {"type": "WordPiece", "vocab": {"H": 5}, "unk_token": "?", "max_input_chars_per_word": 0},
    {"type": "Unigram", "vocab": [["a", NAN], ["b", INF]], "unk_id": 9, "byte_fallback": True},
    {"type": "Unigram", "vocab": [["a", -1.0], ["", 0.0]], "unk_id": 0},
    {"type": "Unigram", "vocab": [], "unk_id": None},
    {"id": 2**32 - 1, "content": "", "special": True, "normalized": False},
    {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9},
    {"strategy": {"Fixed": 10**9}, "direction": "Left", "pad_id": 10**9, "pad_token": ""},
]


class Tokenizers:
    """The tokenizer's files, to be damaged, loaded and used on texts."""

    def __init__(self, folder, base):
        self.folder = folder
        names = "tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"
        self.files = {name: (base / name).read_bytes() for name in names}
        self.files["special_tokens_map.json"] = b'{"eos_token": "<|im_end|>", "pad_token": "x"}'
        self.hf_config = SimpleNamespace(vocab_size=259, eos_token_id=258)

    def case(self, rng):
        files = dict(self.files)
        name = rng.choice(("tokenizer.json",) * 4 + ("tokenizer_config.json",) * 2 + tuple(files))
        action = rng.randrange(16)
        if action == 0 and name != "config.json":
            del files[name]
        elif action < 4 or name == "chat_template.jinja":
            files[name] = damage(files[name], rng)
        elif action == 4:
            files[name] = dump(rng.choice(EVIL), rng)
        elif action < 7 and name == "tokenizer.json":
            tree = json.loads(files[name])
            places = "normalizer", "pre_tokenizer", "post_processor", "decoder", "model"
            for place in rng.choices((*places, "truncation", "padding"), k=rng.choice((1, 2))):
                tree[place] = rng.choice(PARTS)
            files[name] = dump(tree, rng)
        else:
            files[name] = edit_json(files[name], rng, EVIL + PARTS)
        write(self.folder, files)
        try:
            tokenizer = load_tokenizer(self.folder)
            find_eos_token_ids(self.folder, tokenizer, self.hf_config)
        except ValueError as error:
            assert str(self.folder) in str(error)
            return "refused"
        texts = [*TEXTS, "a" * 40]
        results = PromptReader(tokenizer, 259, 4096).read(texts, on_error="return")
        assert all(isinstance(r, (np.ndarray, ValueError, TypeError)) for r in results)
        for result in results:
            assert isinstance(result, np.ndarray) or "prompts[" in str(result)
        tokenizer.decode([0, 5, 100, 256, 258], skip_special_tokens=True)
        return "loaded" if isinstance(results[0], np.ndarray) else "prompt refused"


@pytest.mark.slow
@pytest.mark.parametrize("shard", SHARDS)
def test_damaged_tokenizers_load_or_are_refused(shard, base, tmp_path):
    counts = fuzz("tokenizers", shard, NUM_TOKENIZERS, Tokenizers(tmp_path, base).case)
    assert min(counts["refused"], counts["loaded"]) > 0


# -- configs ---------------------------------------------------------------------------------------

MORE_FIELDS = [
    *("num_labels", "id2label", "quantization_config", "rope_scaling", "rope_theta", "torch_dtype"),
    *("auto_map", "use_sliding_window", "partial_rotary_factor", "layer_types", "attn_config"),
    *("dtype", "model_type", "self", "pruned_heads", "problem_type", "text_config", "__class__"),
]
MORE_VALUES = [
    *("int8", "bool", "nn", "float64", "torch.bfloat16", "silu", "llama", "qwen3_moe", "bert"),
    *(["LlamaForCausalLM"], ["Qwen3ForCausalLM", 5], ["sliding_attention"], ["full_attention", 3]),
    *({"AutoConfig": "evil.Evil"}, {"AutoConfig": 5}, {"quant_method": ["fp8"]}, {"0": "a"}),
    *({"rope_type": "default", "rope_theta": 1e4}, {"rope_theta": [1]}, {"full_attention": {}}),
]
GENERATION = [
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"),
    *("eos_token_id", "eos_token_id", "bos_token_id", "do_sample"),
]
ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MOE = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
TOKENIZER = SimpleNamespace(eos_token_id=258)


class Configs:
    """config.json and generation_config.json beside sound weights and code that must never run."""

    def __init__(self, folder, base):
        self.folder = folder
        new = json.loads((base / "config.json").read_text())
        old = {k: v for k, v in new.items() if k not in ("rope_parameters", "layer_types", "dtype")}
        old.update(rope_theta=1e4, rope_scaling=None, torch_dtype="bfloat16", max_window_layers=28)
        sparse = {k: v for k, v in old.items() if k not in ("attention_bias", "hidden_act")}
        # Of other families, whose weights these are not.
        llama = {**old, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        llama.update(mlp_bias=False, rope_scaling=ROPE, max_position_embeddings=64)
        moe = {**old, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **MOE}
        self.bases = [new, new, old, old, sparse, sparse, llama, moe]
        generation = json.loads((base / "generation_config.json").read_text())
        self.generation = json.dumps(generation | dict.fromkeys(GENERATION, 1)).encode()
        self.weights = (base / SINGLE).read_bytes()
        self.ran = folder.parent / f"{folder.name} ran"
        self.code = f"open({str(self.ran)!r}, 'w')\nclass Evil: ...\n".encode()

    def case(self, rng):
        config = dict(rng.choice(self.bases))
        files = {"evil.py": self.code, SINGLE: self.weights}
        if rng.random() < 0.2:
            config["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
        text, generation = json.dumps(config).encode(), self.generation
        action = rng.randrange(10)
        if action == 0:
            text = damage(text, rng)
        elif action == 1:
            text = edit_json(text, rng, EVIL + MORE_VALUES)
        elif action == 2:
            text = dump(rng.choice(EVIL), rng)
        elif action == 3:
            change = rng.choice((damage, edit_json))
            generation = change(generation, rng)
        elif action == 4:
            listed = json.loads(generation)
            listed[rng.choice(GENERATION)] = rng.choice(EVIL)
            generation = dump(listed, rng)
        else:
            for _ in range(rng.choice((1, 1, 2, 3))):
                field = rng.choice([*config, *MORE_FIELDS])
                config[field] = rng.choice(EVIL + MORE_VALUES)
                if rng.random() < 0.1:
                    del config[field]
            text = dump(config, rng)
        write(self.folder, {**files, "config.json": text, "generation_config.json": generation})
        try:
            hf_config = load_hf_config(self.folder)
            _, head_dim = check_model(CPU, hf_config, self.folder)
            check_backend(CPU, hf_config, head_dim)
            find_eos_token_ids(self.folder, TOKENIZER, hf_config)
            default_sampling_params(self.folder)
        except ValueError as error:
            message = str(error)
            field = message.split(":")[0]
            assert str(self.folder) in message or field.isidentifier(), message
            return "refused"
        finally:
            assert not self.ran.exists()
        return "loaded"


@pytest.mark.slow
@pytest.mark.parametrize("shard", SHARDS)
def test_damaged_configs_load_or_are_refused(shard, base, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    counts = fuzz("configs", shard, NUM_CONFIGS, Configs(folder, base).case)
    assert min(counts["refused"], counts["loaded"]) > 0


# -- what was found --------------------------------------------------------------------------------


@pytest.fixture
def folder(base, tmp_path):
    shutil.copytree(base, tmp_path / "model")
    return tmp_path / "model"


def read_config(folder, **fields):
    """What becomes of config.json with these fields: it is read and checked as by an engine."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))
    hf_config = load_hf_config(folder)
    check_model(CPU, hf_config, folder)
    return hf_config


@pytest.mark.parametrize(
    "fields",
    [
        # Memory: a list per layer in transformers, a layer each in the skeleton, a table of RoPE.
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**9, "attention_bias": "absent"},
        {"max_position_embeddings": 10**9},
        {"head_dim": None, "hidden_size": 2**24, "num_attention_heads": 1},
        {"hidden_size": 10**12},
        {"vocab_size": 2**64},
        # TypeErrors: not iterable, not hashable, not comparable.
        *({"architectures": value} for value in (5, True, 0.5, [["Qwen3ForCausalLM"]], [{}])),
        *({"max_position_embeddings": value} for value in ("x", [], {}, NAN)),
        *({"layer_types": value} for value in (5, "full", [["a"]], [None, "a"], [{}])),
        {"max_window_layers": "x", "layer_types": None, "use_sliding_window": True},
        {"sliding_window": "x", "layer_types": ["sliding_attention"]},
        {"rms_norm_eps": INF},
        # Of these torch has no default type.
        *({"dtype": value} for value in ("int8", "bool", "float8_e4m3fn", ["float32"])),
    ],
)
def test_config_field_is_refused_by_name_at_once(fields, folder):
    start = time.process_time()
    with pytest.raises(ValueError, match=next(iter(fields))):
        read_config(folder, **fields)
    assert time.process_time() - start < MAX_SECONDS


def test_null_max_window_layers_are_none(folder):
    with pytest.raises(ValueError, match="sliding_window: got 8"):
        read_config(
            folder,
            layer_types=None,
            use_sliding_window=True,
            max_window_layers=None,
            sliding_window=8,
        )


def test_num_labels_make_no_list(folder):
    """transformers names each; a causal model has none."""
    assert read_config(folder, num_labels=10**9, attention_bias="absent").vocab_size == 259


@pytest.mark.parametrize("missing", ["attention_bias", "absent"])
def test_auto_map_never_runs(missing, folder):
    ran = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: ...\n")
    auto_map = {"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    assert read_config(folder, auto_map=auto_map, **{missing: "absent"}).vocab_size == 259
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    load_tokenizer(folder)
    assert not ran.exists()


@pytest.mark.parametrize(
    "value", ["Infinity", "-1", "259", "true", "2.5", '"258"', "[[1]]", "{}", "[" * 10**5]
)
def test_eos_that_is_no_token_of_the_model_is_refused(value, folder):
    """As a logit's index it would fail in the middle of a run."""
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
    with pytest.raises(ValueError, match=r"generation_config\.json cannot be read"):
        find_eos_token_ids(folder, TOKENIZER, SimpleNamespace(vocab_size=259))


def test_deep_generation_config_is_refused(folder):
    (folder / "generation_config.json").write_text("[" * 10**5)
    with pytest.raises(ValueError, match=r"generation_config\.json cannot be read"):
        default_sampling_params(folder)


@pytest.mark.parametrize(
    "part",
    [
        {"model": PARTS[17]},  # a panic while loading: no Exception
        {"normalizer": PARTS[4]},  # one at the first short text
        {"normalizer": {"type": "Prepend", "prepend": ""}},  # one at longer ones
    ],
)
def test_panic_of_the_tokenizer_is_a_value_error(part, folder):
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | part))
    with pytest.raises(ValueError, match="has no tokenizer that loads"):
        load_tokenizer(folder)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_interrupt_while_a_tokenizer_loads_passes(interrupt, folder, monkeypatch):
    def stop(*args, **kwargs):
        raise interrupt

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.from_pretrained", stop)
    with pytest.raises(interrupt):
        load_tokenizer(folder)


def test_token_outside_the_vocabulary_is_named_when_a_prompt_has_it(folder):
    path = folder / "tokenizer.json"
    tree = json.loads(path.read_text())
    tree["model"]["vocab"]["a"] = 100_000
    path.write_text(json.dumps(tree))
    reader = PromptReader(load_tokenizer(folder), 259, 4096)
    with pytest.raises(ValueError, match=r"prompts\[1\]: got token id 100000, needs"):
        reader.read(["b", "a"])


@pytest.mark.parametrize("text", ["[" * 10**5, '{"weight_map": ' + "[" * 10**5])
def test_deep_index_is_refused(text, base, folder):
    (folder / INDEX).write_text(text)
    with pytest.raises(ModelLoadError, match=INDEX):
        check_checkpoint(torch.nn.Module(), folder)


def test_long_file_name_in_the_index_is_refused(folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "x" * 300}}))
    with pytest.raises(ModelLoadError, match=INDEX):
        check_checkpoint(torch.nn.Module(), folder)


def test_pipe_in_the_place_of_the_weights_does_not_hang(folder):
    (folder / SINGLE).unlink()
    os.mkfifo(folder / SINGLE)
    with pytest.raises(ModelLoadError, match="no weights"):
        check_checkpoint(torch.nn.Module(), folder)


def test_weights_may_be_links_out_of_the_folder(base, folder):
    """So is every file in the cache of the hub."""
    (folder / SINGLE).unlink()
    (folder / SINGLE).symlink_to(base / SINGLE)
    read_config(folder)


def test_nan_weights_load_and_end_requests_with_an_error(tiny_checkpoint, tmp_path):
    shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    path = tmp_path / "model" / SINGLE
    tensors = load(path.read_bytes())
    tensors["model.norm.weight"].fill_(NAN)
    path.write_bytes(save(tensors))
    with LLM(str(tmp_path / "model"), device="cpu", max_model_len=64, num_kvcache_blocks=4) as llm:
        (output,) = llm.generate(["a"], SamplingParams(max_tokens=4), use_tqdm=False)
    assert output["finish_reason"] == "error"
