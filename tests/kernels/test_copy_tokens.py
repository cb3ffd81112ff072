"""Copies of K/V between blocks: the same bytes as one copy after the other."""

import numpy as np
import pytest
import torch

from nanovllm.kernels.copy_tokens import _wave_sizes, copy_tokens, copy_tokens_ref

# layers, blocks, block size, kv heads, head dim
SHAPES = [(3, 5, 4, 2, 8), (1, 4, 16, 3, 80), (2, 4, 17, 5, 64)]
GPU_SHAPES = [*SHAPES, (28, 70, 256, 8, 128), (4, 9, 256, 1, 96)]


def random_copies(num_copies, shape):
    rng = np.random.default_rng(num_copies)
    blocks = rng.integers(0, shape[1], (num_copies, 2))
    tokens = rng.integers(0, shape[2] + 1, num_copies)
    return torch.from_numpy(np.column_stack([blocks, tokens]).astype(np.int32))


def check(shape, copies, dtype, device):
    layers, *rest = shape
    pool = torch.randn(2, layers, *rest, device=device).to(dtype)
    expected = pool.clone()
    copy_tokens_ref(expected, copies)
    copy_tokens(pool, copies)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("num_copies", [1, 2, 7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copies_equal_those_made_one_by_one(shape, num_copies):
    check(shape, random_copies(num_copies, shape), torch.float16, "cpu")


@pytest.mark.parametrize(
    ("copies", "sizes"),
    [
        ([[0, 1, 3], [0, 2, 3], [4, 3, 1]], [3]),
        ([[0, 1, 3], [1, 2, 2]], [1, 1]),  # reads what was written
        ([[0, 1, 3], [2, 0, 3]], [1, 1]),  # writes what was read
        ([[0, 1, 3], [2, 1, 2], [3, 4, 1]], [1, 2]),  # writes what was written
        ([[0, 0, 3]], [1]),  # a block onto itself
    ],
    ids=str,
)
def test_copies_that_meet_are_made_in_order(copies, sizes):
    copies = torch.tensor(copies, dtype=torch.int32)
    assert _wave_sizes(copies) == sizes
    check(SHAPES[0], copies, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("num_copies", [1, 64])
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_copies_equal_those_made_one_by_one_on_gpu(shape, num_copies):
    check(shape, random_copies(num_copies, shape), torch.bfloat16, "cuda")


@pytest.mark.gpu
def test_layers_beyond_2_31_elements_on_gpu():
    """The last layer's V ends 2.6e9 elements after the first one's K begins."""
    pool = torch.zeros(2, 2, 5000, 256, 4, 128, dtype=torch.bfloat16, device="cuda")
    pool[:, :, 1] = 1
    pool[1, 1, 1] = 2
    copy_tokens(pool, torch.tensor([[1, 4999, 255]], dtype=torch.int32))
    assert pool[:, :, 4999, :255].amin((2, 3, 4)).tolist() == [[1, 1], [1, 2]]
    assert not pool[:, :, 4999, 255:].any() and not pool[:, :, 4998].any()
