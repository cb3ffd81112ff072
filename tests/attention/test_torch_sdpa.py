"""The reference backend against attention written out in fp64."""

import dataclasses

import pytest
import torch

from nanovllm.attention import select_backend, torch_sdpa
from nanovllm.attention.torch_sdpa import TorchSDPABackend
from nanovllm.kernels.qk_norm_rope import qk_norm_rope_ref
from tests.attention.cases import make_decode_step, make_step

HEADS = [(4, 4, 16), (4, 2, 16), (8, 1, 64), (6, 3, 20), (5, 5, 80)]


def prefill(step, backend=None):
    backend = backend or TorchSDPABackend()
    return backend.prefill(step.q, step.k, step.v, step.k_cache, step.v_cache, step.ctx)


def decode(step, backend=None):
    return (backend or TorchSDPABackend()).decode(step.q, step.k_cache, step.v_cache, step.ctx)


def assert_close(actual, step):
    torch.testing.assert_close(actual.double(), step.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("num_heads, num_kv_heads, head_dim", HEADS)
def test_prefill_without_cached_context(num_heads, num_kv_heads, head_dim):
    step = make_step(
        [(0, n) for n in (1, 7, 8, 9, 16, 33)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    assert step.ctx.block_tables is None
    assert_close(prefill(step), step)


def test_prefill_needs_no_cache_in_the_warm_up():
    step = make_step([(0, 5), (0, 3)])
    step.k_cache = step.v_cache = None
    assert_close(prefill(step), step)


@pytest.mark.parametrize("num_heads, num_kv_heads, head_dim", HEADS)
def test_prefill_reads_cached_context_through_block_tables(num_heads, num_kv_heads, head_dim):
    """Fresh, cached and one-token chunks together; the rest of the cache is NaN."""
    step = make_step(
        [(8, 1), (0, 5), (16, 16), (5, 9), (63, 2), (1, 1)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    assert_close(prefill(step), step)


def test_prefill_takes_strided_views_of_the_packed_projection():
    step = make_step([(0, 9), (0, 4)])
    qkv = torch.cat((step.q, step.k, step.v), 1)
    step.q, step.k, step.v = qkv.split([4, 2, 2], 1)
    assert not step.q.is_contiguous()
    assert_close(prefill(step), step)


@pytest.mark.parametrize("num_heads, num_kv_heads, head_dim", HEADS)
@pytest.mark.parametrize("context_lens", [[1], [8], [9], [40], [1, 7, 8, 9, 16, 17, 64, 65, 2]])
def test_decode(num_heads, num_kv_heads, head_dim, context_lens):
    step = make_decode_step(
        context_lens, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    assert_close(decode(step), step)


@pytest.mark.parametrize("group_bytes", [1, 4096, 8192, 16384])
def test_decode_in_groups_keeps_the_rows_in_order(group_bytes, monkeypatch):
    """However the batch is cut, and whatever lengths stand next to each other."""
    monkeypatch.setattr(torch_sdpa, "GROUP_BYTES", group_bytes)
    step = make_decode_step([3, 40, 1, 17, 17, 0, 64, 5, 33, 8, 0, 2])
    out = decode(step)
    assert_close(out, step)
    assert not out[5].any() and not out[10].any()


@pytest.mark.parametrize("context_lens", [[0], [0, 0], [5, 0], [0, 9, 0, 1]])
def test_decode_gives_zeros_for_padding_rows(context_lens):
    """Their block tables hold -1 and slot 0 may hold NaN: neither must show."""
    step = make_decode_step(context_lens)
    out = decode(step)
    assert_close(out, step)
    assert not out[torch.tensor(context_lens) == 0].any()


def test_decode_steps_do_not_see_each_other():
    """Indices and buffers are kept between layers and between steps of any shape."""
    backend = TorchSDPABackend()
    steps = [make_decode_step(lens) for lens in ([30, 4], [2], [70] * 9, [1, 50, 3], [30, 4])]
    for step in [*steps, *reversed(steps)]:
        for _ in range(2):
            assert_close(decode(step, backend), step)


def test_decode_of_layers_that_share_a_context():
    backend = TorchSDPABackend()
    step, other = make_decode_step([9, 20]), make_decode_step([9, 20])
    slots = [step.ctx.block_tables, other.ctx.block_tables]
    order = [torch.cat([t[t >= 0] for t in table]).long() for table in slots]
    k_cache = torch.zeros_like(other.k_cache)
    v_cache = torch.zeros_like(other.v_cache)
    k_cache[order[0]], v_cache[order[0]] = other.k_cache[order[1]], other.v_cache[order[1]]
    decode(step, backend)
    out = backend.decode(other.q, k_cache, v_cache, step.ctx)
    assert_close(out, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_plain_torch(dtype):
    """2x rule: the error against fp64 is at most twice that of attention written out in dtype."""
    for step, run in [
        (make_step([(0, 33), (0, 9)], dtype=dtype), prefill),
        (make_step([(16, 17), (3, 9)], dtype=dtype), prefill),
        (make_decode_step([40, 1, 17], dtype=dtype), decode),
    ]:
        exact = step.expected()
        plain = (step.expected(dtype).double() - exact).abs().max()
        assert (run(step).double() - exact).abs().max() <= 2 * plain + 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("context_lens", [[1], [9, 30, 1, 17], [0, 40, 0, 8]])
def test_fused_decode_equals_its_parts(dtype, has_norm, context_lens):
    """Norm, rotation and store as the kernels' reference has them, then decode; padding rows
    (slot -1) store nothing and give zeros."""
    num_heads, num_kv_heads, head_dim = 6, 2, 20
    step = make_decode_step(
        context_lens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    is_real = torch.tensor(context_lens) > 0
    slots = torch.full((len(context_lens),), -1, dtype=torch.int32)
    slots[is_real] = step.ctx.slot_mapping
    step.ctx = dataclasses.replace(step.ctx, slot_mapping=slots)
    qkv = torch.randn(len(context_lens), (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    norms = [(1 + 0.2 * torch.randn(head_dim)).to(dtype) if has_norm else None for _ in range(2)]
    angles = torch.rand(64, head_dim // 2) * 100
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)

    caches = step.k_cache.clone(), step.v_cache.clone()
    positions = (step.ctx.context_lens - 1).clamp(min=0)
    step.q, _, _ = qk_norm_rope_ref(
        qkv.clone(), *norms, positions, cos_sin, num_kv_heads, head_dim, 1e-6, *caches, slots
    )
    backend, _ = select_backend("torch", torch.device("cpu"), dtype, head_dim, 8)
    assert backend.fused_max_batch >= len(context_lens)
    expected = backend.decode(step.q, *caches, step.ctx)
    out = backend.fused_decode(qkv, *norms, cos_sin, 1e-6, step.k_cache, step.v_cache, step.ctx)
    torch.testing.assert_close(out, expected)
    for cache, wanted in zip((step.k_cache, step.v_cache), caches, strict=True):
        torch.testing.assert_close(cache, wanted, equal_nan=True)
    assert not out[~is_real].any()
