"""Qwen3 against transformers in fp32: whole prompts, chunks and decode through the paged cache.

And 2 and 4 ranks against one, with KV heads, vocabularies and biases that do not divide evenly.
"""

import copy
import json
import shutil

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from nanovllm.attention import select_backend
from nanovllm.layers.attention import Attention
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils import distributed
from nanovllm.utils.context import Context, use_context
from nanovllm.utils.loader import ModelLoadError, load_model

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
            return self.model.lm_head.gather(self.model.compute_logits(hidden_states))


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


# Fewer KV heads than ranks, as many, more; vocabularies that divide by neither 2 nor 4.
SHARDED = {
    "one_kv_head": {"heads": 4, "kv_heads": 1},
    "one_kv_head_bias": {"heads": 8, "kv_heads": 1, "attention_bias": True, "tied": False},
    "two_kv_heads": {"heads": 8, "kv_heads": 2, "vocab": 1001, "attention_bias": True},
    "odd_sizes": {"heads": 12, "kv_heads": 2, "head_dim": 20, "hidden": 44, "tied": False},
    "a_kv_head_each": {"heads": 4, "kv_heads": 4, "vocab": 1001, "tied": False},
    "tiny_vocab": {"heads": 4, "kv_heads": 2, "vocab": 37},
    "tiny_vocab_untied": {"heads": 4, "kv_heads": 1, "vocab": 37, "tied": False},
}


@pytest.fixture
def sharded_checkpoints(tiny_checkpoint, tmp_path):
    """{name of the shape: folder}; vocabularies too small for the usual special tokens are cut."""
    folders = {}
    for name, shape in SHARDED.items():
        vocab = shape.get("vocab", 301)
        source = tiny_checkpoint(**{**shape, "vocab": max(vocab, 259)})
        folders[name] = folder = tmp_path / name
        shutil.copytree(source, folder)
        fields = json.loads((folder / "config.json").read_text())
        fields |= {"vocab_size": vocab} | dict.fromkeys(
            f"{x}_token_id" for x in ("bos", "eos", "pad")
        )
        (folder / "config.json").write_text(json.dumps(fields))
        weights = load_file(folder / "model.safetensors")
        for tensor in weights.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
            weights[tensor] = weights[tensor][:vocab].contiguous()
        save_file(weights, folder / "model.safetensors")
    return folders


def logits_of_all_steps(folder):
    """Prefill, a chunk that reads the cache, decode: [num_tokens, vocab], None but on rank 0."""
    torch.manual_seed(0)
    lengths = [1, BLOCK, BLOCK + 1, 2 * BLOCK + 5]
    paged = PagedModel(folder, lengths)
    starts = [max(n - 7, 1) for n in lengths]
    ends = [max(n - 3, 1) for n in lengths]
    steps = [paged.step({i: (0, start) for i, start in enumerate(starts)}, use_cache=False)]
    steps.append(paged.step({i: (starts[i], ends[i]) for i in range(1, len(lengths))}))
    for offset in range(3):
        chunks = {i: (ends[i] + offset, ends[i] + offset + 1) for i in range(1, len(lengths))}
        steps.append(paged.step(chunks, is_prefill=False))
    return None if steps[0] is None else torch.cat(steps)


def check_ranks(rank: int, folders: dict, rendezvous: str) -> None:
    """One of four ranks, then, for the first two, one of two; rank 0 compares with one alone."""
    torch.set_num_threads(1)
    expected = {name: logits_of_all_steps(folder) for name, folder in folders.items() if rank == 0}
    for size in (4, 2):
        if rank >= size:
            continue
        init_method = f"file://{rendezvous}/{size}"
        distributed.init(rank, size, init_method, torch.device("cpu"), 64)
        for name, folder in folders.items():
            logits = logits_of_all_steps(folder)
            assert (logits is None) == (rank > 0)
            if rank == 0:
                theirs = expected[name]
                assert theirs.shape[1] == SHARDED[name].get("vocab", 301)
                gap = (logits.log_softmax(-1) - theirs.log_softmax(-1)).abs().max().item()
                assert gap <= 1e-4, f"{name} on {size} ranks: {gap}"
                assert torch.equal(logits.argmax(-1), theirs.argmax(-1)), f"{name}, {size} ranks"
        distributed.destroy()


def test_two_and_four_ranks_equal_one(sharded_checkpoints, tmp_path):
    """The caches start as NaN, so a head read where nothing was stored would show."""
    mp.spawn(check_ranks, (sharded_checkpoints, str(tmp_path)), nprocs=4)


@pytest.mark.parametrize("part", ["k_proj.weight", "v_proj.bias"])
def test_loading_stays_strict_about_replicated_heads(part, tiny_checkpoint, tmp_path, monkeypatch):
    """A head stored once for each rank, as some tools write them, is not the checkpoint's shape."""
    source = tiny_checkpoint(heads=4, kv_heads=1, attention_bias=True)
    shutil.copytree(source, tmp_path / "copy")
    monkeypatch.setattr(distributed, "_group", distributed._Group(3, 4))
    model = Qwen3ForCausalLM(AutoConfig.from_pretrained(source))
    load_model(model, source, torch.device("cpu"))
    weights = load_file(source / "model.safetensors")
    name = f"model.layers.1.self_attn.{part}"
    weights[name] = torch.cat([weights[name]] * 4)
    save_file(weights, tmp_path / "copy" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=name.replace(".", "[.]")):
        load_model(model, tmp_path / "copy", torch.device("cpu"))


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
        ({"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, "rope_type: got 'su'"),
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


@pytest.mark.parametrize(
    "fields, fitting, reasons",
    [
        # 8 query heads, 4 KV heads and intermediate size 96 unless the fields say otherwise.
        ({}, [1, 2, 4, 8], {3: "heads = 8 and a divisor or a multiple of num_key_value_heads = 4"}),
        ({"num_key_value_heads": 1}, [1, 2, 4, 8], {6: "divisor of num_attention_heads = 8, try"}),
        (
            {"intermediate_size": 90},
            [1, 2],
            {4: "got 4, needs a divisor of intermediate_size = 90"},
        ),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            [1, 3, 6],
            {
                2: "got 2, needs a divisor or a multiple of num_key_value_heads = 3, try",
                5: "num_attention_heads = 12 and a divisor of intermediate_size = 96 and a divisor",
            },
        ),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, [1], {7: "intermediate_size = 96"}),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_work(
    fields, fitting, reasons, config
):
    config = changed(config, **fields)
    for tp_size in range(1, 9):
        if tp_size in fitting:
            check(config, tp_size)
            continue
        with pytest.raises(ValueError, match=f"^tensor_parallel_size: got {tp_size}, ") as refusal:
            check(config, tp_size)
        assert str(refusal.value).endswith(f"try one of {fitting}")
        assert reasons.pop(tp_size, "needs") in str(refusal.value)
    assert not reasons


def test_head_dim_missing_from_the_config_is_derived(config):
    without = changed(config, head_dim=None, hidden_size=96)
    check(without)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(without)
    assert model.model.layers[0].self_attn.attn.head_dim == 12
