"""Loading is strict both ways, and every refusal names the file and the tensor."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils import distributed, loader, weight_files
from nanovllm.utils.loader import ModelLoadError, check_checkpoint, load_dummy, load_model

CPU = torch.device("cpu")
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@pytest.fixture
def folder(tiny_checkpoint, tmp_path):
    """A copy of a tied checkpoint, to be changed."""
    shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def untied_folder(tiny_checkpoint, tmp_path):
    shutil.copytree(tiny_checkpoint(tied=False), tmp_path / "untied")
    return tmp_path / "untied"


def read(folder):
    return load_file(folder / "model.safetensors")


def write(folder, tensors, name="model.safetensors"):
    save_file(tensors, folder / name)


def split_in_shards(folder):
    """The single file as two, with an index."""
    tensors = read(folder)
    names = sorted(tensors)
    shards = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for file, part in shards.items():
        write(folder, {name: tensors[name] for name in part}, file)
    (folder / "model.safetensors").unlink()
    weight_map = {name: file for file, part in shards.items() for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return index, weight_map


def build(folder, dtype=torch.float32, device="cpu"):
    """The model with every parameter NaN, so that one that is not loaded shows."""
    config = AutoConfig.from_pretrained(folder)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    for param in model.parameters():
        param.data.fill_(float("nan"))
    return model


def load(folder, dtype=torch.float32):
    check_checkpoint(build(folder, device="meta"), folder)
    model = build(folder, dtype)
    load_model(model, folder, CPU)
    assert all(param.isfinite().all() for param in model.parameters())
    return model


def refusal(folder):
    """The message, the same whether the check or the load finds out."""
    with pytest.raises(ModelLoadError) as checked:
        check_checkpoint(build(folder, device="meta"), folder)
    with pytest.raises(ModelLoadError) as loaded:
        load_model(build(folder), folder, CPU)
    assert str(checked.value) == str(loaded.value)
    return str(checked.value)


def stored_name(name, shard_id):
    for source, (packed, part) in Qwen3ForCausalLM.packed_modules_mapping.items():
        if f".{packed}." in name and part == shard_id:
            return name.replace(packed, source)
    return name


def assert_equal_to_file(model, tensors):
    """Every parameter is the concatenation of the tensors it is made of."""
    for name, param in model.named_parameters():
        parts = [tensors[stored_name(name, part)] for part in param.checkpoint_shapes]
        assert torch.equal(param, torch.cat(parts).to(param.dtype)), name


@pytest.mark.parametrize("shape", [{}, {"tied": False, "attention_bias": True}])
def test_loaded_parameters_equal_the_file(shape, tiny_checkpoint):
    folder = tiny_checkpoint(**shape)
    assert_equal_to_file(load(folder), read(folder))


def test_shards_with_an_index_load_like_one_file(folder):
    tensors = read(folder)
    split_in_shards(folder)
    assert_equal_to_file(load(folder), tensors)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("computed", [torch.bfloat16, torch.float16, torch.float32])
def test_any_float_type_loads_into_any(stored, computed, tiny_checkpoint):
    folder = tiny_checkpoint(dtype=stored)
    assert_equal_to_file(load(folder, computed), read(folder))


def test_float16_overflow_is_refused(folder):
    tensors = read(folder)
    tensors[Q_PROJ][3, 4] = 1e6
    write(folder, tensors)
    load(folder, torch.bfloat16)
    with pytest.raises(ModelLoadError, match=rf"{Q_PROJ}.*1e\+06.*bfloat16"):
        load(folder, torch.float16)


def test_missing_tensors_are_named(folder):
    tensors = read(folder)
    gone = [name for name in tensors if ".layers.1." in name]
    write(folder, {name: tensors[name] for name in tensors if name not in gone})
    message = refusal(folder)
    assert sorted(gone)[0] in message and f"({len(gone)} in all)" in message


def test_unexpected_tensor_is_named_with_its_file(folder):
    write(folder, read(folder) | {"model.layers.7.mlp.up_proj.weight": torch.zeros(2)})
    message = refusal(folder)
    assert "model.layers.7.mlp.up_proj.weight" in message and "model.safetensors" in message


def test_misshapen_tensor_is_named_with_both_shapes(folder):
    write(folder, read(folder) | {Q_PROJ: torch.zeros(64, 63)})
    message = refusal(folder)
    assert Q_PROJ in message and "[64, 63]" in message and "[64, 64]" in message


def test_swapped_projections_are_not_taken_for_each_other(folder):
    """k_proj has fewer rows than q_proj: in the packed weight either would fit somewhere."""
    tensors = read(folder)
    k_proj = Q_PROJ.replace("q_proj", "k_proj")
    write(folder, tensors | {Q_PROJ: tensors[k_proj], k_proj: tensors[Q_PROJ]})
    message = refusal(folder)
    assert Q_PROJ in message and k_proj in message


def test_quantized_tensor_is_refused(folder):
    write(folder, read(folder) | {Q_PROJ: torch.zeros(64, 64, dtype=torch.int8)})
    message = refusal(folder)
    assert Q_PROJ in message and "I8" in message


@pytest.mark.parametrize(
    "leaf, maker",
    [
        ("qweight", "AWQ or GPTQ"),
        ("weight_scale_inv", "fp8"),
        ("weight_packed", "compressed-tensors"),
        ("weight.absmax", "bitsandbytes"),
    ],
)
def test_quantized_tensors_that_the_config_does_not_mention_are_named(leaf, maker, folder):
    """GPTQ's older tools kept their settings in a file of their own."""
    name = Q_PROJ.removesuffix("weight") + leaf
    tensors = read(folder) | {name: torch.zeros(8, dtype=torch.int32)}
    if leaf in ("qweight", "weight_packed"):
        del tensors[Q_PROJ]
    write(folder, tensors)
    message = refusal(folder)
    assert f"quantized by {maker}" in message and name in message
    assert "try the float16 or bfloat16 checkpoint" in message


def test_fp8_weights_are_refused_with_what_works(folder):
    write(folder, read(folder) | {Q_PROJ: torch.zeros(64, 64).to(torch.float8_e4m3fn)})
    message = refusal(folder)
    assert Q_PROJ in message and "F8_E4M3" in message and "not a quantized one" in message


@pytest.mark.parametrize(
    "name, part",
    [
        ("visual.blocks.0.attn.qkv.weight", "vision"),
        ("vision_tower.encoder.layers.0.mlp.fc1.weight", "vision"),
        ("model.mtp.layers.0.mlp.up_proj.weight", "multi-token prediction"),
    ],
)
def test_parts_beside_the_language_model_are_reported(name, part, folder):
    write(folder, read(folder) | {name: torch.zeros(4, 4)})
    message = refusal(folder)
    assert name in message and message.endswith(f"of the language model alone, without {part}")


def test_tensor_in_two_files_is_refused(folder):
    split_in_shards(folder)
    write(folder, load_file(folder / "b.safetensors") | {EMBEDDING: torch.zeros(259, 64)}, "c")
    (folder / "c").rename(folder / "b.safetensors")
    message = refusal(folder)
    assert EMBEDDING in message and "a.safetensors" in message and "b.safetensors" in message


def test_missing_shard_is_named(folder):
    split_in_shards(folder)
    (folder / "b.safetensors").unlink()
    assert "b.safetensors" in refusal(folder)


def test_index_that_names_the_wrong_file_is_refused(folder):
    index, weight_map = split_in_shards(folder)
    index.write_text(json.dumps({"weight_map": weight_map | {Q_PROJ: "a.safetensors"}}))
    assert weight_map[Q_PROJ] == "b.safetensors"
    message = refusal(folder)
    assert f"{Q_PROJ} in a.safetensors, where only b.safetensors has it" in message


def test_index_of_a_tensor_that_no_file_has_is_refused(folder):
    index, weight_map = split_in_shards(folder)
    index.write_text(json.dumps({"weight_map": weight_map | {"mtp.fc.weight": "a.safetensors"}}))
    assert "mtp.fc.weight in a.safetensors, where it is not there" in refusal(folder)


def test_hub_cache_of_links_is_read(folder, tmp_path):
    """Each file of a snapshot is a link to a blob outside of it."""
    tensors = read(folder)
    split_in_shards(folder)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(folder.iterdir()):
        file.rename(blobs / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    assert_equal_to_file(load(snapshot), tensors)


def test_files_outside_the_index_are_not_read(folder):
    tensors = read(folder)
    split_in_shards(folder)
    write(folder, {"tok_embeddings.weight": torch.zeros(3)}, "consolidated.safetensors")
    assert_equal_to_file(load(folder), tensors)


def test_files_beside_the_single_one_are_not_read(folder, caplog):
    write(folder, {"tok_embeddings.weight": torch.zeros(3)}, "consolidated.safetensors")
    with caplog.at_level(logging.INFO):
        assert_equal_to_file(load(folder), read(folder))
    assert "consolidated.safetensors" in caplog.text


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", "..", "a\\..\\b", 7, None])
def test_index_that_leaves_the_folder_is_refused(file, folder):
    index, weight_map = split_in_shards(folder)
    index.write_text(json.dumps({"weight_map": weight_map | {Q_PROJ: file}}))
    assert index.name in refusal(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "\x00"])
def test_damaged_index_is_named(text, folder):
    index, _ = split_in_shards(folder)
    index.write_text(text)
    assert index.name in refusal(folder)


@pytest.mark.parametrize("size", [0, 4, 100, 20_000])
def test_truncated_file_is_named(size, folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert "model.safetensors" in refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-q4.gguf", "model.pt", "model.pth"])
def test_folder_without_safetensors_is_one_clear_error(name, folder):
    (folder / "model.safetensors").rename(folder / name)
    message = refusal(folder)
    assert name in message and "safetensors" in message


def test_empty_and_missing_folders_are_refused(folder, tmp_path):
    model = build(folder)
    with pytest.raises(ModelLoadError, match="no weights"):
        check_checkpoint(model, tmp_path)
    with pytest.raises(ModelLoadError, match="directory"):
        check_checkpoint(model, tmp_path / "none")


def test_known_extras_are_skipped_with_a_log_line(folder, caplog):
    tensors = read(folder)
    write(folder, tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    with caplog.at_level(logging.INFO):
        assert_equal_to_file(load(folder), tensors)
    assert "rotary_emb.inv_freq" in caplog.text


class TestTiedHead:
    """R25: what the config says about the head and what the file holds need not agree."""

    def test_tied_parameters_share_storage(self, folder):
        model = load(folder)
        assert model.lm_head.weight is model.model.embed_tokens.weight

    def test_untied_config_without_a_head_is_refused(self, untied_folder):
        tensors = read(untied_folder)
        del tensors[HEAD]
        write(untied_folder, tensors)
        assert HEAD in refusal(untied_folder)

    def test_head_alone_is_the_embedding_too(self, folder):
        tensors = read(folder)
        head = tensors.pop(EMBEDDING)
        write(folder, tensors | {HEAD: head})
        model = load(folder)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight, head)

    def test_neither_is_refused_by_the_embeddings_name(self, folder):
        tensors = read(folder)
        del tensors[EMBEDDING]
        write(folder, tensors)
        assert f"without {EMBEDDING}" in refusal(folder)

    def test_same_tensor_twice_stays_tied(self, folder, caplog):
        write(folder, read(folder) | {HEAD: read(folder)[EMBEDDING]})
        model = load(folder)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert not caplog.records

    @pytest.mark.parametrize("files", ["one", "shards"])
    def test_different_head_is_used_with_a_warning(self, files, folder, caplog):
        """Whatever the order of names and files, each of the two gets its own tensor."""
        tensors = read(folder) | {HEAD: torch.randn(259, 64)}
        write(folder, tensors)
        if files == "shards":
            split_in_shards(folder)
        model = load(folder)
        assert torch.equal(model.lm_head.weight, tensors[HEAD])
        assert torch.equal(model.model.embed_tokens.weight, tensors[EMBEDDING])
        assert [r.levelname for r in caplog.records] == ["WARNING"] and HEAD in caplog.text

    def test_misshapen_head_is_refused_though_tied(self, folder):
        write(folder, read(folder) | {HEAD: torch.zeros(258, 64)})
        assert HEAD in refusal(folder)


@pytest.mark.parametrize("is_slow", [True, False])
def test_progress_bar_shows_when_loading_takes_a_while(is_slow, folder, monkeypatch, capsys):
    monkeypatch.setattr(loader, "SHOW_AFTER", 0 if is_slow else 100)
    load_model(build(folder), folder, CPU, show_progress=True)
    assert ("Loading weights" in capsys.readouterr().err) == is_slow
    load_model(build(folder), folder, CPU)
    assert not capsys.readouterr().err


def test_reading_ahead_fills_the_same_model(folder, monkeypatch):
    """The way to a GPU, whose memory is the host's here."""

    def read_ahead(tensors, device):
        order = sorted(tensors, key=lambda name: tensors[name].start)
        return weight_files.read_ahead({name: tensors[name] for name in order}, device)

    monkeypatch.setattr(loader, "read_tensors", read_ahead)
    write(folder, read(folder) | {HEAD: torch.randn(259, 64)})
    assert_equal_to_file(load(folder), read(folder))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_each_rank_loads_its_slices(rank, tied, tiny_checkpoint, monkeypatch):
    """R10 too: a row-parallel bias is not split."""
    folder = tiny_checkpoint(tied=tied, attention_bias=True)
    tensors = read(folder)
    monkeypatch.setattr(distributed, "_group", distributed._Group(rank, 2))
    model = load(folder)
    params = dict(model.named_parameters())
    layer = "model.layers.1."

    def half(name, dim=0):
        return tensors[name].chunk(2, dim)[rank]

    for kind in ("weight", "bias"):
        qkv = [half(f"{layer}self_attn.{x}_proj.{kind}") for x in "qkv"]
        assert torch.equal(params[f"{layer}self_attn.qkv_proj.{kind}"], torch.cat(qkv))
    gate_up = [half(f"{layer}mlp.{x}_proj.weight") for x in ("gate", "up")]
    assert torch.equal(params[f"{layer}mlp.gate_up_proj.weight"], torch.cat(gate_up))
    for name in (f"{layer}self_attn.o_proj.weight", f"{layer}mlp.down_proj.weight"):
        assert torch.equal(params[name], half(name, 1))
    bias = f"{layer}self_attn.o_proj.bias"
    assert torch.equal(params[bias], tensors[bias])
    # 259 tokens on 2 ranks: more rows than tokens, and padding after those of the second.
    for name in {EMBEDDING, HEAD} & params.keys():
        num_rows = len(params[name])
        rows = tensors[name][rank * num_rows : (rank + 1) * num_rows]
        assert 2 * num_rows >= 259 and 0 < len(rows) <= num_rows
        assert torch.equal(params[name][: len(rows)], rows)
        assert not params[name][len(rows) :].any()


def test_dummy_weights_are_finite_and_the_same_for_the_same_seed(folder):
    models = [build(folder) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        load_dummy(model, seed)
    first, same, other = ([*model.parameters()] for model in models)
    assert all(map(torch.equal, first, same)) and not all(map(torch.equal, first, other))
    for name, param in models[0].named_parameters():
        if name.endswith("norm.weight"):
            assert (param == 1).all()
        else:
            assert abs(param.std().item() - 0.02) < 0.002, name
