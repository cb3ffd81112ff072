"""Every backend that a GPU can run, against attention written out, under the 2x rule."""

import pytest
import torch

from nanovllm.attention import _PREFILL, select_backend
from tests.attention.cases import make_decode_step, make_step

pytestmark = pytest.mark.gpu
NAMES = [backend.name for backend in _PREFILL]


@pytest.fixture(params=NAMES)
def run(request):
    """run(step) -> its output by the backend of this parameter; skips what it cannot run."""

    def run(step):
        block_size, head_dim = step.k_cache.size(1), step.q.size(-1)
        try:
            backend, _ = select_backend(
                request.param, step.q.device, step.q.dtype, head_dim, block_size
            )
        except ValueError as error:
            pytest.skip(str(error))
        if step.ctx.is_prefill:
            return backend.prefill(step.q, step.k, step.v, step.k_cache, step.v_cache, step.ctx)
        return backend.decode(step.q, step.k_cache, step.v_cache, step.ctx)

    return run


def assert_within_2x(actual, step):
    """Padding rows aside, whose values are of no use."""
    exact, plain = step.expected(), step.expected(step.q.dtype).double()
    is_real = exact.abs().amax((1, 2)) > 0
    error = (actual.double() - exact)[is_real].abs().max()
    assert error <= 2 * (plain - exact)[is_real].abs().max() + 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(16, 8, 128), (4, 4, 64), (7, 1, 128)])
@pytest.mark.parametrize(
    "cached_and_new",
    [
        [(0, 1)],
        [(0, n) for n in (1, 255, 256, 257, 63, 640)],
        [(256, 1), (0, 5), (512, 300), (255, 2), (257, 64), (1, 1)],
    ],
)
def test_prefill(dtype, heads, cached_and_new, run):
    num_heads, num_kv_heads, head_dim = heads
    step = make_step(
        cached_and_new, num_heads, num_kv_heads, head_dim, 256, dtype, device="cuda", poison=0.0
    )
    assert_within_2x(run(step), step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(16, 8, 128), (4, 4, 64), (7, 1, 128)])
@pytest.mark.parametrize("context_lens", [[1], [256], [1, 255, 256, 257, 1000, 17, 0], [513] * 40])
def test_decode(dtype, heads, context_lens, run):
    num_heads, num_kv_heads, head_dim = heads
    step = make_decode_step(
        context_lens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=256,
        dtype=dtype,
        device="cuda",
        poison=0.0,
    )
    step.ctx.block_tables.clamp_(min=0)  # as the engine pads them
    out = run(step)
    assert out.isfinite().all()
    assert_within_2x(out, step)


def test_torch_backend_on_the_gpu_does_not_read_foreign_slots():
    """As on the CPU: NaN in slots of nobody must not show."""
    for step in (
        make_step([(8, 1), (0, 5), (5, 9)], device="cuda"),
        make_decode_step([9, 40, 0, 1], device="cuda"),
    ):
        backend, _ = select_backend("torch", step.q.device, step.q.dtype, 16, 8)
        if step.ctx.is_prefill:
            out = backend.prefill(step.q, step.k, step.v, step.k_cache, step.v_cache, step.ctx)
        else:
            out = backend.decode(step.q, step.k_cache, step.v_cache, step.ctx)
        torch.testing.assert_close(out.double(), step.expected(), atol=2e-6, rtol=1e-5)
