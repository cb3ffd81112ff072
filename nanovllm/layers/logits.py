"""Change logits as sampling parameters ask, before the draw.

Owns the order of operations of rows that ask for more than a temperature:

    1. biases and bans (logit_bias, min_tokens, bad_words, allowed_token_ids, grammar bitmask)
    2. penalties (repetition, then frequency, then presence)
    3. temperature
    4. min_p, 5. top_k, 6. top_p, each over what the one before it left
    7. the draw, kernels/sample.py, which treats -inf as probability 0

It does not know requests: each parameter is a tensor with a value per row, each function changes
its logits in place, and what is off for a row leaves the row's bits as they are. A row's result
does not depend on the other rows. Nothing here waits for the device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

MAX_CHUNK = 1 << 23  # logits whose temporaries live at a time: 55 rows of 151,936, up to 420 MB
MAX_CANDIDATES = 1024  # rows with a top_k up to this take that many logits instead of a sort


class History(NamedTuple):
    """The tokens of each row so far: prompt, then output."""

    token_ids: torch.Tensor  # int32 [n, width], anything after the row's length
    prompt_lens: torch.Tensor  # int32 [n]
    lens: torch.Tensor  # int32 [n] >= 1, prompt and output


class Penalties(NamedTuple):
    presence: torch.Tensor  # float32 [n], 0 is off
    frequency: torch.Tensor  # float32 [n], 0 is off
    repetition: torch.Tensor  # float32 [n] > 0, 1 is off


class Biases(NamedTuple):
    """Entry i is for one token of one row; entries for the same token add up."""

    rows: torch.Tensor  # int64 [m]
    token_ids: torch.Tensor  # int64 [m]
    values: torch.Tensor  # float32 [m], -inf bans


class BadWords(NamedTuple):
    """Sequence i bans its last token where the row's output ends with all tokens before it."""

    rows: torch.Tensor  # int64 [m]
    prefixes: torch.Tensor  # int32 [m, width] the tokens before the last, aligned to the right
    prefix_lens: torch.Tensor  # int64 [m]
    last_ids: torch.Tensor  # int64 [m]


class TopPlan(NamedTuple):
    """Which rows the k largest logits are enough for; made by `plan_top`."""

    num_candidates: int  # largest top_k of the rows that need no sort; 0: no such row
    sorted_rows: torch.Tensor | None  # int64 [r] rows that need one; None: no such row


@dataclass(frozen=True)
class LogitsParams:
    """What n rows ask for. None: no row asks for it, and it costs nothing."""

    temperatures: torch.Tensor  # float32 [n], 0 is greedy and leaves the logits unscaled
    history: History | None = None  # needed by penalties and bad_words
    biases: Biases | None = None  # logit_bias, and -inf for the stop ids before min_tokens
    bad_words: BadWords | None = None
    allowed: tuple[torch.Tensor, torch.Tensor] | None = None  # int64 [m] rows, int64 [m] token ids
    bitmask: torch.Tensor | None = None  # int32 [n, ceil(vocab / 32)]
    penalties: Penalties | None = None
    min_p: torch.Tensor | None = None  # float32 [n], 0 is off
    top_k: torch.Tensor | None = None  # int64 [n], 0 is off; needed by top_p as well
    top_p: torch.Tensor | None = None  # float64 [n] as the caller wrote it, 1 is off
    top_plan: TopPlan = TopPlan(0, None)


def process_logits(logits: torch.Tensor, params: LogitsParams) -> torch.Tensor:
    """Steps 1 to 6 of the module's order, in place.

    logits: float32 [n, vocab], contiguous; afterwards -inf where a token may not be drawn. A row
        that came with a NaN or +inf keeps a NaN, and one without any token left is all -inf, so
        that the draw marks both as broken.
    returns: float32 [n] the temperature to draw with, 1 or, for greedy rows, 0
    """
    # A mask could hide a NaN and leave a clean distribution of what is not the model's.
    is_broken = ~(logits.amax(1) < torch.inf)
    if params.biases is not None:
        add_biases(logits, params.biases)
    if params.bad_words is not None:
        assert params.history is not None, "bad_words without a history"
        add_biases(logits, find_bad_words(params.history, params.bad_words))
    if params.allowed is not None:
        keep_allowed(logits, *params.allowed)
    if params.bitmask is not None:
        apply_bitmask(logits, params.bitmask)
    if params.penalties is not None:
        assert params.history is not None, "penalties without a history"
        apply_penalties(logits, params.history, params.penalties)
    scale_by_temperature(logits, params.temperatures)
    if params.min_p is not None:
        apply_min_p(logits, params.min_p)
    if params.top_k is not None:
        apply_top_k_top_p(logits, params.top_k, params.top_p, params.top_plan)
    logits[:, 0] = torch.where(is_broken, torch.nan, logits[:, 0])
    return (params.temperatures > 0).float()


def _row_chunks(logits: torch.Tensor, max_chunk: int | None = None) -> Iterator[slice]:
    """Slices of rows of at most max_chunk (None: MAX_CHUNK) logits, or of one row."""
    num_rows = max((max_chunk or MAX_CHUNK) // logits.size(1), 1)
    for start in range(0, logits.size(0), num_rows):
        yield slice(start, start + num_rows)


# -- biases and bans -------------------------------------------------------------------------------


def add_biases(logits: torch.Tensor, biases: Biases) -> None:
    """logits: float32 [n, vocab]; each entry is added, in the same order on every run."""
    logits.index_put_((biases.rows, biases.token_ids), biases.values, accumulate=True)


def pack_bad_words(rows: Sequence[Sequence[Sequence[int]]]) -> BadWords:
    """Host tensors for the banned token sequences, none of them empty, of each row."""
    flat = [(row, words) for row, sequences in enumerate(rows) for words in sequences]
    width = max((len(words) - 1 for _, words in flat), default=0)
    padded = [[0] * (width + 1 - len(words)) + list(words[:-1]) for _, words in flat]
    return BadWords(
        torch.tensor([row for row, _ in flat], dtype=torch.int64),
        torch.tensor(padded, dtype=torch.int32).view(len(flat), width),
        torch.tensor([len(words) - 1 for _, words in flat], dtype=torch.int64),
        torch.tensor([words[-1] for _, words in flat], dtype=torch.int64),
    )


def find_bad_words(history: History, bad_words: BadWords) -> Biases:
    """-inf for the last token of the sequences that it would complete, 0 for the others.

    As vLLM, and unlike transformers, a sequence must lie in the output as a whole: the prompt may
    end with its beginning. History and sequences on the same device.

        history    p p p a b c |        lens = 6, prompt_lens = 3
        prefixes       0 0 b c          width = 4, prefix_lens = 2: its columns 2 and 3 count
    """
    rows, prefixes, prefix_lens, last_ids = bad_words
    columns = torch.arange(-prefixes.size(1), 0, device=rows.device)
    lens = history.lens[rows]
    at = (lens[:, None] + columns).clamp(min=0)
    is_equal = history.token_ids[rows[:, None], at] == prefixes
    is_equal |= columns < -prefix_lens[:, None]
    is_match = is_equal.all(1) & (lens - history.prompt_lens[rows] >= prefix_lens)
    return Biases(rows, last_ids, torch.where(is_match, -torch.inf, 0.0))


def keep_allowed(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Only the tokens of the entries (row, token id) stay, in rows that have any.

    logits: float32 [n, vocab]; rows, token_ids: int64 [m]
    """
    has_any = torch.zeros(len(logits), dtype=torch.bool, device=rows.device)
    is_banned = has_any.index_fill(0, rows, True)[:, None].repeat(1, logits.size(1))
    is_banned[rows, token_ids] = torch.zeros((), dtype=torch.bool, device=rows.device)
    logits.masked_fill_(is_banned, -torch.inf)


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Only tokens whose bit is set stay: bit j of word w is token 32 * w + j, as in xgrammar.

    logits: float32 [n, vocab]; bitmask: int32 [n, ceil(vocab / 32)], all ones (-1) is off
    """
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=logits.device)
    # Every platform of torch's is little-endian.
    mask_bytes = bitmask.contiguous().view(torch.uint8)
    for rows in _row_chunks(logits):
        is_banned = (mask_bytes[rows, :, None] & bits) == 0
        logits[rows].masked_fill_(is_banned.flatten(1)[:, : logits.size(1)], -torch.inf)


# -- penalties and temperature ---------------------------------------------------------------------


def apply_penalties(logits: torch.Tensor, history: History, penalties: Penalties) -> None:
    """repetition over prompt and output as transformers', then the others over the output as vLLM's

        x = x / repetition if x > 0 else x * repetition    for tokens of prompt or output
        x = x - frequency * occurrences - presence         for tokens of the output

    logits: float32 [n, vocab]
    """
    columns = torch.arange(history.token_ids.size(1), device=logits.device)
    for rows in _row_chunks(logits, 4 * MAX_CHUNK):
        ids = history.token_ids[rows].long()
        is_token = columns < history.lens[rows, None]
        ids = ids.where(is_token, ids[:, :1])
        is_output = is_token & (columns >= history.prompt_lens[rows, None])
        presence, frequency, repetition = (values[rows, None] for values in penalties)
        # Integers, so that the order of the device's atomic additions cannot matter. Nor can which
        # of a token's occurrences is written last: all have the token's one new logit.
        counts = torch.zeros((len(ids), logits.size(1)), dtype=torch.int32, device=ids.device)
        counts = counts.scatter_add_(1, ids, is_output.int()).gather(1, ids)
        x = logits[rows].gather(1, ids)
        x = torch.where(x < 0, x * repetition, x / repetition)
        x = x - frequency * counts - presence * (counts > 0)
        logits[rows].scatter_(1, ids, x)


def scale_by_temperature(logits: torch.Tensor, temperatures: torch.Tensor) -> None:
    """logits: float32 [n, vocab]; temperatures: float32 [n], 0 leaves a row as it is."""
    logits.div_(torch.where(temperatures > 0, temperatures, 1.0)[:, None])


# -- filters ---------------------------------------------------------------------------------------


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> None:
    """Drop tokens whose probability is below min_p times the largest, as transformers does.

    logits: float32 [n, vocab]; min_p: float32 [n], 0 is off
    """
    for rows in _row_chunks(logits):
        probs = logits[rows].softmax(1)
        least = min_p[rows, None] * probs.amax(1, keepdim=True)
        logits[rows].masked_fill_(probs < least, -torch.inf)


def plan_top(top_k: Sequence[int], top_p: Sequence[float], vocab: int) -> TopPlan:
    """On the host, the way of each row by its own parameters; see `apply_top_k_top_p`."""
    small = [k for k in top_k if 0 < k <= MAX_CANDIDATES and k < vocab]
    rows = [
        row
        for row, (k, p) in enumerate(zip(top_k, top_p, strict=True))
        if MAX_CANDIDATES < k < vocab or (p < 1 and not 0 < k < vocab)
    ]
    return TopPlan(max(small, default=0), torch.tensor(rows) if rows else None)


def apply_top_k_top_p(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor | None, plan: TopPlan
) -> None:
    """Drop what is below the k-th largest logit, then of the rest the tail of probability 1 - top_p

    Both as transformers: tokens equal to the k-th all stay, and at least one token stays. Of equal
    tokens at the edge of top_p as many stay as there, those of the lowest ids.

    Rows with a top_k of at most MAX_CANDIDATES share one torch.topk over the batch; only the rows
    that plan.sorted_rows names are copied, sorted in full and copied back.

    logits: float32 [n, vocab]; top_k: int64 [n], 0 is off; top_p: float64 [n], 1 is off, or None
    plan: of the same top_k and top_p, its rows on the device of the logits
    """
    vocab = logits.size(1)
    if plan.num_candidates:
        has_few = (top_k > 0) & (top_k <= plan.num_candidates)
        for rows in _row_chunks(logits, 4 * MAX_CHUNK):  # 6 bytes a logit, and many small steps
            values = logits[rows].topk(plan.num_candidates).values
            p = None if top_p is None else top_p[rows].where(has_few[rows], 1.0)
            _keep_top(logits[rows], values, top_k[rows].where(has_few[rows], 0), p)
    if plan.sorted_rows is not None:
        for part in plan.sorted_rows.split(max(MAX_CHUNK // vocab, 1)):
            x = logits[part]
            values = x.sort(descending=True).values
            _keep_top(x, values, top_k[part], None if top_p is None else top_p[part])
            logits.index_copy_(0, part, x)


def _keep_top(
    x: torch.Tensor, values: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor | None
) -> None:
    """x: float32 [n, vocab]; values: float32 [n, width], its largest, in descending order; a row
    without top_k has top_p only if width is vocab."""
    vocab, width = x.size(1), values.size(1)
    is_limited = ((top_k > 0) & (top_k < vocab))[:, None]
    kth = values.gather(1, (top_k[:, None] - 1).clamp(0, width - 1))
    cutoff = torch.where(is_limited, kth, -torch.inf)
    if top_p is None:
        x.masked_fill_(x < cutoff, -torch.inf)
        return
    at_edge, num_kept = _top_p_edge(x, values, cutoff, top_p[:, None])
    has_top_p = top_p[:, None] < 1
    cutoff = torch.where(has_top_p, at_edge, cutoff)
    is_edge = x == cutoff
    last_id = _id_of_nth(is_edge, num_kept.where(has_top_p, vocab))
    is_surplus = is_edge & (torch.arange(vocab, device=x.device) > last_id)
    x.masked_fill_((x < cutoff) | is_surplus, -torch.inf)


def _id_of_nth(is_set: torch.Tensor, nth: torch.Tensor) -> torch.Tensor:
    """is_set: bool [n, vocab]; nth: int64 [n, 1] >= 1
    returns: int64 [n, 1] the token id of the row's nth True, at least vocab - 1 where there is none

    By tiles of 512: a sum over a whole row, one addition after the other, leaves a GPU idle.
    """
    tiles = torch.nn.functional.pad(is_set, (0, -is_set.size(1) % 512)).view(len(is_set), -1, 512)
    in_tile = tiles.sum(2, dtype=torch.int32).long()
    up_to = in_tile.cumsum(1)
    tile = (up_to < nth).sum(1, True).clamp(max=tiles.size(1) - 1)
    before = (up_to - in_tile).gather(1, tile)
    within = tiles.gather(1, tile[..., None].expand(-1, 1, 512))[:, 0].cumsum(1)
    return tile * 512 + (within < nth - before).sum(1, True)


def _top_p_edge(
    x: torch.Tensor, values: torch.Tensor, cutoff: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest logit that top_p keeps, float32 [n, 1], and how many equal to it, int64 [n, 1].

    With the probabilities in ascending order transformers drops a token if the sum up to and with
    it is at most 1 - top_p. More tokens may equal the k-th logit than are among the candidates:

        ascending    3 3 3 3 | 3 5 6 9        top_k = 4, candidates 9 6 5 3, num_outside = 4

    Those outside come first, so j of them are dropped if j times their probability is at most
    1 - top_p. Sums are in float64, as in torch's own on the CPU: neither their order nor the
    number of candidates, which is the batch's, then shows in the rounded result.
    """
    is_candidate = values >= cutoff
    weights = (values - values[:, :1]).exp().double() * is_candidate
    edge_weight = (cutoff - values[:, :1]).exp().double()
    equal, among = ((t == cutoff).sum(1, True, dtype=torch.int32) for t in (x, values))
    num_outside = equal - among
    total = weights.sum(1, True) + num_outside * edge_weight
    probs, edge_prob = ((w / total).float().double() for w in (weights, edge_weight))
    sums = num_outside * edge_prob + probs.flip(1).cumsum(1)
    limit = (1 - top_p.double()).float()
    is_kept = (sums.float() > limit).flip(1) & is_candidate
    num_kept = is_kept.sum(1, True).clamp(min=1)
    at_edge = values.gather(1, num_kept - 1)
    # Sums up to halfway to the next float32 round to the limit; half of those just there do not.
    halfway = (limit.double() + limit.nextafter(limit + 1).double()) / 2
    num_dropped = (halfway / edge_prob).floor()
    num_dropped -= ((num_dropped * edge_prob).float() > limit).double()
    num_outside_kept = (num_outside - num_dropped).clamp(min=0)
    num_kept = num_kept - (values > at_edge).sum(1, True) + num_outside_kept.long()
    return at_edge, num_kept
