"""The mixture of experts equals transformers' block, on one rank or two, and loads its files."""

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import nn

from nanovllm.kernels.norm_linear import NormInput, normalize
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.moe import SparseMoE, packed_experts
from nanovllm.utils import distributed
from nanovllm.utils.loader import ModelLoadError, check_checkpoint, load_dummy, load_model

# hidden size, intermediate size, experts, experts per token
SHAPES = [(48, 40, 8, 2), (33, 24, 5, 5), (64, 96, 16, 8), (16, 8, 4, 1)]
EPS = 1e-6


def make_hf_block(hidden, intermediate, experts, top_k, renormalize):
    # Not at the top: the ranks would import it too, which takes most of their time.
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=intermediate,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=renormalize,
    )
    config._experts_implementation = "eager"
    block = Qwen3MoeSparseMoeBlock(config).eval()
    generator = torch.Generator().manual_seed(3)
    for param in block.parameters():
        param.data.copy_(torch.randn(param.shape, generator=generator) * param.shape[-1] ** -0.5)
    return block


def published_tensors(block):
    """Names and tensors as in published checkpoints, whichever way this transformers holds them."""
    tensors = dict(block.state_dict())
    packed = tensors.pop("experts.gate_up_proj", None)
    if packed is not None:
        downs = tensors.pop("experts.down_proj")
        for i, (gate_up, down) in enumerate(zip(packed, downs, strict=True)):
            gate, up = gate_up.chunk(2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
            tensors |= {f"experts.{i}.{name}.weight": t for name, t in parts.items()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


class Model(nn.Module):
    """Just enough of a model for the loader."""

    def __init__(self, *shape):
        super().__init__()
        self.packed_modules_mapping = packed_experts(shape[2])
        self.mlp = SparseMoE(*shape)


def save(block, folder):
    tensors = {f"mlp.{name}": tensor for name, tensor in published_tensors(block).items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def load(folder, *shape):
    model = Model(*shape)
    for param in model.parameters():
        param.data.fill_(float("nan"))
    check_checkpoint(model, folder)
    load_model(model, folder, torch.device("cpu"))
    return model.mlp


def make_input(tokens, hidden):
    generator = torch.Generator().manual_seed(4)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    norm = RMSNorm(hidden, EPS)
    norm.weight.data.copy_(1 + 0.1 * draw(hidden))
    return NormInput(draw(tokens, hidden), 1 + 0.1 * draw(hidden), EPS), norm


@torch.no_grad()
def expected_stream(block, tokens, hidden):
    x, _ = make_input(tokens, hidden)
    out = block(normalize(x)[None])
    out = out[0] if isinstance(out, tuple) else out  # the logits too, up to transformers 4
    return x.hidden + out.view(tokens, hidden)


@torch.no_grad()
def check_equals(expected, mlp):
    tokens, hidden = expected.shape
    x, next_norm = make_input(tokens, hidden)
    kept = x.hidden.clone()
    out = mlp(x, next_norm)
    torch.testing.assert_close(out.hidden, expected, rtol=1e-5, atol=1e-5)
    normed = torch.nn.functional.rms_norm(expected, (hidden,), next_norm.weight, EPS)
    torch.testing.assert_close(normalize(out), normed, rtol=1e-5, atol=1e-5)
    assert torch.equal(x.hidden, kept)


def check_rank(rank, size, init_method, folder, expected):
    distributed.init(rank, size, init_method, torch.device("cpu"), 64)
    for i, shape in enumerate(SHAPES):
        mlp = load(folder / str(i), *shape, True)
        assert mlp.experts.down.weight.shape == (shape[2], shape[0], shape[1] // size)
        check_equals(expected[i], mlp)
    distributed.destroy()


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_transformers(shape, renormalize, tmp_path):
    block = make_hf_block(*shape, renormalize)
    save(block, tmp_path)
    mlp = load(tmp_path, *shape, renormalize)
    for tokens in (1, 15, 17, 130):
        check_equals(expected_stream(block, tokens, shape[0]), mlp)


def test_two_ranks_equal_transformers(tmp_path):
    expected = []
    for i, shape in enumerate(SHAPES):
        block = make_hf_block(*shape, True)
        (tmp_path / str(i)).mkdir()
        save(block, tmp_path / str(i))
        expected.append(expected_stream(block, 9, shape[0]))
    mp.spawn(check_rank, (2, f"file://{tmp_path}/rendezvous", tmp_path, expected), nprocs=2)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_every_rank_holds_its_share_of_every_expert(tp_size, monkeypatch, tmp_path):
    """Rows of the gate and of the up projection are cut each by itself, columns of down alike."""
    hidden, size, experts = 24, 40, 6
    tensors = save(make_hf_block(hidden, size, experts, 2, True), tmp_path)
    for rank in range(tp_size):
        monkeypatch.setattr(distributed, "_group", distributed._Group(rank, tp_size))
        mlp = load(tmp_path, hidden, size, experts, 2, True)
        assert torch.equal(mlp.gate.weight, tensors["mlp.gate.weight"])
        for i in range(experts):
            parts = (tensors[f"mlp.experts.{i}.{n}_proj.weight"] for n in ("gate", "up", "down"))
            gate, up, down = parts
            gate, up = gate.chunk(tp_size)[rank], up.chunk(tp_size)[rank]
            assert torch.equal(mlp.experts.gate_up.weight[i], torch.cat([gate, up]))
            assert torch.equal(mlp.experts.down.weight[i], down.chunk(tp_size, 1)[rank])


def test_missing_and_foreign_experts_are_refused_by_name(tmp_path):
    block = make_hf_block(16, 8, 4, 2, True)
    tensors = save(block, tmp_path)
    last = tensors.pop("mlp.experts.3.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="without mlp.experts.3.up_proj.weight"):
        check_checkpoint(Model(16, 8, 4, 2, True), tmp_path)
    foreign = {"mlp.experts.3.up_proj.weight": last, "mlp.experts.4.up_proj.weight": last.clone()}
    save_file(tensors | foreign, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="unknown mlp.experts.4.up_proj.weight"):
        check_checkpoint(Model(16, 8, 4, 2, True), tmp_path)


def test_size_that_does_not_divide_is_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr(distributed, "_group", distributed._Group(0, 4))
    with pytest.raises(ValueError, match="got 4.*moe_intermediate_size = 42"):
        SparseMoE(24, 42, 6, 2, True)


def test_layer_keeps_the_group_it_was_built_in(monkeypatch):
    """An engine of one rank goes on by itself when another of its process forms a group."""
    mlp = SparseMoE(16, 8, 4, 2, True)
    load_dummy(mlp)
    monkeypatch.setattr(distributed, "_group", distributed._Group(0, 2))
    monkeypatch.setattr(distributed, "all_reduce", lambda *_: pytest.fail("communication"))
    x, next_norm = make_input(3, 16)
    assert mlp(x, next_norm).hidden.isfinite().all()
    empty = NormInput(torch.empty(0, 16), x.weight, EPS)
    assert mlp(empty, next_norm).hidden.shape == (0, 16)
