"""A million draws each: the tokens follow the distribution that the parameters describe.

Expected probabilities come from the definitions in float64, not from the code under test.
"""

import numpy as np
import pytest
import torch

from nanovllm.kernels import sample as sample_kernel
from nanovllm.layers import logits as op
from nanovllm.layers.logits import LogitsParams

VOCAB, NUM_DRAWS, BATCH = 300, 1_000_000, 500
TEMPERATURE = 0.8
KNOBS = {
    "plain": {},
    "top_k": {"top_k": 40},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.02},
}


def make_row():
    """Three tiles of the draw, all with likely tokens in them."""
    return 1.5 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(5))


def expected_probs(row, top_k=0, top_p=1.0, min_p=0.0):
    """float64 [vocab], 0 where the definition excludes a token; one knob at a time."""
    probs = (row.double() / TEMPERATURE).softmax(0)
    ordered, token_ids = probs.sort(descending=True)
    num_kept = VOCAB
    if top_k:
        num_kept = top_k
    elif top_p < 1:
        num_kept = 1 + int((ordered.cumsum(0) < top_p).sum())
    elif min_p:
        num_kept = int((ordered >= min_p * ordered[0]).sum())
    kept = torch.zeros_like(probs).scatter(0, token_ids[:num_kept], 1)
    assert top_k + min_p + (1 - top_p) == 0 or 10 < num_kept < 200  # else nothing is tested
    return probs * kept / (probs * kept).sum()


def make_params(top_k=0, top_p=1.0, min_p=0.0):
    return LogitsParams(
        torch.tensor([TEMPERATURE]),
        min_p=torch.tensor([min_p]),
        top_k=torch.tensor([top_k]),
        top_p=torch.tensor([top_p], dtype=torch.float64),
        top_plan=op.plan_top([top_k], [top_p], VOCAB),
    )


def count_draws(row, draw_at, num_draws, batch, device):
    """int64 [vocab] on the CPU; every draw has its own seed and position."""
    counts = torch.zeros(VOCAB + 1, dtype=torch.int64, device=device)
    rows, temperatures = row.to(device).expand(batch, -1), draw_at.to(device).repeat(batch)
    for start in range(0, num_draws, batch):
        index = torch.arange(start, start + batch, device=device)
        seeds, positions = index // 7 * 6_700_417 - 2**40, index % 7
        token_ids = sample_kernel.sample(rows, temperatures, seeds, positions)
        counts += (token_ids + 1).bincount(minlength=VOCAB + 1)
    assert counts[0] == 0, "a draw without a token"
    return counts[1:].cpu()


def p_value(counts, probs):
    """Of the chi-square test; cells of fewer than 10 expected draws are one cell."""
    expected = probs * counts.sum()
    is_rare = expected < 10
    seen, expected = (
        torch.cat((x[~is_rare], x[is_rare].sum()[None])) for x in (counts.double(), expected)
    )
    seen, expected = seen[expected > 0], expected[expected > 0]
    statistic = ((seen - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2), statistic / 2))


def check(knob, device, batch):
    row = make_row()
    probs = expected_probs(row, **KNOBS[knob])
    filtered = row[None].clone()
    draw_at = op.process_logits(filtered, make_params(**KNOBS[knob]))
    counts = count_draws(filtered, draw_at, NUM_DRAWS, batch, device)
    assert counts[probs == 0].sum() == 0
    assert p_value(counts, probs) > 1e-4


def fast_philox(seed, c0, c1, c2):
    """The noise of kernels/sample.py bit by bit, in place: a million draws take 128 million."""
    keys = [(seed.numpy() >> shift).astype(np.uint64) & 0xFFFFFFFF for shift in (0, 32)]
    x0, x1 = (x.copy() for x in np.broadcast_arrays(c0.numpy(), c1.numpy()))
    x0, x1 = x0.view(np.uint64), x1.view(np.uint64)
    x2, x3, high = np.full_like(x0, c2), np.zeros_like(x0), np.empty_like(x0)
    for i in range(10):
        x0 *= 0xD2511F53
        x2 *= 0xCD9E8D57
        for x, product, key, step in ((x1, x2, 0, 0x9E3779B9), (x3, x0, 1, 0xBB67AE85)):
            x ^= (keys[key] + i * step) & 0xFFFFFFFF
            x ^= np.right_shift(product, 32, out=high)
            product &= 0xFFFFFFFF
        x0, x1, x2, x3 = x1, x2, x3, x0
    return torch.from_numpy(x0.view(np.int64))


def test_fast_noise_is_the_noise():
    seeds = torch.randint(-(2**63), 2**63 - 1, (64, 1))
    index, positions = torch.arange(128).expand(64, -1), torch.arange(64)[:, None]
    for stream in (1, 2):
        noise = sample_kernel.philox_ref(seeds, index, positions, stream)
        assert torch.equal(fast_philox(seeds, index, positions, stream), noise)


def test_a_wrong_distribution_is_found():
    """The test's own power: one token in 300 off by a tenth."""
    probs = expected_probs(make_row())
    generator = torch.Generator().manual_seed(0)
    wrong = probs.clone()
    wrong[int(probs.argsort()[-20])] *= 1.1
    for drawn, is_right in ((probs, True), (wrong / wrong.sum(), False)):
        token_ids = torch.multinomial(drawn, NUM_DRAWS, replacement=True, generator=generator)
        counts = token_ids.bincount(minlength=VOCAB)
        assert (p_value(counts, probs) > 1e-4) == is_right


@pytest.mark.parametrize("knob", KNOBS)
def test_draws_follow_the_distribution(knob, monkeypatch):
    monkeypatch.setattr(sample_kernel, "philox_ref", fast_philox)
    check(knob, "cpu", BATCH)


@pytest.mark.gpu
@pytest.mark.parametrize("knob", KNOBS)
def test_draws_on_the_gpu_follow_the_distribution(knob):
    check(knob, "cuda", 50_000)
