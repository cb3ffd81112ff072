"""Decode attention: interpreted small cases and the same on the GPU, under the 2x rule."""

import pytest
import torch
from cases import POISON, PagedCache, assert_error_at_most_twice_torch, rope_table, to_float

from nanovllm.kernels import paged_attention as op

# query heads, kv heads, head_dim, block_size, context lengths
CASES = [
    (4, 2, 64, 16, [15, 0, 17]),
    (3, 3, 16, 16, [1]),
    (9, 3, 80, 32, [31, 32, 33]),
    (10, 2, 96, 16, [40, 3]),
    (8, 1, 128, 256, [255, 257]),
    (16, 1, 64, 64, [130]),
    (17, 1, 16, 16, [130, 40]),
    (40, 1, 32, 64, [300]),
]
GPU_CASES = [
    (16, 8, 128, 256, [1, 255, 256, 257, 0, 2048, 700]),
    (16, 8, 128, 256, [4000]),
    (32, 8, 128, 16, [100 + 37 * i for i in range(15)]),
    (4, 2, 64, 256, [513] * 17),
    (64, 8, 128, 64, [63, 64, 65, 1000]),
    (3, 3, 80, 32, [33, 700]),
    (34, 2, 128, 256, [900, 20]),
    (71, 1, 64, 256, [300, 1000]),
    (25, 5, 96, 256, [257, 100]),
    (4, 4, 256, 256, [300, 1000]),
    (16, 8, 128, 256, [100 + 7 * i for i in range(70)]),
    (16, 8, 128, 256, [1 + i % 300 for i in range(200)]),
    (16, 8, 128, 256, [2 * i for i in range(430)]),
    (16, 8, 128, 256, [9000, *(i % 90 for i in range(420))]),
    (32, 8, 128, 16, [3 * i % 200 for i in range(421)]),
    (6, 6, 64, 32, [5 * i % 150 for i in range(440)]),
    (25, 5, 96, 256, [700, *(i % 90 for i in range(430))]),
]


def check_decode(case, dtype, device):
    num_heads, num_kv_heads, head_dim, block_size, lens = case
    cache = PagedCache(lens, num_kv_heads, head_dim, block_size, dtype, device)
    wide = torch.randn(len(lens), num_heads + 2, head_dim, device=device).to(dtype)
    q = wide[:, :num_heads]  # rows strided, as in a view of packed qkv
    args = q, cache.k, cache.v, cache.block_tables, cache.context_lens, head_dim**-0.5
    out = torch.full((len(lens), num_heads, head_dim), POISON, dtype=dtype, device=device)
    workspace = op.decode_workspace(
        len(lens), num_heads, num_kv_heads, head_dim, block_size * cache.block_tables.shape[1],
        q.device,
    )  # fmt: skip
    workspace.partial.fill_(torch.nan)
    workspace.lse.fill_(torch.nan)
    op.paged_decode_attention(*args, out=out, workspace=workspace)
    exact = op.paged_decode_attention_ref(*to_float(args))
    plain = op.paged_decode_attention_ref(*args)
    assert_error_at_most_twice_torch(out, plain, exact, case)
    assert (out[cache.context_lens == 0] == 0).all()
    assert (workspace.counters == 0).all()
    again = op.paged_decode_attention(*args, workspace=workspace)
    assert torch.equal(out, again), "not deterministic"


def check_fused(case, dtype, device, norm):
    num_heads, num_kv_heads, head_dim, block_size, lens = case
    cache = PagedCache(lens, num_kv_heads, head_dim, block_size, dtype, device)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(len(lens), width, device=device).to(dtype)
    norms = [(1 + 0.1 * torch.randn(head_dim, device=device)).to(dtype) for _ in range(2)]
    q_norm, k_norm = norms if norm else (None, None)
    cos_sin = rope_table(head_dim, device=device)
    tables, lens_tensor = cache.block_tables, cache.context_lens

    def call(function, k, v, inputs):
        qkv_, q_norm_, k_norm_ = inputs
        return function(
            qkv_, q_norm_, k_norm_, cos_sin, k, v, tables, lens_tensor, head_dim**-0.5, 1e-6
        )

    kept = qkv.clone()
    ours, plain = (cache.k.clone(), cache.v.clone()), (cache.k.clone(), cache.v.clone())
    exact_cache = cache.k.float(), cache.v.float()
    inputs = qkv, q_norm, k_norm
    out = call(op.fused_decode_attention, *ours, inputs)
    plain_out = call(op.fused_decode_attention_ref, *plain, inputs)
    exact = call(op.fused_decode_attention_ref, *exact_cache, to_float(inputs))
    assert_error_at_most_twice_torch(out, plain_out, exact, case)
    assert torch.equal(qkv, kept)
    assert_error_at_most_twice_torch(ours[0], plain[0], exact_cache[0], "k_cache")
    changed = (ours[0] != cache.k).any(-1).any(-1)
    assert int(changed.sum()) <= int((lens_tensor > 0).sum()), "wrote outside the newest slots"
    assert torch.equal(ours[1], plain[1]), "v_cache"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode_matches_reference(case, dtype):
    check_decode(case, dtype, "cpu")


@pytest.mark.parametrize("keys", [32, 64])
@pytest.mark.parametrize("heads", [2, 4, 16])
@pytest.mark.parametrize("case", [*CASES, (16, 8, 32, 32, [31, 70, 33])], ids=str)
def test_decode_of_several_heads_a_program(case, heads, keys, monkeypatch):
    """As many as divide the kv heads and fit a tile of 16 query heads; split keys too."""
    monkeypatch.setattr(op, "_CONFIGS", {1 << 30: (4, keys, 4, 2, heads)})
    check_decode(case, torch.float32, "cpu")


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_fused_decode_stores_the_new_token_and_attends(case, norm):
    check_fused(case, torch.float32, "cpu", norm)


def test_a_batch_that_fills_the_gpu_is_not_split():
    splits = [op.decode_splits(b, 8, 4096, 132) for b in (1, 2, 8, 16, 32, 64, 256, 512)]
    assert splits == [64, 32, 8, 2, 2, 1, 1, 1]
    assert op.decode_splits(256, 8, 40960, 132) == 8, "one long context must not run alone"


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_decode_matches_reference_on_gpu(case):
    check_decode(case, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES[:10], ids=str)
def test_fused_decode_on_gpu(case):
    check_fused(case, torch.bfloat16, "cuda", case[0] != 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_decode_in_other_dtypes_on_gpu(dtype):
    check_decode(GPU_CASES[3], dtype, "cuda")
    check_fused(GPU_CASES[0], dtype, "cuda", True)


@pytest.mark.gpu
def test_decode_reads_a_cache_beyond_2_31_elements():
    """Offsets are 64-bit: block ids times the block stride pass 2**31 here (needs 18 GB)."""
    num_blocks, block_size = 4200, 256
    shape = (num_blocks, block_size, 16, 128)
    k = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    v = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    ids = [num_blocks - 1, num_blocks - 2]
    k[ids], v[ids] = k[ids].normal_(), v[ids].normal_()
    tables = torch.tensor([ids], dtype=torch.int32, device="cuda")
    lens = torch.tensor([300], dtype=torch.int32, device="cuda")
    q = torch.randn(1, 16, 128, device="cuda").bfloat16()
    out = op.paged_decode_attention(q, k, v, tables, lens, 128**-0.5)
    small = torch.tensor([[1, 0]], dtype=torch.int32, device="cuda")
    k2, v2 = k[ids].flip(0).contiguous(), v[ids].flip(0).contiguous()
    assert torch.equal(out, op.paged_decode_attention(q, k2, v2, small, lens, 128**-0.5))
