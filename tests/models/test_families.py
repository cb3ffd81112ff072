"""Each family with each kind of RoPE against transformers, in fp32 on the CPU; and what is refused.

50 prompts x 32 greedy tokens each. transformers reads our tokens once: where its argmax is our
token at every place, its own greedy tokens are ours.
"""

import copy
import json
import os
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from nanovllm import LLM, SamplingParams
from nanovllm import models as registry
from nanovllm.config import _FAMILY_FIELDS, Config, load_hf_config
from nanovllm.engine.checks import check_model
from nanovllm.models import get_model_class
from nanovllm.models.checks import head_dim_of
from tests.parity import RecordedLLM, hf_logits_of_all, load_hf

BLOCK = 16
FAMILIES = {
    "llama": dict(family="llama"),
    # R10: the bias of a row-parallel layer is added once, not once per rank.
    "llama with biases": dict(family="llama", attention_bias=True, mlp_bias=True, tied=False),
    # SmolLM's heads; head_dim is no hidden_size / heads.
    "llama of 9 heads": dict(family="llama", heads=9, kv_heads=3, head_dim=8, hidden=72),
    "mistral": dict(family="mistral", sliding_window=None, tied=False),
    "mistral with a window": dict(family="mistral", sliding_window=256, head_dim=32),
    "qwen2": dict(family="qwen2"),
    "qwen3": dict(family="qwen3"),
    "qwen3_moe": dict(
        family="qwen3_moe",
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    ),
    "qwen3_moe with dense layers": dict(
        family="qwen3_moe",
        layers=4,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        norm_topk_prob=False,
    ),
}
# As transformers 4 spells them. All change what lies within the prompts' lengths.
ROPES = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8.0,
    },
}
PAIRS = [(family, "default") for family in FAMILIES] + [
    (f, r) for f in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe") for r in list(ROPES)[1:]
]
# Each family and each kind once; with ALL_PAIRS in the environment, as with one rank.
PAIRS_OF_TWO_RANKS = [
    ("llama with biases", "llama3"),
    ("mistral with a window", "linear"),
    ("qwen2", "yarn"),
    ("qwen3", "dynamic"),
    ("qwen3_moe with dense layers", "default"),
]
if "ALL_PAIRS" in os.environ:
    PAIRS_OF_TWO_RANKS = [pair for pair in PAIRS if "9 heads" not in pair[0]]
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 3, 24, 57, 100, 200]
SETTINGS = dict(kvcache_block_size=BLOCK, max_model_len=256, device="cpu")


def shape_of(family, rope="default"):
    scaling = {} if ROPES[rope] is None else {"rope_scaling": ROPES[rope]}
    return {**FAMILIES[family], "rope_theta": 10_000.0, "max_position": 256, **scaling}


def random_prompts(num=50, vocab=256):
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab, LENGTHS[i % len(LENGTHS)]).tolist() for i in range(num)]


@pytest.mark.parametrize("family, rope", PAIRS)
def test_greedy_tokens_and_logits_equal_transformers(family, rope, tiny_checkpoint):
    checkpoint, prompts = tiny_checkpoint(**shape_of(family, rope)), random_prompts()
    with LLM(str(checkpoint), **SETTINGS) as llm:
        assert llm._runner.max_model_len == 256
        ours = RecordedLLM(llm).greedy(prompts, 32)
    tokens = [mine.token_ids for mine in ours]
    hf = load_hf(checkpoint, torch.float32)
    for mine, theirs in zip(ours, hf_logits_of_all(hf, prompts, tokens), strict=True):
        assert mine.token_ids == theirs.argmax(-1).tolist()
        assert np.abs(mine.logits - theirs).max() <= 1e-4
    assert len({token for row in tokens for token in row}) > 20  # or equality would say little


@pytest.mark.xdist_group("tensor_parallel")
@pytest.mark.parametrize("family, rope", PAIRS_OF_TWO_RANKS)
def test_two_ranks_equal_transformers(family, rope, tiny_checkpoint):
    checkpoint, prompts = tiny_checkpoint(**shape_of(family, rope)), random_prompts()
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=0)
    with LLM(str(checkpoint), tensor_parallel_size=2, **SETTINGS) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    tokens = [output["token_ids"] for output in outputs]
    hf = load_hf(checkpoint, torch.float32)
    for output, theirs in zip(outputs, hf_logits_of_all(hf, prompts, tokens), strict=True):
        assert output["token_ids"] == theirs.argmax(-1).tolist()
        logprobs = torch.from_numpy(theirs).log_softmax(-1).amax(-1).tolist()
        chosen = zip(output["logprobs"], output["token_ids"], strict=True)
        mine = [entry[token].logprob for entry, token in chosen]
        assert mine == pytest.approx(logprobs, abs=1e-4)


# -- configs ---------------------------------------------------------------------------------------

# What the published files say that matters here.
COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
PUBLISHED = {
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **COMMON,
        "attention_bias": False, "mlp_bias": False, "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 131072,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "torch_dtype": "bfloat16", "vocab_size": 128256,
    },
    "SmolLM2-135M": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **COMMON,
        "attention_bias": False, "mlp_bias": False, "hidden_size": 576,
        "intermediate_size": 1536, "max_position_embeddings": 8192, "num_attention_heads": 9,
        "num_hidden_layers": 30, "num_key_value_heads": 3, "rope_scaling": None,
        "rope_theta": 100000, "tie_word_embeddings": True, "vocab_size": 49152,
    },
    "Mistral-7B-v0.3": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", **COMMON,
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768,
    },
    "Qwen2.5-7B": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **COMMON,
        "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072,
        "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rope_theta": 1000000.0, "sliding_window": 131072,
        "use_sliding_window": False, "vocab_size": 152064,
    },
    "Qwen3-0.6B with yarn": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **COMMON,
        "attention_bias": False, "head_dim": 128, "hidden_size": 1024,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768
        },
        "rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False,
        "tie_word_embeddings": True, "vocab_size": 151936,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **COMMON,
        "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
        "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False,
        "vocab_size": 151936,
    },
}  # fmt: skip
# Files that leave something to transformers.
TERSE = {
    "Llama-2-7b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **COMMON,
        "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "rope_scaling": None, "vocab_size": 32000,
    },
    "Mistral without most": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 300
    },
    "Llama without kv heads": {**PUBLISHED["SmolLM2-135M"], "num_key_value_heads": None},
}  # fmt: skip


def read(values, folder):
    (folder / "config.json").write_text(json.dumps(values))
    return load_hf_config(folder)


def test_the_families_known_to_the_reader_are_those_that_run():
    assert _FAMILY_FIELDS.keys() == registry._MODELS.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_read_without_transformers(name, tmp_path, monkeypatch):
    values = PUBLISHED[name]
    theirs = AutoConfig.for_model(**copy.deepcopy(values))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)  # an import would fail
        ours = read(values, tmp_path)
    family = get_model_class(ours)
    assert family.read_parts(ours) == family.read_parts(theirs)
    assert head_dim_of(ours) == head_dim_of(theirs)
    longest = [family.check_config(config, 1, 10**6) for config in (ours, theirs)]
    assert (
        longest == [{"Qwen3-0.6B with yarn": 131072}.get(name, theirs.max_position_embeddings)] * 2
    )


@pytest.mark.parametrize("name", TERSE)
def test_defaults_are_those_of_transformers(name, tmp_path):
    ours = read(TERSE[name], tmp_path)
    assert not isinstance(ours, SimpleNamespace)
    get_model_class(ours).check_config(ours, 1, 16)


def test_qwen2_that_slides_leaves_no_field_of_it_to_us(tmp_path):
    values = {**PUBLISHED["Qwen2.5-7B"], "use_sliding_window": True}
    assert isinstance(read(values, tmp_path), SimpleNamespace)
    del values["sliding_window"]
    assert read(values, tmp_path).sliding_window == 4096


@pytest.mark.parametrize("missing", ["rope_theta", "num_key_value_heads", "tie_word_embeddings"])
def test_config_without_a_field_goes_to_transformers(missing, tmp_path):
    values = {k: v for k, v in PUBLISHED["Llama-3.1-8B"].items() if k != missing}
    assert not isinstance(read(values, tmp_path), SimpleNamespace)


def test_mistral_without_a_window_field_has_the_window_of_transformers(tmp_path):
    """Its default is 4096 tokens, not none: taken for none, long contexts would be wrong."""
    values = {k: v for k, v in PUBLISHED["Mistral-7B-v0.3"].items() if k != "sliding_window"}
    config = read(values, tmp_path)
    get_model_class(config).check_config(config, 1, 4096)
    with pytest.raises(ValueError, match="sliding_window: got 4096.*try max_model_len=4096"):
        get_model_class(config).check_config(config, 1, 4097)


@pytest.mark.parametrize(
    "name, fields, message",
    [
        ("Llama-3.1-8B", {"mlp_bias": "no"}, "mlp_bias: got 'no'"),
        ("Llama-3.1-8B", {"attention_bias": 0}, "attention_bias: got 0"),
        ("Llama-3.1-8B", {"model_type": "mistral"}, "model_type: got 'mistral', needs 'llama'"),
        ("Llama-3.1-8B", {"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
        ("Llama-3.1-8B", {"partial_rotary_factor": 0.5}, "rotary part 0.5"),
        ("Llama-3.1-8B", {"rope_scaling": {"type": "longrope"}}, "rope_type: got 'longrope'"),
        ("Mistral-7B-v0.3", {"sliding_window": 4096}, "sliding_window: got 4096, needs at least"),
        ("Qwen2.5-7B", {"use_sliding_window": 1}, "use_sliding_window: got 1"),
        (
            "Qwen2.5-7B",
            {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 27},
            "sliding_window: got 4096",
        ),
        ("Qwen3-30B-A3B", {"num_experts_per_tok": 129}, "at most num_experts = 128"),
        ("Qwen3-30B-A3B", {"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ("Qwen3-30B-A3B", {"decoder_sparse_step": 0}, "decoder_sparse_step: got 0"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": ["1"]}, "mlp_only_layers"),
        ("Qwen3-30B-A3B", {"moe_intermediate_size": 1.5}, "moe_intermediate_size"),
        (
            "Qwen3-30B-A3B",
            {"use_sliding_window": True, "sliding_window": 4096},
            "sliding_window: got 4096",
        ),
    ],
)
def test_fields_of_a_family_are_checked_by_name(name, fields, message):
    config = SimpleNamespace(**{**PUBLISHED[name], **fields})
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        get_model_class(config).check_config(config, 1, 8192)
    assert "try " in str(refusal.value)


@pytest.mark.parametrize(
    "sizes, fitting",
    [
        (dict(moe_intermediate_size=768, intermediate_size=5), [1, 2, 4, 8]),
        (dict(moe_intermediate_size=6, intermediate_size=6144), [1, 2]),
        (dict(moe_intermediate_size=768, intermediate_size=6, mlp_only_layers=[3]), [1, 2]),
    ],
)
def test_only_sizes_that_some_layer_has_decide_on_ranks(sizes, fitting):
    config = SimpleNamespace(**{**PUBLISHED["Qwen3-30B-A3B"], **sizes})
    for tp_size in range(1, 9):
        if tp_size in fitting:
            get_model_class(config).check_config(config, tp_size, 64)
        else:
            with pytest.raises(ValueError, match=re.escape(f"try one of {fitting}")):
                get_model_class(config).check_config(config, tp_size, 64)


QUANTIZED = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "awq": {"quant_method": "awq", "bits": 4},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
}


@pytest.mark.parametrize("method", QUANTIZED)
@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-30B-A3B"])
def test_quantized_checkpoint_is_refused_by_name_before_anything_is_built(
    name, method, tmp_path, monkeypatch
):
    """R11: an unknown tensor deep in the loader, after the model was allocated."""
    config = read({**PUBLISHED[name], "quantization_config": QUANTIZED[method]}, tmp_path)
    family = get_model_class(config)
    monkeypatch.setattr(family, "__init__", None)  # a call would be a TypeError
    message = f"quantization_config: got {method}, needs unquantized weights, try the float16 or"
    with pytest.raises(ValueError, match=message):
        check_model(Config(str(tmp_path), device="cpu"), config, tmp_path)
