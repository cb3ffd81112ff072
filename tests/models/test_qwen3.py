"""Qwen3 against transformers in fp32: whole prompts, chunks and decode through the paged cache."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nanovllm.attention import select_backend
from nanovllm.layers.attention import Attention
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.context import Context, use_context
from nanovllm.utils.loader import load_model

BLOCK = 8
SHAPES = {
    "mha": {"heads": 4, "kv_heads": 4, "head_dim": 16, "hidden": 64},
    "gqa": {"heads": 4, "kv_heads": 2, "head_dim": 16, "hidden": 64, "layers": 3},
    "untied": {"heads": 4, "kv_heads": 1, "head_dim": 32, "hidden": 128, "tied": False},
    "bias": {"heads": 4, "kv_heads": 2, "head_dim": 16, "hidden": 64, "attention_bias": True},
    "wide_heads": {"heads": 2, "kv_heads": 2, "head_dim": 64, "hidden": 48},
    "odd": {"heads": 6, "kv_heads": 3, "head_dim": 20, "hidden": 80, "vocab": 301, "tied": False},
}
# Lengths at the edges of a block, and one of several blocks.
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 29]


class PagedModel:
    """Our model with a cache, driven step by step; sequence i has the blocks of row i."""

    def __init__(self, folder, lengths):
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):  # as the engine does first
            Qwen3ForCausalLM(config)
        self.model = Qwen3ForCausalLM(config)
        load_model(self.model, folder, torch.device("cpu"))
        self.prompts = [torch.randint(config.vocab_size, (n,)) for n in lengths]
        width = -(-max(lengths) // BLOCK)
        self.tables = torch.randperm(len(lengths) * width).view(len(lengths), width).int()
        backend, _ = select_backend("torch", torch.device("cpu"), torch.float32, 16, BLOCK)
        for layer in self.model.modules():
            if isinstance(layer, Attention):
                shape = (self.tables.numel(), BLOCK, layer.num_kv_heads, layer.head_dim)
                caches = torch.full((2, *shape), float("nan"))
                layer.bind(caches[0], caches[1], backend)

    @torch.inference_mode()
    def step(self, chunks, is_prefill=True, use_cache=True):
        """Logits of every token of the chunks {sequence: (start, end)}, sequence after sequence."""
        spans = list(chunks.items())
        ids = torch.cat([self.prompts[i][start:end] for i, (start, end) in spans])
        positions = torch.cat([torch.arange(start, end) for _, (start, end) in spans])
        rows = torch.tensor([i for i, (start, end) in spans for _ in range(start, end)])
        slots = self.tables[rows, positions // BLOCK] * BLOCK + positions % BLOCK
        tables = self.tables[[i for i, _ in spans]]
        ends = [end for _, (_, end) in spans]
        if is_prefill:
            ctx = Context(
                is_prefill=True,
                slot_mapping=slots.int(),
                block_tables=tables if use_cache else None,
                seqlens_q=[end - start for _, (start, end) in spans],
                seqlens_k=ends,
            )
        else:
            ctx = Context(
                is_prefill=False,
                slot_mapping=slots.int(),
                block_tables=tables,
                context_lens=torch.tensor(ends, dtype=torch.int32),
                max_context_len=max(ends),
            )
        with use_context(ctx):
            hidden_states = self.model(ids.int(), positions.int())
            return self.model.compute_logits(hidden_states)


@pytest.fixture(params=SHAPES)
def pair(request, tiny_checkpoint):
    """(our model with prompts, transformers' logits of every token of each prompt)."""
    folder = tiny_checkpoint(**SHAPES[request.param])
    ours = PagedModel(folder, LENGTHS)
    hf = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        return ours, [hf(prompt[None]).logits[0] for prompt in ours.prompts]


def assert_equal(ours, theirs):
    """Log-probabilities to 1e-4, the bound of the project; and every greedy token."""
    theirs = torch.cat(theirs)
    torch.testing.assert_close(
        ours.log_softmax(-1), theirs.log_softmax(-1), atol=1e-4, rtol=0, check_device=False
    )
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_whole_prompts_packed_without_padding(pair):
    ours, theirs = pair
    chunks = {i: (0, n) for i, n in enumerate(LENGTHS)}
    assert_equal(ours.step(chunks, use_cache=False), theirs)


@pytest.mark.parametrize("size", [1, 5, BLOCK, BLOCK + 1])
def test_chunks_equal_whole_prompts(pair, size):
    """Chunks of any size see exactly what was stored before them, in scattered blocks."""
    ours, theirs = pair
    for start in range(0, max(LENGTHS), size):
        ends = {i: min(start + size, n) for i, n in enumerate(LENGTHS) if n > start}
        logits = ours.step({i: (start, end) for i, end in ends.items()}, use_cache=start > 0)
        assert_equal(logits, [theirs[i][start:end] for i, end in ends.items()])


def test_decode_equals_whole_prompts(pair):
    """Token by token from the first; sequences leave as they end, so the batch gets ragged."""
    ours, theirs = pair
    ours.step(dict.fromkeys(range(len(LENGTHS)), (0, 1)), use_cache=False)
    for position in range(1, max(LENGTHS)):
        live = [i for i, n in enumerate(LENGTHS) if n > position]
        chunks = dict.fromkeys(live, (position, position + 1))
        logits = ours.step(chunks, is_prefill=False)
        assert_equal(logits, [theirs[i][position : position + 1] for i in live])


def test_decode_of_sequences_at_different_positions(pair):
    ours, theirs = pair
    starts = [max(n - 4, 1) for n in LENGTHS]
    ours.step({i: (0, start) for i, start in enumerate(starts)}, use_cache=False)
    for offset in range(4):
        chunks = {
            i: (start + offset, start + offset + 1)
            for i, start in enumerate(starts)
            if start + offset < LENGTHS[i]
        }
        logits = ours.step(chunks, is_prefill=False)
        assert_equal(logits, [theirs[i][start:end] for i, (start, end) in chunks.items()])


def test_only_the_rows_asked_for_get_logits(tiny_checkpoint):
    ours = PagedModel(tiny_checkpoint(), [5, 3])
    ctx = Context(
        is_prefill=True,
        slot_mapping=torch.full((8,), -1, dtype=torch.int32),
        seqlens_q=[5, 3],
        seqlens_k=[5, 3],
        logits_indices=torch.tensor([4, 7]),
    )
    every = ours.step({0: (0, 5), 1: (0, 3)}, use_cache=False)
    with torch.inference_mode(), use_context(ctx):
        ids = torch.cat(ours.prompts)
        positions = torch.cat((torch.arange(5), torch.arange(3)))
        last = ours.model.compute_logits(ours.model(ids, positions))
    torch.testing.assert_close(last, every[[4, 7]])


def test_warm_up_without_a_cache_stores_nothing(tiny_checkpoint):
    ours = PagedModel(tiny_checkpoint(), [9])
    expected = ours.step({0: (0, 9)}, use_cache=False)
    backend, _ = select_backend("torch", torch.device("cpu"), torch.float32, 16, BLOCK)
    for layer in ours.model.modules():
        if isinstance(layer, Attention):
            layer.bind(None, None, backend)
    assert torch.equal(ours.step({0: (0, 9)}, use_cache=False), expected)


@pytest.fixture(scope="module")
def config(tiny_checkpoint):
    return AutoConfig.from_pretrained(tiny_checkpoint(heads=8, kv_heads=4, max_position=1024))


def changed(config, **fields):
    """A copy with these fields, past any checks of transformers' own."""
    config = copy.deepcopy(config)
    config.__dict__.update(fields)
    return config


def check(config, tp_size=1, max_model_len=512):
    Qwen3ForCausalLM.check_config(config, tp_size, max_model_len)


def test_good_config_passes(config):
    for tp_size in (1, 2, 4):
        check(config, tp_size)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: got fp8"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type: got 'yarn'"),
        ({"vocab_size": None}, "vocab_size: got None"),
        ({"hidden_size": "64"}, "hidden_size: got '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: got 0"),
        ({"intermediate_size": -3}, "intermediate_size: got -3"),
        ({"num_attention_heads": True}, "num_attention_heads: got True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: got 3.*8"),
        ({"max_position_embeddings": 1.5}, "max_position_embeddings: got 1.5"),
        ({"head_dim": 15}, "head_dim: got 15"),
        ({"head_dim": 0}, "head_dim: got 0"),
        ({"head_dim": "16"}, "head_dim: got '16'"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps: got 0.0"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"attention_bias": None}, "attention_bias: got None"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: got 'yes'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types.*linear_attention"),
    ],
)
def test_bad_config_is_refused_by_name(fields, message, config):
    with pytest.raises(ValueError, match=message) as refusal:
        check(changed(config, **fields))
    assert "try " in str(refusal.value)


SLIDING = [
    {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 256},
    {
        "layer_types": None,
        "use_sliding_window": True,
        "max_window_layers": 1,
        "sliding_window": 256,
    },
]


@pytest.mark.parametrize("fields", SLIDING)
def test_sliding_window_matters_only_if_a_context_can_outgrow_it(fields, config):
    check(changed(config, **fields), max_model_len=256)
    with pytest.raises(ValueError, match="sliding_window: got 256.*max_model_len = 257"):
        check(changed(config, **fields), max_model_len=257)


def test_sliding_window_that_no_layer_uses_is_ignored(config):
    check(changed(config, layer_types=None, use_sliding_window=False, sliding_window=16))
    check(changed(config, layer_types=["full_attention"] * 2, sliding_window=16))
    fields = {"layer_types": None, "use_sliding_window": True, "sliding_window": 16}
    check(changed(config, **fields, max_window_layers=2))


def test_head_counts_that_do_not_divide_are_refused_with_the_sizes_that_work(config):
    for tp_size in (3, 5, 8):
        with pytest.raises(ValueError, match=rf"got {tp_size}.*try one of \[1, 2, 4\]"):
            check(config, tp_size)


def test_head_dim_missing_from_the_config_is_derived(config):
    without = changed(config, head_dim=None, hidden_size=96)
    check(without)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(without)
    assert model.model.layers[0].self_attn.attn.head_dim == 12
