"""Draw one token a row from logits, at a temperature, with noise that is a function of the row.

Two-level Gumbel race over tiles of 128 logits: a tile wins with probability exp(its log-sum-exp),
then a logit within it. This is exact, reads the logits once plus one tile a row, and needs 100
times fewer random numbers than noise on every logit:

    scores  = max/T + log(sum(exp((x - max)/T)))   per tile      one pass over the logits
    tile    = argmax(scores + noise(stream 1))     per row
    token   = argmax(x/T + noise(stream 2))        in the tile

Noise comes from Philox-4x32-10 with key = the row's seed and counter = (index, position, stream),
so that a draw depends on seed, position and logits, never on the batch. The reference uses the same
bits: CPU and GPU draw the same token, up to the last bits of exp and log in a near tie.
"""

from typing import Any

import torch

from nanovllm.kernels import launch
from nanovllm.kernels.launch import gdc_launch_dependents, gdc_wait, tl, triton

TILE = 128  # logits; part of what a seed means, so the same on every device and at every batch
_MASK = 0xFFFFFFFF
_MIN_TEMPERATURE = 1e-10  # keeps 1/T finite; 0 itself means argmax


def philox_ref(
    seed: torch.Tensor, c0: torch.Tensor, c1: torch.Tensor, c2: int, rounds: int = 10
) -> torch.Tensor:
    """First word of Philox-4x32 for key seed and counter (c0, c1, c2, 0): int64 in [0, 2**32).

    A product of two words may wrap around int64: its low 64 bits, which are used, stay right.
    """
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1 = torch.broadcast_tensors(c0 & _MASK, c1 & _MASK)
    x0, x1, x2, x3 = c0, c1, torch.full_like(c0, c2), torch.zeros_like(c0)
    for _ in range(rounds):
        product0, product2 = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x2 = ((product2 >> 32) & _MASK) ^ x1 ^ k0, ((product0 >> 32) & _MASK) ^ x3 ^ k1
        x1, x3 = product2 & _MASK, product0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return x0


def gumbel_ref(
    seeds: torch.Tensor, positions: torch.Tensor, index: torch.Tensor, stream: int
) -> torch.Tensor:
    """Gumbel noise of each (row, index): fp32 [B, n]. index: int64 [B, n] or [n]."""
    bits = philox_ref(seeds.long()[:, None], index, positions.long()[:, None], stream)
    # The exponential variate is taken from the small side of the uniform, where fp32 is exact, and
    # is never 0 nor infinite: either would force or forbid a token once in 2**24 draws.
    uniform = (bits >> 1).float() * 2.0**-31 + 2.0**-32
    uniform = uniform.clamp(max=1.0 - 2.0**-24)
    series = uniform * (1.0 + uniform * (0.5 + uniform * 0.3333333))
    exponential = torch.where(uniform < 0.004, series, -torch.log(1.0 - uniform))
    return -torch.log(exponential)


def race_ref(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first_token: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens, and with which values they won."""
    vocab = logits.shape[1]
    num_tiles = launch.cdiv(vocab, TILE)
    x = logits.float()
    if vocab % TILE:
        x = torch.nn.functional.pad(x, (0, num_tiles * TILE - vocab), value=-torch.inf)
    x = x.view(-1, num_tiles, TILE)
    drawn = (temperatures > 0)[:, None]
    temperature = torch.where(drawn, temperatures[:, None].clamp(min=_MIN_TEMPERATURE), 1.0)
    tile_max = x.amax(2)
    shifted = x - tile_max.clamp(min=-1e30)[..., None]
    tile_sum = torch.exp2(shifted * (1.4426950408889634 / temperature)[..., None]).sum(2)
    score = torch.where(drawn, tile_max / temperature + torch.log(tile_sum), tile_max)
    is_masked = (tile_max.amax(1) == -torch.inf) & (tile_sum == 0).all(1)
    finite = torch.isfinite(tile_sum).all(1) & torch.isfinite(tile_max.amax(1))
    tiles = first_token // TILE + torch.arange(num_tiles, device=x.device)
    score = torch.where(drawn, score + gumbel_ref(seeds, positions, tiles, 1), score)
    tile = score.argmax(1, keepdim=True)
    value = torch.where(finite, score.gather(1, tile)[:, 0], torch.inf)
    value = torch.where(is_masked, -torch.inf, value)
    within = x.gather(1, tile[..., None].expand(-1, 1, TILE))[:, 0]
    index = first_token + tile * TILE + torch.arange(TILE, device=x.device)
    noisy = within / temperature + gumbel_ref(seeds, positions, index, 2)
    token = first_token + tile[:, 0] * TILE + torch.where(drawn, noisy, within).argmax(1)
    return torch.where(finite, token, -1), value


def sample_ref(*args: Any) -> torch.Tensor:
    """The tokens of `race_ref`."""
    return race_ref(*args)[0]


@triton.jit
def _gumbel(seed, index, position, stream):
    zero = index * 0
    bits, _, _, _ = tl.philox(
        seed,
        index.to(tl.uint32),
        (zero + position).to(tl.uint32),
        (zero + stream).to(tl.uint32),
        zero.to(tl.uint32),
        10,
    )
    uniform = (bits >> 1).to(tl.int32).to(tl.float32) * (1.0 / 2147483648.0) + (1.0 / 4294967296.0)
    uniform = tl.minimum(uniform, 0.99999994)
    series = uniform * (1.0 + uniform * (0.5 + uniform * 0.3333333))
    return -tl.log(tl.where(uniform < 0.004, series, -tl.log(1.0 - uniform)))


@triton.jit
def _tile_scores_kernel(
    logits_ptr, temperatures_ptr, scores_ptr, row_stride, vocab, num_tiles,
    TILES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """TILES scores of one row. No noise here: in this layout each thread would repeat it 16 times.
    A NaN or infinity among the logits makes the sum NaN, which passes on to the score."""
    row = tl.program_id(1)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    index = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    t = tl.load(temperatures_ptr + row)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x_ptr = logits_ptr + row.to(tl.int64) * row_stride + index
    x = tl.load(x_ptr, mask=index < vocab, other=-float("inf")).to(tl.float32)
    temperature = tl.where(t > 0.0, tl.maximum(t, 1e-10), 1.0)
    tile_max = tl.max(x, 1)
    shifted = x - tl.maximum(tile_max, -1e30)[:, None]
    tile_sum = tl.sum(tl.exp2(shifted * (1.4426950408889634 / temperature)), 1)
    score = tl.where(t > 0.0, tile_max / temperature + tl.log(tile_sum), tile_max)
    score = tl.where(tile_sum == tile_sum, score, tile_sum)
    tl.store(scores_ptr + row * num_tiles + tile, score, mask=tile < num_tiles)


@triton.jit
def _draw_kernel(
    logits_ptr, temperatures_ptr, seeds_ptr, positions_ptr, scores_ptr, out_ptr, values_ptr,
    row_stride, vocab, num_tiles, first_token,
    BLOCK_TILES: tl.constexpr, TILE: tl.constexpr, SHARD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: draw the tile, then the token in it. The last kernel of a step, it releases no
    successor early, so that the next step may read its state ahead of any wait."""
    row = tl.program_id(0)
    t = tl.load(temperatures_ptr + row)
    temperature = tl.where(t > 0.0, tl.maximum(t, 1e-10), 1.0)
    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + row).to(tl.int32)
    tile = tl.arange(0, BLOCK_TILES)
    within = tl.arange(0, TILE)
    tile_noise = tl.zeros([BLOCK_TILES], tl.float32)
    if t > 0.0:
        tile_noise = _gumbel(seed, first_token // TILE + tile, position, 1)
    if PDL:
        gdc_wait()
    lowest = -float("inf")
    score = tl.load(scores_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=lowest)
    score = tl.where(score == score, score, float("inf"))
    highest = tl.max(score, 0)
    value, winner = tl.max(score + tile_noise, 0, return_indices=True)
    index = winner * TILE + within
    x_ptr = logits_ptr + row.to(tl.int64) * row_stride + index
    x = tl.load(x_ptr, mask=index < vocab, other=lowest).to(tl.float32)
    if t > 0.0:
        x = x / temperature + _gumbel(seed, first_token + index, position, 2)
    _, best = tl.max(x, 0, return_indices=True)
    finite = (highest > lowest) & (highest < float("inf"))
    token = tl.where(finite, first_token + winner * TILE + best, -1)
    tl.store(out_ptr + row, token.to(out_ptr.dtype.element_ty))
    if SHARD:
        tl.store(values_ptr + row, value)


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    values: torch.Tensor | None = None,
    first_token: int = 0,
) -> torch.Tensor:
    """One token a row, from softmax(logits / temperature).

    logits: fp32, bf16 or fp16 [B, V], rows at any stride.
    temperatures: fp32 [B]; 0 gives the largest logit, the lowest index among equals.
    seeds: int64 or int32 [B] noise key of each row.
    positions: int64 or int32 [B] a counter that no row repeats: the position of the token to draw.
    first_token: these are the logits of the vocabulary from this one on, a multiple of TILE.
    values: fp32 [B] to write: with which value a row's token won the race. Of the draws from parts
        of a vocabulary the one with the largest value is the draw from all of it; -inf where all
        is masked, inf where a logit is not finite.
    Returns int64 [B]; -1 in rows whose largest logit is not finite (NaN, infinity, all masked).
    """
    batch, vocab = logits.shape
    assert first_token % TILE == 0, first_token
    if not launch.use_triton(logits) or batch == 0:
        tokens, won_with = race_ref(logits, temperatures, seeds, positions, first_token)
        if values is not None:
            values.copy_(won_with)
        return tokens
    out = torch.empty(batch, dtype=torch.int64, device=logits.device)
    assert temperatures.is_contiguous() and seeds.is_contiguous() and positions.is_contiguous()
    num_tiles = launch.cdiv(vocab, TILE)
    scores = torch.empty((batch, num_tiles), dtype=torch.float32, device=logits.device)
    tiles_per_program = 32 if batch > 8 else 8  # few rows: more, smaller programs
    pdl = launch.gpu(logits.device).pdl
    _tile_scores_kernel[(launch.cdiv(num_tiles, tiles_per_program), batch)](
        logits, temperatures, scores, logits.stride(0), vocab, num_tiles,
        TILES=tiles_per_program, TILE=TILE, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    _draw_kernel[(batch,)](
        logits, temperatures, seeds, positions, scores, out, values, logits.stride(0), vocab,
        num_tiles, first_token,
        BLOCK_TILES=launch.next_power_of_2(num_tiles), TILE=TILE, SHARD=values is not None, PDL=pdl,
        num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return out
