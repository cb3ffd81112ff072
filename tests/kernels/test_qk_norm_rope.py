"""QK norm + RoPE + KV store: in place, into the cache, and nowhere else."""

import pytest
import torch
from cases import POISON, assert_error_at_most_twice_torch, rope_table, to_float

from nanovllm.kernels import qk_norm_rope as op

# query heads, kv heads, head_dim, tokens, block_size
CASES = [
    (4, 2, 64, 15, 16),
    (3, 3, 80, 1, 16),
    (10, 5, 96, 17, 32),
    (8, 1, 128, 5, 16),
    (2, 1, 16, 40, 64),
]
OPTIONS = [{"norm": False}, {"store": False}, {"scaled": True}]
GPU_CASES = [
    (16, 8, 128, 1, 256),
    (16, 8, 128, 2000, 256),
    (64, 8, 128, 100, 16),
    (16, 8, 128, 129, 256),
    (9, 3, 80, 33, 16),
    (25, 5, 96, 17, 32),
    (4, 2, 64, 1025, 256),
    (8, 1, 256, 40, 64),
]


def check(case, dtype, device, norm=True, store=True, scaled=False):
    num_heads, num_kv_heads, head_dim, num_tokens, block_size = case
    width = (num_heads + 2 * num_kv_heads) * head_dim
    packed = torch.full((num_tokens, width + 16), POISON, device=device).to(dtype)
    packed[:, :width] = torch.randn(num_tokens, width, device=device)
    weights = [(1 + 0.1 * torch.randn(head_dim, device=device)).to(dtype) for _ in range(2)]
    q_norm, k_norm = weights if norm else (None, None)
    positions = torch.randint(0, 4000, (num_tokens,), device=device)
    num_blocks = num_tokens // block_size + 2
    slots = torch.randperm(num_blocks * block_size, device=device)[:num_tokens].to(torch.int32)
    slots[num_tokens // 2] = -1
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    cos_sin = rope_table(head_dim, device=device)
    squares = torch.rand(3, num_tokens + 5, device=device) * 64 if scaled else None

    def run(function, float_inputs):
        rows, wq, wk = [packed.clone(), q_norm, k_norm]
        k_cache = torch.full(shape, POISON, dtype=dtype, device=device)
        if float_inputs:
            rows, wq, wk, k_cache = to_float([rows, wq, wk, k_cache])
        v_cache = k_cache.clone()
        q, k, v = function(
            rows[:, :width], wq, wk, positions, cos_sin, num_kv_heads, head_dim, 1e-6,
            k_cache if store else None, v_cache if store else None, slots if store else None,
            squares, 128,
        )  # fmt: skip
        assert q.data_ptr() == rows.data_ptr()
        return q, k, v, k_cache, v_cache, rows

    ours, plain = run(op.qk_norm_rope, False), run(op.qk_norm_rope_ref, False)
    exact = run(op.qk_norm_rope_ref, True)
    for name, a, p, e in zip("q k v k_cache v_cache rows".split(), ours, plain, exact, strict=True):
        assert_error_at_most_twice_torch(a, p, e, (name, case))
    assert (ours[5][:, width:] == POISON).all(), "wrote beyond the row"
    if not scaled:  # v is copied, else multiplied by 1/rms
        assert torch.equal(ours[2], plain[2]), "v"
    if store:
        untouched = (plain[3] == POISON).all(-1).all(-1)
        assert (ours[3][untouched] == POISON).all() and (ours[4][untouched] == POISON).all()
        assert int((~untouched).sum()) == num_tokens - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case, dtype):
    check(case, dtype, "cpu")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options):
    check(CASES[0], torch.float32, "cpu", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_matches_reference_on_gpu(case):
    check(case, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_on_gpu(options):
    check(GPU_CASES[1], torch.bfloat16, "cuda", **options)
