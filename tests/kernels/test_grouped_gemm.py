"""Experts' products: routing, tiles, both products and their sum; odd sizes, uneven loads."""

import pytest
import torch
from cases import POISON, assert_error_at_most_twice_torch

from nanovllm.kernels import grouped_gemm as op
from nanovllm.kernels import moe_routing
from nanovllm.kernels.launch import Gpu

EPS = 1e-6
SWAPPED = op.Config(16, (32, 16), 32, 4, swap=True)
PLAIN = op.Config(16, (16, 32), 32, 4)
# tokens, experts, top_k, hidden size, intermediate size
CASES = [
    (1, 6, 2, 48, 40), (2, 3, 3, 16, 72), (15, 8, 1, 80, 33), (17, 12, 5, 33, 24),
    (17, 1, 1, 64, 32), (70, 5, 4, 24, 16),
]  # fmt: skip
GPU_CASES = [
    (1, 128, 8, 2048, 768), (2, 128, 8, 2048, 384), (15, 60, 4, 2048, 1408), (17, 8, 2, 520, 200),
    (64, 128, 8, 2048, 768), (65, 128, 8, 2048, 768), (257, 128, 8, 2048, 768),
    (300, 16, 1, 1000, 333), (999, 128, 8, 2048, 96), (1500, 32, 8, 1024, 512),
    (4096, 128, 8, 2048, 768), (33, 512, 10, 2048, 512),
]  # fmt: skip
LOADS = ["random", "one_expert", "half_never", "equal"]


def router_logits(tokens, experts, dtype, device, load="random"):
    """Rows without ties at the top, in bf16 too: who is picked does not depend on their order."""
    values = 4 * torch.linspace(-1, 1, experts) ** 3
    logits = torch.stack([values[torch.randperm(experts)] for _ in range(tokens)])
    if load == "one_expert":
        logits[:, experts // 2] = 5.0
    elif load == "half_never":
        logits[:, ::2] -= 7.0
    elif load == "equal":
        logits = logits[:1].repeat(tokens, 1)
    return logits.to(device, dtype)


def make_weights(experts, hidden, n, dtype, device):
    gate_up = torch.randn(experts, 2 * n, hidden, device=device) * hidden**-0.5
    down = torch.randn(experts, hidden, n, device=device) * n**-0.5
    return gate_up.to(dtype), down.to(dtype)


def poison_new_tensors(monkeypatch):
    """Whatever a kernel does not write shows, as a value or as an index."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(POISON if tensor.is_floating_point() else 101)

    monkeypatch.setattr(torch, "empty", poisoned)


def check_routing(logits, top_k, renormalize, block_m):
    tokens, experts = logits.shape
    routed = moe_routing.routing(logits, top_k, renormalize, block_m)
    weights, ids = moe_routing.route_ref(logits.float(), top_k, renormalize)
    eps = torch.finfo(logits.dtype).eps
    torch.testing.assert_close(routed.weights, weights, rtol=max(eps, 1e-5), atol=1e-6)
    # The same pairs in the same order as a stable sort of (expert, token).
    pairs = torch.arange(tokens * top_k, device=logits.device)
    expected = pairs[torch.argsort(ids.flatten(), stable=True)]
    assert torch.equal(routed.order.long(), expected)
    num_tiles = int(routed.tiles[3, 0])
    tiles, at = routed.tiles[:3, :num_tiles].T.tolist(), 0
    for expert, count in enumerate(torch.bincount(ids.flatten(), minlength=experts).tolist()):
        for begin in range(at, at + count, block_m):
            assert tiles.pop(0) == [expert, begin, min(begin + block_m, at + count)]
        at += count
    assert not tiles
    return num_tiles


def check_copies(case, load, dtype, device, renormalize=True, chosen=None):
    tokens, experts, top_k, hidden, n = case
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    logits = router_logits(tokens, experts, dtype, device, load)
    weights = make_weights(experts, hidden, n, dtype, device)
    args = x, logits, *weights, top_k, renormalize
    kept = [t.clone() for t in (x, logits)]
    copies = op.expert_copies(*args, chosen)
    plain = op.expert_copies_ref(*args)
    exact = op.expert_copies_ref(*(t.float() for t in args[:4]), top_k, renormalize)
    assert_error_at_most_twice_torch(copies, plain, exact, (case, load, chosen))
    if device == "cuda":
        assert torch.equal(copies, op.expert_copies(*args, chosen)), "not deterministic"
    assert torch.equal(x, kept[0]) and torch.equal(logits, kept[1])


def check_sum(tokens, top_k, size, dtype, device):
    copies = torch.randn(tokens, top_k, size, device=device).to(dtype)
    residual = torch.randn(tokens, size + 16, device=device).to(dtype)[:, :size]  # rows strided
    weight = (1 + 0.1 * torch.randn(size, device=device)).to(dtype)
    kept = residual.clone()
    ours = op.sum_copies_add_rms_norm(copies, residual, weight, EPS)
    plain = op.sum_copies_add_rms_norm_ref(copies, residual, weight, EPS)
    exact = op.sum_copies_add_rms_norm_ref(*(t.float() for t in (copies, residual, weight)), EPS)
    for name, *tensors in zip(("normed", "stream"), ours, plain, exact, strict=True):
        assert_error_at_most_twice_torch(*tensors, name)
    assert torch.equal(residual, kept)
    total = op.sum_copies(copies)
    assert_error_at_most_twice_torch(total, op.sum_copies_ref(copies), copies.float().sum(1), "sum")
    out = torch.empty_like(total)
    assert op.sum_copies(copies, out) is out and torch.equal(out, total)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("tokens", [1, 5, 17, 65, 100])
def test_routing_sorts_pairs_into_tiles(tokens, load, monkeypatch):
    poison_new_tensors(monkeypatch)
    shapes = (12, 5, torch.float16), (16, 8, torch.float32), (160, 6, torch.float32)
    for experts, top_k, dtype in shapes:
        logits = router_logits(tokens, experts, dtype, "cpu", load)
        check_routing(logits, top_k, top_k == 5, 16)


@pytest.mark.parametrize("tokens", [1, 8, 100])
def test_no_routing_takes_more_tiles_than_are_launched(tokens):
    for experts, top_k, block_m in ((4, 3, 16), (128, 8, 16), (8, 1, 64)):
        most = moe_routing.max_tiles(tokens * top_k, experts, block_m)
        for _ in range(20):
            ids = torch.rand(tokens, experts).topk(top_k).indices
            counts = torch.bincount(ids.flatten(), minlength=experts)
            assert (-(-counts // block_m)).sum() <= most


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("tokens", [3, 70])
def test_rows_that_are_not_finite_pick_experts_that_there_are(tokens, bad):
    """An index out of range would read any memory; the other rows must not notice."""
    logits = router_logits(tokens, 12, torch.float32, "cpu")
    expected = moe_routing.routing(logits, 4, True, 16)
    logits[1] = bad
    routed = moe_routing.routing(logits, 4, True, 16)
    assert sorted(routed.order.tolist()) == list(range(4 * tokens))
    experts, first, end = routed.tiles[:3, : int(routed.tiles[3, 0])]
    assert ((experts >= 0) & (experts < 12)).all() and int((end - first).sum()) == 4 * tokens
    others = torch.arange(tokens) != 1
    assert torch.equal(routed.weights[others], expected.weights[others])


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_copies_match_reference(case, load, monkeypatch):
    poison_new_tensors(monkeypatch)
    chosen = SWAPPED if load in ("random", "one_expert") else PLAIN
    check_copies(case, load, torch.float16, "cpu", load != "equal", chosen)


@pytest.mark.parametrize("chosen", [SWAPPED, PLAIN], ids=str)
def test_both_ways_to_multiply_match_reference(chosen):
    check_copies((17, 3, 2, 40, 56), "random", torch.float32, "cpu", chosen=chosen)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("case", [(17, 6, 2, 48, 40), (33, 2, 1, 136, 24)], ids=str)
def test_chosen_configuration_matches_reference(case, dtype, monkeypatch):
    poison_new_tensors(monkeypatch)
    check_copies(case, "random", dtype, "cpu")


@pytest.mark.parametrize("top_k", range(1, 9))
def test_any_number_of_experts_per_token(top_k):
    check_copies((5, 8, top_k, 32, 32), "random", torch.float16, "cpu", chosen=SWAPPED)
    check_sum(5, top_k, 48, torch.float16, "cpu")


@pytest.mark.parametrize("shape", [(1, 8, 64), (15, 2, 80), (17, 5, 33)], ids=str)
def test_sum_and_norm_match_reference(shape, monkeypatch):
    poison_new_tensors(monkeypatch)
    for dtype in (torch.float16, torch.float32):
        check_sum(*shape, dtype, "cpu")


def test_no_tokens():
    gate_up, down = make_weights(4, 32, 16, torch.float32, "cpu")
    copies = op.expert_copies(torch.empty(0, 32), torch.empty(0, 4), gate_up, down, 2, True)
    assert copies.shape == (0, 2, 32)
    normed, total = op.sum_copies_add_rms_norm(copies, torch.empty(0, 32), torch.ones(32), EPS)
    assert normed.shape == total.shape == (0, 32)


def test_configurations_grow_with_the_rows_of_an_expert():
    """Qwen3-30B-A3B on 132 SMs."""

    def found(tokens, **facts):
        return op.config(8 * tokens, 128, (768, 2048), torch.bfloat16, Gpu(**facts))

    assert [found(m).block_m for m in (1, 64, 256, 1024, 4096)] == [16, 16, 32, 64, 128]
    assert found(1).block_n == (32, 64)  # 8 tiles would not fill the SMs
    assert found(4096).block_n == (128, 128)
    assert found(4096, large_shared_memory=False).block_n == (64, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_matches_reference_on_gpu(case, load, monkeypatch):
    poison_new_tensors(monkeypatch)
    tokens, experts, top_k, hidden, _ = case
    check_copies(case, load, torch.bfloat16, "cuda")
    check_sum(tokens, top_k, hidden, torch.bfloat16, "cuda")
    logits = router_logits(tokens, experts, torch.float32, "cuda", load)
    for block_m in (16, 128):
        check_routing(logits, top_k, True, block_m)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types_match_reference_on_gpu(dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    for tokens in (1, 17, 100):
        check_copies((tokens, 16, 4, 520, 200), "random", dtype, "cuda", renormalize=False)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 100])
def test_graph_follows_new_routings(tokens):
    """Nothing of a routing is baked into a captured launch."""
    gate_up, down = make_weights(32, 256, 96, torch.bfloat16, "cuda")
    x = torch.randn(tokens, 256, device="cuda").bfloat16()
    logits = router_logits(tokens, 32, torch.bfloat16, "cuda")
    args = x, logits, gate_up, down, 4, True
    op.expert_copies(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copies = op.expert_copies(*args)
    for load in LOADS:
        logits.copy_(router_logits(tokens, 32, torch.bfloat16, "cuda", load))
        x.normal_()
        graph.replay()
        assert torch.equal(copies, op.expert_copies(*args)), load
