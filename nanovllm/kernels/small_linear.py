"""Linear layers for few rows (decode), with norm, residual and SiLU fused; weights are [N, K].

Three ways, chosen by rows and size (`config`), all bound by reading the weights:

    gemv        1-2 rows     CUDA cores; whole weight rows are loaded before the PDL wait
    one-shot    3-32 rows    small weights: one tensor-core tile a program, its weight slab loaded
                             before the PDL wait, K split over programs
    streamed    3-256 rows   larger weights or more rows: pipelined tensor-core tiles

Splits of K are added by the last program to arrive, in split order, so that results do not vary
from run to run. What the norm around a linear needs is handed on by `norm_linear`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanovllm.kernels import launch
from nanovllm.kernels.launch import gdc_launch_dependents, gdc_wait, tl, triton
from nanovllm.kernels.rms_norm import rms_norm_ref
from nanovllm.kernels.silu_and_mul import silu_and_mul_ref

PLAIN, RESIDUAL, SILU = 0, 1, 2  # epilogues
_SMALL = 2 * 32768  # weight elements an SM: up to here all of a layer's weights fit in registers


@dataclass(frozen=True)
class LinearWorkspace:
    """Scratch for splits of K, shared by all layers of one stream."""

    partial: torch.Tensor  # fp32 partial tiles
    counters: torch.Tensor  # int32 splits arrived, one a tile; 0 between calls


@dataclass(frozen=True)
class Config:
    kind: str  # gemv, one_shot, streamed
    block_m: int
    block_n: int
    block_k: int  # gemv: the chunk; one_shot: the slab
    split_k: int = 1
    swap: bool = False  # compute W x^T: the weights' rows fill the tensor core's 64-row side
    stages: int = 1
    warps: int = 4


def linear_workspace(device: torch.device) -> LinearWorkspace:
    sms = launch.gpu(device).num_sms  # `config` splits K into programs of no more than this in sum
    return LinearWorkspace(
        partial=torch.empty(16384 * sms, dtype=torch.float32, device=device),
        counters=torch.zeros(16 * sms, dtype=torch.int32, device=device),
    )


def supports(
    m: int, n: int, k: int, dtype: torch.dtype, epilogue: int = PLAIN, num_sms: int = 132
) -> bool:
    """Whether a kernel here beats cuBLAS followed by what it fuses (n counts outputs)."""
    if dtype not in (torch.bfloat16, torch.float16) or k % 16 or n % 8:
        return False
    if n * k * (2 if epilogue == SILU else 1) > _SMALL * num_sms:
        return m <= 32
    return m <= (256 if epilogue == RESIDUAL else 128)


def config(m: int, n: int, k: int, epilogue: int, facts: launch.Gpu) -> Config:
    """Measured on one H200 with the shapes of Qwen3-0.6B and 8B; the rules carry over by fill of
    the SMs. n counts outputs: SILU reads 2 * n weight rows."""
    mats, sms = 2 if epilogue == SILU else 1, facts.num_sms
    small = mats * n * k <= _SMALL * sms
    if m == 1 or (m == 2 and k <= 4096):
        return _gemv_config(m, n, k, epilogue)
    block_m = 16 if m <= 16 else 32 if m <= 32 else 64
    if small and block_m <= 32 and (mats == 1 or block_m == 16):
        return _one_shot_config(m, n, k, epilogue, facts)
    room = 220 * 1024 if facts.large_shared_memory else 96 * 1024
    if not small or block_m <= 32:
        tiles = launch.cdiv(n, 64) * launch.cdiv(m, block_m)
        # One program an SM with as many stages as fit reads faster than two that share its memory;
        # two hide each other's first loads where there are several waves of them.
        split = 1 if small and k <= 1024 else min(_fill(tiles, sms), launch.cdiv(k, 512), 8)
        stage = (mats * 64 + block_m) * 128 * 2
        stages = max(2, min(6, room // (2 if tiles * split > 2 * sms else 1) // stage))
        return Config("streamed", block_m, 64, 128, split, block_m <= 32, stages)
    # Measured one after the other, as in a layer: alone, other configurations are faster. All
    # programs read the same rows of x, from L2: that takes longer than the weights, and splits of
    # K divide it. Shares of less than 768 columns are not worth adding up again.
    tiles = launch.cdiv(n, 32) * launch.cdiv(m, 64)
    split = max(min(_fill(tiles, sms), k // 768), 1)
    block_n = 16 if mats == 1 and 2 * tiles * split <= sms else 32 if tiles <= sms else 64
    block_k = 256 if epilogue == RESIDUAL and facts.large_shared_memory else 128
    stages = 3 if block_k == 256 else 5 if block_n < 64 else 4
    stages = min(stages, room // ((mats * block_n + 64) * block_k * 2))
    return Config("streamed", 64, block_n, block_k, split, stages=stages)


def _fill(tiles: int, sms: int) -> int:
    """How many programs a tile fill the SMs, as a power of two."""
    return 1 << max((sms // tiles).bit_length() - 1, 0)


def _gemv_config(m: int, n: int, k: int, epilogue: int) -> Config:
    chunk = launch.next_power_of_2(k) if k <= 4096 else 2048
    mats = 2 if epilogue == SILU else 1
    if epilogue == RESIDUAL and n * k <= 3 * 1024**2:  # a program an SM, or many short ones
        return Config("gemv", m, 8 if k <= 2048 and n >= 1024 else 2, chunk, warps=4)
    if (m == 2 and epilogue == RESIDUAL) or mats * n * k <= 2 * 1024**2:
        return Config("gemv", m, 2, chunk, warps=1 if k <= 3072 else 4)
    rows = 2 if mats == 2 and k > 2048 else 4
    if k <= 1024 and (m == 2 or n >= 32768):
        rows = 8
    warps = 4 * chunk // 2048 * (mats if m == 2 else 1)
    return Config("gemv", m, rows, chunk, warps=max(1, min(4, warps)))


def _one_shot_config(m: int, n: int, k: int, epilogue: int, facts: launch.Gpu) -> Config:
    """Slabs of 64 weight rows where enough programs remain to fill the SMs, else of 32. With more
    rows, slabs of 1,024 columns: the same rows of x are read, and fewer splits are added up."""
    block_m = 16 if m <= 16 else 32

    def fill(columns: int) -> float:
        """Of the SMs, by slabs of 64 rows."""
        return launch.cdiv(n, 64) * launch.cdiv(k, columns) / facts.num_sms

    def slabs(rows: int, columns: int, swap: bool = False, warps: int = 4) -> Config:
        columns = min(columns, launch.next_power_of_2(k))
        split = launch.cdiv(k, columns)
        return Config("one_shot", block_m, rows, columns, split, swap, warps=warps)

    if m > 8 and epilogue != SILU and facts.large_shared_memory:
        if fill(1024) >= (0.45 if block_m == 16 else 0.35):
            return slabs(64, 1024, swap=True, warps=8)
    columns = 256 if m <= 8 and epilogue == PLAIN and fill(256) <= 2 else 512
    is_split_little = epilogue == RESIDUAL and launch.cdiv(k, columns) <= 4
    if fill(columns) >= (0.45 if block_m == 32 or is_split_little else 0.9):
        return slabs(64, columns, warps=block_m // 4)
    return slabs(32, columns)


def small_linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    epilogue: int = PLAIN,
    norm_weight: torch.Tensor | None = None,
    sum_squares: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    next_norm_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    if norm_weight is not None:
        x = rms_norm_ref(x, norm_weight, eps)
    out = F.linear(x, weight)
    if sum_squares is not None:
        rstd = torch.rsqrt(sum_squares.sum(0)[: len(x), None] / x.shape[1] + eps)
        out = (out * rstd).to(out.dtype)
    if epilogue == SILU:
        out = silu_and_mul_ref(out)
    if epilogue != RESIDUAL:
        return out, None, None
    assert residual is not None and next_norm_weight is not None, "what RESIDUAL needs"
    out = residual + out
    return out, out * next_norm_weight, out.float().square().sum(-1)[None]


@triton.jit
def _weights(
    weight_ptr, row, col, N: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """row: [rows, 1], col: [1, cols]. EVEN: the tiles divide N and K, no mask is needed."""
    tile_ptr = weight_ptr + row.to(tl.int64) * K + col
    if EVEN:
        tile = tl.load(tile_ptr)
    else:
        tile = tl.load(tile_ptr, mask=(row < N) & (col < K), other=0.0)
    return tile


@triton.jit
def _gemv_kernel(
    x_ptr, weight_ptr, norm_ptr, residual_ptr, out_ptr, x_stride, eps,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, NORM: tl.constexpr, EPILOGUE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row, or two if BLOCK_K covers K, on CUDA cores. The first BLOCK_K columns of the
    program's weight rows are in registers before the wait; beyond, one chunk is loaded ahead."""
    EVEN: tl.constexpr = (N % BLOCK_N == 0) and (K % BLOCK_K == 0)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    col = tl.arange(0, BLOCK_K)[None, :]
    w = _weights(weight_ptr, row, col, N, K, EVEN)
    u = w
    if EPILOGUE == 2:
        u = _weights(weight_ptr + N * K, row, col, N, K, EVEN)
    if NORM:
        norm = tl.load(norm_ptr + col, mask=col < K, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for m in tl.static_range(M):
        if EPILOGUE == 1:  # on its way while the weights are multiplied
            residual = tl.load(residual_ptr + m * N + row, mask=row < N, other=0.0)
        y = tl.zeros([BLOCK_N, 1], tl.float32)
        up = tl.zeros([BLOCK_N, 1], tl.float32)
        squares = tl.zeros([1, 1], tl.float32)
        for k in tl.static_range(0, K, BLOCK_K):
            x = tl.load(x_ptr + m * x_stride + k + col, mask=k + col < K, other=0.0)
            x = x.to(tl.float32)
            if NORM:
                squares += tl.sum(x * x, 1, keep_dims=True)
                x *= norm.to(tl.float32)
            w_now = w
            u_now = u
            if k + BLOCK_K < K:
                next_col = k + BLOCK_K + col
                w = _weights(weight_ptr, row, next_col, N, K, EVEN)
                if EPILOGUE == 2:
                    u = _weights(weight_ptr + N * K, row, next_col, N, K, EVEN)
                if NORM:
                    norm = tl.load(norm_ptr + next_col, mask=next_col < K, other=0.0)
            y += tl.sum(w_now.to(tl.float32) * x, 1, keep_dims=True)
            if EPILOGUE == 2:
                up += tl.sum(u_now.to(tl.float32) * x, 1, keep_dims=True)
        if NORM:
            rstd = tl.rsqrt(squares / K + eps)
            y *= rstd
            up *= rstd
        if EPILOGUE == 2:
            y = y / (1.0 + tl.exp(-y)) * up
        if EPILOGUE == 1:
            y += residual.to(tl.float32)
        tl.store(out_ptr + m * N + row, y.to(out_ptr.dtype.element_ty), mask=row < N)


@triton.jit
def _dot(x, w, acc, SWAP: tl.constexpr):
    if SWAP:
        acc = tl.dot(w, tl.trans(x), acc)
    else:
        acc = tl.dot(x, tl.trans(w), acc)
    return acc


@triton.jit
def _prefetch(address):
    """Ask for the cache lines at these addresses in L2."""
    asm: tl.constexpr = "prefetch.global.L2 [$1]; // $0"
    tl.inline_asm_elementwise(asm, "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _load_squares(
    sum_squares_ptr, row, num_rows, parts_stride, PARTS: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """The parts that a residual epilogue left, folded to [32, BLOCK_M]; the rest of the sum waits
    until after the dot, so that these loads travel together with the dot's own."""
    total = tl.zeros([32, BLOCK_M], tl.float32)
    for first in tl.static_range(0, PARTS, 32):
        part = first + tl.arange(0, 32)[:, None]
        live = (part < PARTS) & (row < num_rows)[None, :]
        total += tl.load(sum_squares_ptr + part * parts_stride + row[None, :], live, 0.0)
    return total


@triton.jit
def _reduce_splits(
    acc, up, partial_ptr, counter_ptr, SPLIT_K: tl.constexpr, EPILOGUE: tl.constexpr
):  # fmt: skip
    """Leave this split's tile; the last split to arrive adds them all in order. Returns whether
    this program is that one, and the sums."""
    MATS: tl.constexpr = 2 if EPILOGUE == 2 else 1
    ROWS: tl.constexpr = acc.shape[0]
    COLS: tl.constexpr = acc.shape[1]
    SIZE: tl.constexpr = ROWS * COLS
    tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    tile_ptr = partial_ptr + tile * (SPLIT_K * MATS * SIZE)
    tile_ptr += tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    mine_ptr = tile_ptr + tl.program_id(1) * (MATS * SIZE)
    tl.store(mine_ptr, acc)
    if EPILOGUE == 2:
        tl.store(mine_ptr + SIZE, up)
    # All threads' partial tiles must be visible before the count is.
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if last:
        acc = tl.zeros_like(acc)
        up = tl.zeros_like(up)
        for split in tl.static_range(SPLIT_K):
            split_ptr = tile_ptr + split * (MATS * SIZE)
            acc += tl.load(split_ptr, cache_modifier=".cg")
            if EPILOGUE == 2:
                up += tl.load(split_ptr + SIZE, cache_modifier=".cg")
        tl.store(counter_ptr + tile, 0)
    return last, acc, up


@triton.jit(do_not_specialize=["num_rows"])
def _dot_kernel(
    x_ptr, weight_ptr, sum_squares_ptr, residual_ptr, next_norm_ptr, out_ptr, scaled_ptr,
    squares_out_ptr, partial_ptr, counter_ptr, num_rows, x_stride, parts_stride, padded_rows, eps,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, ONE_SHOT: tl.constexpr, EPILOGUE: tl.constexpr,
    PARTS: tl.constexpr, SWAP: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Tensor-core tile [BLOCK_M, BLOCK_N] over one of SPLIT_K shares of K; grid (N, splits, M).

    ONE_SHOT: the share is one slab of BLOCK_K columns, loaded into registers before the wait.
    Else it is streamed in tiles, and before the wait its first PREFETCH lines are asked for in L2.
    SWAP: acc and up are [cols, rows].
    """
    EVEN: tl.constexpr = (N % BLOCK_N == 0) and (K % BLOCK_K == 0)
    SHARE: tl.constexpr = tl.cdiv(tl.cdiv(K, SPLIT_K), BLOCK_K) * BLOCK_K
    begin = tl.program_id(1) * SHARE
    end = tl.minimum(begin + SHARE, K)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_row = col[:, None]
    up_ptr = weight_ptr + N * K
    x_row_ptr = x_ptr + row[:, None] * x_stride
    x_live = (row < num_rows)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros_like(acc)
    if ONE_SHOT:
        k_col = begin + tl.arange(0, BLOCK_K)[None, :]
        w = _weights(weight_ptr, w_row, k_col, N, K, EVEN)
        if EPILOGUE == 2:
            u = _weights(up_ptr, w_row, k_col, N, K, EVEN)
    elif PDL and PREFETCH > 0:
        line = tl.minimum(begin + tl.arange(0, PREFETCH)[None, :] * 64, end - 1)
        line += tl.minimum(w_row, N - 1).to(tl.int64) * K
        _prefetch(weight_ptr + line)
        if EPILOGUE == 2:
            _prefetch(up_ptr + line)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if PARTS > 0:
        squares = _load_squares(sum_squares_ptr, row, num_rows, parts_stride, PARTS, BLOCK_M)
    if ONE_SHOT:
        x = tl.load(x_row_ptr + k_col, mask=x_live & (k_col < K), other=0.0)
        acc = _dot(x, w, acc, SWAP)
        if EPILOGUE == 2:
            up = _dot(x, u, up, SWAP)
    else:
        for k in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
            cols = k + tl.arange(0, BLOCK_K)[None, :]
            x = tl.load(x_row_ptr + cols, mask=x_live & (cols < K), other=0.0)
            acc = _dot(x, _weights(weight_ptr, w_row, cols, N, K, EVEN), acc, SWAP)
            if EPILOGUE == 2:
                up = _dot(x, _weights(up_ptr, w_row, cols, N, K, EVEN), up, SWAP)
    last = True
    if SPLIT_K > 1:
        last, acc, up = _reduce_splits(acc, up, partial_ptr, counter_ptr, SPLIT_K, EPILOGUE)
    if last:
        COL_AXIS: tl.constexpr = 0 if SWAP else 1
        rows = tl.expand_dims(row, COL_AXIS)
        cols = tl.expand_dims(col, 1 - COL_AXIS)
        offset = rows * N + cols
        live = (rows < num_rows) & (cols < N)
        dtype = out_ptr.dtype.element_ty
        if PARTS > 0:
            rstd = tl.expand_dims(tl.rsqrt(tl.sum(squares, 0) / K + eps), COL_AXIS)
            acc *= rstd
            up *= rstd
        if EPILOGUE == 2:
            acc = acc / (1.0 + tl.exp(-acc)) * up
        if EPILOGUE == 1:
            acc += tl.load(residual_ptr + offset, mask=live, other=0.0).to(tl.float32)
            acc = acc.to(dtype).to(tl.float32)
            next_norm = tl.load(next_norm_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
            tl.store(scaled_ptr + offset, (acc * next_norm).to(dtype), mask=live)
            total = tl.sum(tl.where(live, acc * acc, 0.0), COL_AXIS)
            tl.store(squares_out_ptr + tl.program_id(0) * padded_rows + row, total)
        tl.store(out_ptr + offset, acc.to(dtype), mask=live)


def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    workspace: LinearWorkspace,
    chosen: Config,
    epilogue: int = PLAIN,
    norm_weight: torch.Tensor | None = None,
    sum_squares: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    next_norm_weight: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """x @ weight^T with what stands before and after it in a decoder layer.

    x: dtype [M, K] rows at any stride.
    weight: dtype [N, K]; with SILU [2 * N, K], gate rows, then up rows.
    chosen: from `config`.
    norm_weight: dtype [K]; x is normed first (gemv only).
    sum_squares: fp32 [parts, >= M]; x is a stream * norm weight, these are parts of the stream's
        sums of squares, and the result is multiplied by 1/rms (not gemv).
    residual, next_norm_weight: dtype [M, N] and [N], with RESIDUAL.
    out: dtype [M, N] contiguous, to write to; None for a new one.
    Returns (out, None, None); with RESIDUAL (sum, sum * next_norm_weight, parts of the sum's
    squares [parts, >= M]), the last two None from a gemv.
    """
    (m, k), n = x.shape, weight.shape[0] // (2 if epilogue == SILU else 1)
    assert weight.is_contiguous() and x.stride(1) == 1, (weight.stride(), x.stride())
    assert residual is None or residual.is_contiguous(), residual.stride()
    if out is None:
        out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    assert out.is_contiguous(), out.stride()
    pdl = launch.gpu(x.device).pdl
    columns = launch.cdiv(n, chosen.block_n)
    if chosen.kind == "gemv":
        assert sum_squares is None, "a gemv norms its own input"
        _gemv_kernel[(columns,)](
            x, weight, norm_weight, residual, out, x.stride(0), eps,
            M=m, N=n, K=k, BLOCK_N=chosen.block_n, BLOCK_K=chosen.block_k,
            NORM=norm_weight is not None, EPILOGUE=epilogue, PDL=pdl,
            num_warps=chosen.warps, launch_pdl=pdl,
        )  # fmt: skip
        return out, None, None
    assert norm_weight is None, "only a gemv norms its own input"
    row_tiles = launch.cdiv(m, chosen.block_m)
    tile_size = chosen.block_m * chosen.block_n * (2 if epilogue == SILU else 1)
    assert chosen.split_k == 1 or (
        columns * row_tiles * chosen.split_k * tile_size <= workspace.partial.numel()
        and columns * row_tiles <= workspace.counters.numel()
    ), (m, n, k, chosen)
    scaled = squares = None
    if epilogue == RESIDUAL:
        scaled = torch.empty_like(out)
        padded = (columns, row_tiles * chosen.block_m)
        squares = torch.empty(padded, dtype=torch.float32, device=x.device)
    share = launch.cdiv(launch.cdiv(k, chosen.split_k), chosen.block_k) * chosen.block_k
    _dot_kernel[(columns, chosen.split_k, row_tiles)](
        x, weight, sum_squares, residual, next_norm_weight, out, scaled, squares,
        workspace.partial, workspace.counters, m, x.stride(0),
        0 if sum_squares is None else sum_squares.stride(0), row_tiles * chosen.block_m, eps,
        N=n, K=k, BLOCK_M=chosen.block_m, BLOCK_N=chosen.block_n, BLOCK_K=chosen.block_k,
        SPLIT_K=chosen.split_k, ONE_SHOT=chosen.kind == "one_shot", EPILOGUE=epilogue,
        PARTS=0 if sum_squares is None else sum_squares.shape[0], SWAP=chosen.swap,
        PREFETCH=launch.next_power_of_2(min(share, 2048) // 64) if row_tiles == 1 else 0,
        PDL=pdl, STAGES=chosen.stages,
        num_warps=chosen.warps, num_stages=chosen.stages, launch_pdl=pdl,
    )  # fmt: skip
    return out, scaled, squares
