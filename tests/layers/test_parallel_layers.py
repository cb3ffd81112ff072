"""Sharded layers on two CPU ranks give what one rank gives; sizes need not be powers of two."""

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F

from nanovllm.kernels.norm_linear import NormInput, normalize
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    shard_size,
)
from nanovllm.utils import distributed

HIDDEN, HEAD_DIM, HEADS, KV_HEADS, INTERMEDIATE, VOCAB = 24, 10, 6, 2, 28, 293


def random_weights():
    """The checkpoint's tensors, the same on every rank."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "q": draw(HEADS * HEAD_DIM, HIDDEN),
        "k": draw(KV_HEADS * HEAD_DIM, HIDDEN),
        "v": draw(KV_HEADS * HEAD_DIM, HIDDEN),
        "q_bias": draw(HEADS * HEAD_DIM),
        "k_bias": draw(KV_HEADS * HEAD_DIM),
        "v_bias": draw(KV_HEADS * HEAD_DIM),
        "o": draw(HIDDEN, HEADS * HEAD_DIM),
        "o_bias": draw(HIDDEN),
        "gate": draw(INTERMEDIATE, HIDDEN),
        "up": draw(INTERMEDIATE, HIDDEN),
        "embedding": draw(VOCAB, HIDDEN),
        "norm": draw(HIDDEN),
        "x": draw(5, HIDDEN),
        "heads": draw(5, HEADS * HEAD_DIM),
    }


def load(param, tensor, shard_id=None):
    param.weight_loader(param, tensor, shard_id)


def check_column_parallel(w, rank, size):
    x = NormInput(w["x"], torch.ones(HIDDEN), 1e-6)
    normed = normalize(x)
    for bias in (False, True):
        layer = QKVParallelLinear(HIDDEN, HEAD_DIM, HEADS, KV_HEADS, bias)
        for part in "qkv":
            load(layer.weight, w[part], part)
            if bias:
                load(layer.bias, w[f"{part}_bias"], part)
        assert (layer.num_heads, layer.num_kv_heads) == (HEADS // size, KV_HEADS // size)
        biases = [w[f"{part}_bias"] if bias else None for part in "qkv"]
        full = [F.linear(normed, w[part], b) for part, b in zip("qkv", biases, strict=True)]
        expected = torch.cat([part.chunk(size, -1)[rank] for part in full], -1)
        out, left_to_apply = layer(x)
        assert left_to_apply is None
        torch.testing.assert_close(out, expected)
    mlp = MergedColumnParallelLinear(HIDDEN, [INTERMEDIATE, INTERMEDIATE])
    load(mlp.weight, w["gate"], 0)
    load(mlp.weight, w["up"], 1)
    expected = F.silu(F.linear(normed, w["gate"])) * F.linear(normed, w["up"])
    torch.testing.assert_close(mlp.silu_mul(x), expected.chunk(size, -1)[rank])


def check_row_parallel(w, rank, size):
    """The bias is added once, the residual stream gets the sum and is itself left alone."""
    local = w["heads"].chunk(size, -1)[rank]
    for bias in (False, True):
        layer = RowParallelLinear(HEADS * HEAD_DIM, HIDDEN, bias)
        load(layer.weight, w["o"])
        if bias:
            load(layer.bias, w["o_bias"])
        residual = w["x"].clone()
        out = layer(local, residual, w["norm"], 1e-6)
        expected = F.linear(w["heads"], w["o"], w["o_bias"] if bias else None) + w["x"]
        torch.testing.assert_close(out.hidden, expected)
        torch.testing.assert_close(normalize(out), F.rms_norm(expected, (HIDDEN,), w["norm"], 1e-6))
        assert torch.equal(residual, w["x"])


def check_embedding_and_head(w, rank, size):
    embedding = VocabParallelEmbedding(VOCAB, HIDDEN)
    load(embedding.weight, w["embedding"])
    ids = torch.tensor([0, VOCAB - 1, 255, 256, 257, 0], dtype=torch.int32)
    assert torch.equal(embedding(ids), w["embedding"][ids])
    head = ParallelLMHead(VOCAB, HIDDEN, embedding.weight)
    assert head.weight is embedding.weight
    for rows in (None, torch.tensor([4, 0]), torch.tensor([2])):
        wanted = w["x"] if rows is None else w["x"][rows]
        logits = head.gather(head(wanted))
        if rank > 0:
            assert logits is None
            continue
        torch.testing.assert_close(logits, wanted @ w["embedding"].T)


def check_all(rank: int, size: int, init_method: str) -> None:
    distributed.init(rank, size, init_method, torch.device("cpu"), 64)
    weights = random_weights()
    for check in (check_column_parallel, check_row_parallel, check_embedding_and_head):
        check(weights, rank, size)
    distributed.destroy()


def test_one_rank():
    check_all(0, 1, "unused")


def test_two_ranks(tmp_path):
    mp.spawn(check_all, (2, f"file://{tmp_path}/rendezvous"), nprocs=2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_every_query_head_finds_its_kv_head_on_its_rank(num_kv_heads, tp_size, bias, monkeypatch):
    """Attention reads local KV head i // local group for local query head i; on any number of
    ranks this has to be the head that one rank reads, and no rank holds a head it does not need."""
    num_heads = 8
    counts = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads}
    full = {part: torch.randn(n, HEAD_DIM, HIDDEN) for part, n in counts.items()}
    full_bias = {part: torch.randn(n, HEAD_DIM) for part, n in counts.items()}
    for rank in range(tp_size):
        monkeypatch.setattr(distributed, "_group", distributed._Group(rank, tp_size))
        layer = QKVParallelLinear(HIDDEN, HEAD_DIM, num_heads, num_kv_heads, bias)
        local, local_kv = layer.num_heads, layer.num_kv_heads
        assert (local, local_kv) == (num_heads // tp_size, max(num_kv_heads // tp_size, 1))
        params = [(layer.weight, full)] + [(layer.bias, full_bias)] * bias
        for param, tensors in params:
            param.data.fill_(float("nan"))
            for part, tensor in tensors.items():
                flat = tensor.flatten(0, 1)
                assert param.checkpoint_shapes[part] == flat.shape  # the loader compares them
                load(param, flat, part)
            held = param.data.unflatten(0, (-1, HEAD_DIM))
            assert len(held) == local + 2 * local_kv
            q, k, v = held.split([local, local_kv, local_kv])
            for i in range(local):
                head = rank * local + i
                kv_head = head // (num_heads // num_kv_heads)
                assert torch.equal(q[i], tensors["q"][head])
                assert torch.equal(k[i // (local // local_kv)], tensors["k"][kv_head])
                assert torch.equal(v[i // (local // local_kv)], tensors["v"][kv_head])


def test_padding_of_the_vocabulary_has_no_logits(monkeypatch):
    """293 tokens on 2 ranks are 256 and 37: rows without a token must not be seen by a sampler."""
    parts = []
    monkeypatch.setattr(distributed, "gather_to_rank0", lambda x: torch.cat((x, parts[0]), -1))
    weights = random_weights()
    for rank in (1, 0):
        monkeypatch.setattr(distributed, "_group", distributed._Group(rank, 2))
        head = ParallelLMHead(VOCAB, HIDDEN)
        head.weight.data.fill_(float("nan"))
        load(head.weight, weights["embedding"])
        assert head.num_tokens == (256, 37)[rank]
        assert head.weight.shape == (256, HIDDEN) and head.weight.isfinite().all()
        parts.append(F.linear(weights["x"], head.weight))
    logits = head.gather(head(weights["x"]))
    torch.testing.assert_close(logits, weights["x"] @ weights["embedding"].T)


def test_layers_keep_the_group_they_were_built_in(monkeypatch):
    """An engine of one rank goes on by itself when another of its process forms a group."""
    layer, embedding = RowParallelLinear(6, 4), VocabParallelEmbedding(9, 4)
    head = ParallelLMHead(9, 4)
    for param in (layer.weight, embedding.weight, head.weight):
        param.data.normal_()
    monkeypatch.setattr(distributed, "_group", distributed._Group(0, 2))
    for function in ("all_reduce", "gather_to_rank0"):
        monkeypatch.setattr(distributed, function, lambda *_: pytest.fail("communication"))
    layer(torch.randn(3, 6), torch.randn(3, 4), torch.ones(4), 1e-6)
    embedding(torch.tensor([1, 8]))
    assert head.gather(head(torch.randn(3, 4))).shape == (3, 9)


def test_size_that_does_not_divide_is_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr(distributed, "_group", distributed._Group(0, 4))
    with pytest.raises(ValueError, match="tensor_parallel_size: got 4.*heads = 6"):
        shard_size("heads", 6)
    for num_heads, num_kv_heads in (12, 3), (12, 6):
        with pytest.raises(ValueError, match=f"multiple of num_key_value_heads = {num_kv_heads}"):
            QKVParallelLinear(HIDDEN, HEAD_DIM, num_heads, num_kv_heads)
    with pytest.raises(ValueError, match="num_attention_heads = 6"):
        QKVParallelLinear(HIDDEN, HEAD_DIM, 6, KV_HEADS)
