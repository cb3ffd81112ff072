"""The draw: the right distribution, greedy rows untouched by it, broken rows marked."""

import pytest
import torch

from nanovllm.layers.sampler import Sampler

VOCABS = [1, 5, 127, 128, 129, 1000]


def sample(logits, temperature=1.0, seed=0, positions=None, **kwargs):
    num_rows = len(logits)
    if not isinstance(temperature, torch.Tensor):
        temperature = torch.full((num_rows,), float(temperature))
    if positions is None:
        positions = torch.arange(num_rows, dtype=torch.int32)
    seeds = torch.full((num_rows,), seed, dtype=torch.int64)
    return Sampler()(logits, temperature, seeds, positions, **kwargs)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_temperature_0_is_the_argmax(vocab, dtype):
    logits = torch.randn(20, vocab).to(dtype)
    expected = logits.argmax(-1)
    for kwargs in ({}, {"all_greedy": True}):
        token_ids = sample(logits, 0.0, **kwargs)
        assert torch.equal(token_ids, expected) and token_ids.dtype == torch.int64


def test_greedy_and_drawn_rows_share_a_batch():
    logits = torch.randn(100, 300)
    temperatures = torch.tensor([0.0, 1.0] * 50)
    token_ids = sample(logits, temperatures)
    assert torch.equal(token_ids[::2], logits[::2].argmax(-1))
    assert not torch.equal(token_ids[1::2], logits[1::2].argmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_logits_are_left_as_they_were(temperature):
    logits = torch.randn(4, 300)
    before = logits.clone()
    sample(logits, temperature)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("vocab", [6, 200])
def test_draws_follow_the_distribution(temperature, vocab):
    """Chi-square over the likely tokens and one bin of all others; p = 1e-6 by chance."""
    num_rows = 20_000
    row = 2 * torch.randn(vocab)
    probs = (row / temperature).double().softmax(-1)
    token_ids = sample(row.expand(num_rows, -1), temperature, seed=7)
    counts = token_ids.bincount(minlength=vocab).double()
    is_likely = probs * num_rows >= 20
    expected = torch.cat((probs[is_likely], probs[~is_likely].sum()[None])) * num_rows
    observed = torch.cat((counts[is_likely], counts[~is_likely].sum()[None]))
    if expected[-1] < 5:
        expected, observed = expected[:-1], observed[:-1]
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    freedom = max(len(expected) - 1, 1)
    # Wilson-Hilferty: the cube root of chi-square / freedom is nearly normal.
    deviation = (chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))
    assert deviation / (2 / (9 * freedom)) ** 0.5 < 4.75


def test_draws_of_neighbouring_positions_and_seeds_are_independent():
    """Pairs of draws fill the square: a shared stream would leave most cells empty."""
    num_rows = 20_000
    logits = torch.zeros(num_rows, 10)
    positions = torch.arange(num_rows, dtype=torch.int32)
    first = sample(logits, seed=3, positions=positions)
    for second in (
        sample(logits, seed=3, positions=positions + 1),
        sample(logits, seed=4, positions=positions),
    ):
        cells = (10 * first + second).bincount(minlength=100)
        assert cells.min() > 120 and cells.max() < 290


def test_a_draw_depends_on_seed_and_position_and_not_on_the_batch():
    logits = torch.randn(64, 500)
    positions = torch.randint(0, 1000, (64,), dtype=torch.int32)
    together = sample(logits, seed=11, positions=positions)
    order = torch.randperm(64)
    assert torch.equal(sample(logits[order], seed=11, positions=positions[order]), together[order])
    alone = [sample(logits[i : i + 1], seed=11, positions=positions[i : i + 1]) for i in range(64)]
    assert torch.equal(torch.cat(alone), together)
    assert not torch.equal(sample(logits, seed=12, positions=positions), together)


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-3])
def test_tiny_temperature_is_greedy(temperature):
    logits = torch.randn(50, 300)
    assert torch.equal(sample(logits, temperature), logits.argmax(-1))


def test_tokens_at_minus_infinity_are_never_drawn():
    logits = torch.zeros(2000, 300)
    logits[:, 10:] = -torch.inf
    assert sample(logits, 5.0).max() < 10


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("all_greedy", [False, True])
def test_row_without_a_finite_maximum_is_marked_and_its_neighbours_unharmed(
    temperature, all_greedy
):
    """R36: argmax over NaN is an index like any other, and its text looks like endless "!"."""
    if all_greedy and temperature:
        pytest.skip("no such call")
    logits = torch.randn(9, 300)
    expected = sample(logits, temperature, all_greedy=all_greedy)
    logits[1] = torch.nan
    logits[3] = -torch.inf
    logits[5, 17] = torch.inf
    logits[7, 200] = torch.nan
    token_ids = sample(logits, temperature, all_greedy=all_greedy)
    assert token_ids[1::2].tolist() == [-1] * 4
    assert torch.equal(token_ids[::2], expected[::2])
