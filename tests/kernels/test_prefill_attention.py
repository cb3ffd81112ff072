"""Prefill attention, packed and paged, against the reference under the 2x rule."""

import pytest
import torch
from cases import POISON, PagedCache, assert_error_at_most_twice_torch, to_float

from nanovllm.kernels import prefill_attention as op

# query heads, kv heads, head_dim, [(new tokens, keys)], block_size
CASES = [
    (4, 2, 64, [(15, 15), (1, 1), (17, 17)], 16),
    (3, 3, 80, [(33, 33)], 32),
    (9, 3, 16, [(20, 50), (1, 31), (3, 3)], 16),
    (5, 1, 96, [(16, 47), (40, 40)], 16),
    (8, 1, 16, [(5, 33), (31, 32)], 64),
]
GPU_CASES = [
    (16, 8, 128, [(1000, 1000), (1, 1), (255, 255), (257, 257)], 256),
    (16, 8, 128, [(100, 1000), (256, 512), (1, 700)], 256),
    (32, 8, 128, [(130, 2000), (17, 17)], 16),
    (9, 3, 80, [(129, 129), (60, 300)], 32),
    (25, 5, 96, [(64, 64), (128, 640)], 256),
    (8, 1, 64, [(127, 127), (300, 900)], 64),
    (4, 2, 256, [(200, 200), (65, 500)], 256),
    (64, 8, 128, [(15, 15), (40, 300)], 256),
]


def check(case, paged, dtype, device):
    num_heads, num_kv_heads, head_dim, lens, block_size = case
    q_lens, k_lens = zip(*lens, strict=True)

    def bounds(sizes):
        ends = torch.tensor(sizes).cumsum(0)
        return torch.cat([torch.zeros(1), ends]).to(device, torch.int32)

    cu_q, cu_k = bounds(q_lens), bounds(k_lens)
    wide = torch.randn(sum(q_lens), num_heads + 2 * num_kv_heads, head_dim, device=device).to(dtype)
    q, tables = wide[:, :num_heads], None
    if paged:
        cache = PagedCache(k_lens, num_kv_heads, head_dim, block_size, dtype, device)
        k, v, tables = cache.k, cache.v, cache.block_tables
    else:
        shape = (sum(k_lens), num_kv_heads, head_dim)
        k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    out = torch.full((sum(q_lens), num_heads, head_dim), POISON, dtype=dtype, device=device)
    scale = head_dim**-0.5
    op.prefill_attention(q, k, v, cu_q, cu_k, scale, tables, out)
    plain = op.prefill_attention_ref(q, k, v, cu_q, cu_k, scale, tables)
    exact = op.prefill_attention_ref(*to_float([q, k, v]), cu_q, cu_k, scale, tables)
    assert_error_at_most_twice_torch(out, plain, exact, (case, paged))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case, dtype, paged):
    check(case, paged, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_matches_reference_on_gpu(case, paged):
    check(case, paged, torch.bfloat16, "cuda")


@pytest.mark.gpu
def test_fp32_on_gpu():
    check(GPU_CASES[5], True, torch.float32, "cuda")
