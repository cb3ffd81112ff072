"""Linear layers for few rows (decode), with norm, residual and SiLU fused; weights are [N, K].

Three kernels, chosen by rows and size (`_config`), all bound by reading the weights:

    gemv        1-2 rows     CUDA cores; whole weight rows are loaded before the PDL wait
    one-shot    3-32 rows    small weights: one tensor-core tile a program, its weight slab loaded
                             before the PDL wait, K split over programs
    streamed    3-64 rows    larger weights: pipelined tiles

No norm kernel runs in between: the residual epilogue leaves h, h * next norm weight, and parts of
the sum of h * h, and the next linear multiplies its result by 1/rms (`NormInput`). Splits of K are
added by the last program to arrive, in split order, so that results do not vary from run to run.
Above `supports` the same functions run cuBLAS and the elementwise kernels.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanovllm.kernels.launch import (
    Gpu,
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    gpu,
    next_power_of_2,
    tl,
    triton,
    use_triton,
)
from nanovllm.kernels.rms_norm import add_rms_norm, rms_norm
from nanovllm.kernels.silu_and_mul import silu_and_mul

PLAIN, RESIDUAL, SILU = 0, 1, 2  # epilogues
GEMV_ROWS = 2
_SMALL = 2 * 32768  # weight elements an SM: up to here all of a layer's weights fit in registers


@dataclass(frozen=True)
class NormInput:
    """A residual stream and the norm its next reader applies, as far as that is done already."""

    hidden: torch.Tensor  # dtype [M, K] the stream
    weight: torch.Tensor  # dtype [K] of the norm
    eps: float
    normed: torch.Tensor | None = None  # dtype [M, K] the norm's result
    scaled: torch.Tensor | None = None  # dtype [M, K] hidden * weight: 1/rms is still missing
    sum_squares: torch.Tensor | None = None  # fp32 [parts, >= M] to get it from, with scaled


@dataclass(frozen=True)
class LinearWorkspace:
    """Scratch for splits of K, shared by all layers of one stream."""

    partial: torch.Tensor  # fp32 partial tiles
    counters: torch.Tensor  # int32 splits arrived, one a tile; 0 between calls


@dataclass(frozen=True)
class _Config:
    kind: str  # gemv, one_shot, streamed
    block_m: int
    block_n: int
    block_k: int  # one_shot: the slab; gemv: the chunk
    split_k: int
    swap: bool  # compute W x^T: the weights' rows fill the tensor core's 64-row side
    stages: int
    warps: int


def linear_workspace(device: torch.device) -> LinearWorkspace:
    sms = gpu(device).num_sms  # `_config` splits K into programs of no more than this in sum
    return LinearWorkspace(
        partial=torch.empty(16384 * sms, dtype=torch.float32, device=device),
        counters=torch.zeros(16 * sms, dtype=torch.int32, device=device),
    )


def _pow2_floor(x: float) -> int:
    return 1 << max(int(x).bit_length() - 1, 0)


def _config(m: int, n: int, k: int, epilogue: int, facts: Gpu) -> _Config:
    """Measured on one H200 with the shapes of Qwen3-0.6B; the rules carry over by fill of the SMs.
    n counts outputs: SILU reads 2 * n weight rows."""
    mats = 2 if epilogue == SILU else 1
    sms = facts.num_sms
    small = mats * n * k <= _SMALL * sms
    if m <= GEMV_ROWS:
        return _gemv_config(m, n, k, epilogue)
    block_m = 16 if m <= 16 else 32 if m <= 32 else 64
    if small and block_m <= 32 and (mats == 1 or block_m == 16):
        return _one_shot_config(n, k, block_m, facts)
    if not small or block_m <= 32:
        tiles = cdiv(n, 64) * cdiv(m, block_m)
        split = 1 if small and k <= 1024 else min(_pow2_floor(2 * sms / tiles), cdiv(k, 512), 8)
        # Two programs an SM share its memory; one alone may take more stages.
        stage = (mats * 64 + block_m) * 128 * 2
        room = 220 * 1024 if facts.large_shared_memory else 96 * 1024
        stages = min(5, room // (2 if tiles * split > sms else 1) // stage)
        return _Config("streamed", block_m, 64, 128, split, block_m <= 32, max(stages, 2), 4)
    tiles = cdiv(n, 32) * cdiv(m, 64)
    if k <= 2048:
        if tiles < 0.45 * sms:
            return _Config("streamed", 64, 16, 128, 1, False, 5, 4)
        if mats == 1 and tiles >= 0.9 * sms and m <= 64:
            return _Config("streamed", 64, 32, 256, 1, False, 3, 4)
        return _Config("streamed", 64, 32, 128, 1, False, 4 if mats == 2 else 5, 4)
    if tiles < 0.7 * sms:
        return _Config("streamed", 64, 32, 128, 4, False, 4, 4)
    return _Config("streamed", 64, 32, 128, 1, False, 5, 4)


def _gemv_config(m: int, n: int, k: int, epilogue: int) -> _Config:
    chunk = next_power_of_2(k) if k <= 4096 else 2048
    mats = 2 if epilogue == SILU else 1
    if (m == 2 and epilogue == RESIDUAL) or n * k <= 2 * 1024**2:
        return _Config("gemv", m, 2, chunk, 1, False, 1, 1 if k <= 3072 else 4)
    rows = 8 if m == 2 and k <= 1024 else 2 if mats == 2 and chunk == 4096 else 4
    return _Config("gemv", m, rows, chunk, 1, False, 1, max(1, min(4, mats * 4 * chunk // 2048)))


def _one_shot_config(n: int, k: int, block_m: int, facts: Gpu) -> _Config:
    """Slabs of 64 weight rows where enough programs remain to fill the SMs, else of 32."""
    tiles = cdiv(n, 64)
    slab, fill, warps = 512, 0.9 * facts.num_sms, 4
    if block_m == 32:
        fill, warps = 0.7 * facts.num_sms, 8
        if tiles >= 0.45 * facts.num_sms and facts.large_shared_memory:
            slab, fill = 1024, 0.0
    slab = min(slab, next_power_of_2(k))
    split = cdiv(k, slab)
    if tiles * split >= fill:
        return _Config("one_shot", block_m, 64, slab, split, split <= 2, 1, warps)
    return _Config("one_shot", block_m, 32, slab, split, False, 1, 4)


def supports(m: int, n: int, k: int, dtype: torch.dtype, epilogue: int = PLAIN) -> bool:
    """Whether a kernel here beats cuBLAS followed by what it fuses (n counts outputs)."""
    if dtype not in (torch.bfloat16, torch.float16) or k % 16 or n % 8:
        return False
    small = n * k * (2 if epilogue == SILU else 1) <= _SMALL * 132
    if not small:
        return m <= 32
    return m <= (256 if epilogue == RESIDUAL else 64)


def linear_ref(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


def norm_linear_ref(x: NormInput, weight: torch.Tensor, silu_mul: bool = False) -> torch.Tensor:
    """From the stream itself, whatever else `x` holds."""
    out = F.linear(rms_norm(x.hidden, x.weight, x.eps), weight)
    return silu_and_mul(out) if silu_mul else out


def residual_linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> NormInput:
    normed, hidden = add_rms_norm(F.linear(x, weight), residual, norm_weight, eps)
    return NormInput(hidden, norm_weight, eps, normed=normed)


@triton.jit
def _gemv_kernel(
    x_ptr,
    weight_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    x_stride,
    eps,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PDL: tl.constexpr,
):
    """1 or 2 rows on CUDA cores. The first BLOCK_K columns of the program's weight rows (all of
    them up to K = 4096) are in registers before the wait; beyond, one chunk is loaded ahead."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    col = tl.arange(0, BLOCK_K)
    w_ptr = weight_ptr + row.to(tl.int64)[:, None] * K + col[None, :]
    EVEN: tl.constexpr = (N % BLOCK_N == 0) and (K % BLOCK_K == 0)
    live = (row < N)[:, None] & (col < K)[None, :]
    if EVEN:
        w = tl.load(w_ptr)
    else:
        w = tl.load(w_ptr, mask=live, other=0.0)
    if EPILOGUE == 2:
        if EVEN:
            u = tl.load(w_ptr + N * K)
        else:
            u = tl.load(w_ptr + N * K, mask=live, other=0.0)
    if NORM:
        norm = tl.load(norm_ptr + col, mask=col < K, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc0 = tl.zeros([BLOCK_N], tl.float32)
    acc1 = tl.zeros([BLOCK_N], tl.float32)
    up0 = tl.zeros([BLOCK_N], tl.float32)
    up1 = tl.zeros([BLOCK_N], tl.float32)
    squares0 = 0.0
    squares1 = 0.0
    for k in tl.static_range(0, K, BLOCK_K):
        w_now = w.to(tl.float32)
        if EPILOGUE == 2:
            u_now = u.to(tl.float32)
        if k + BLOCK_K < K:
            live = (row < N)[:, None] & (k + BLOCK_K + col < K)[None, :]
            w = tl.load(w_ptr + k + BLOCK_K, mask=live, other=0.0)
            if EPILOGUE == 2:
                u = tl.load(w_ptr + N * K + k + BLOCK_K, mask=live, other=0.0)
        for m in tl.static_range(M):
            x = tl.load(x_ptr + m * x_stride + k + col, mask=k + col < K, other=0.0)
            x = x.to(tl.float32)
            if NORM:
                squares = tl.sum(x * x, 0)
                x *= norm.to(tl.float32)
            partial = tl.sum(w_now * x[None, :], 1)
            if EPILOGUE == 2:
                partial_up = tl.sum(u_now * x[None, :], 1)
            if m == 0:
                acc0 += partial
                if EPILOGUE == 2:
                    up0 += partial_up
                if NORM:
                    squares0 += squares
            else:
                acc1 += partial
                if EPILOGUE == 2:
                    up1 += partial_up
                if NORM:
                    squares1 += squares
        if NORM:
            if k + BLOCK_K < K:
                norm = tl.load(norm_ptr + k + BLOCK_K + col, mask=k + BLOCK_K + col < K, other=0.0)
    for m in tl.static_range(M):
        y = acc0 if m == 0 else acc1
        if NORM:
            rstd = tl.rsqrt((squares0 if m == 0 else squares1) / K + eps)
            y *= rstd
        if EPILOGUE == 2:
            up = up0 if m == 0 else up1
            if NORM:
                up *= rstd
            y = y / (1.0 + tl.exp(-y)) * up
        if EPILOGUE == 1:
            y += tl.load(residual_ptr + m * N + row, mask=row < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + m * N + row, y.to(out_ptr.dtype.element_ty), mask=row < N)


@triton.jit
def _load_squares(
    sum_squares_ptr, row, num_rows, parts_stride, PARTS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """The parts that a residual epilogue left, folded to [32, BLOCK_M]; the rest of the sum is left
    for after the dot, so that these loads travel together with the dot's own."""
    total = tl.zeros([32, BLOCK_M], tl.float32)
    for first in tl.static_range(0, PARTS, 32):
        part = first + tl.arange(0, 32)
        total += tl.load(
            sum_squares_ptr + part[:, None] * parts_stride + row[None, :],
            mask=(part < PARTS)[:, None] & (row < num_rows)[None, :],
            other=0.0,
        )
    return total


@triton.jit
def _finish(
    acc,
    up,
    squares,
    row,
    col,
    num_rows,
    residual_ptr,
    out_ptr,
    norm_ptr,
    scaled_ptr,
    sum_squares_ptr,
    padded_rows,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PARTS: tl.constexpr,
    SWAP: tl.constexpr,
):
    """acc and up are [rows, cols], or [cols, rows] with SWAP. Apply the input's 1/rms, then the
    epilogue. RESIDUAL leaves the sum, the sum * norm weight, and the tile's sums of squares."""
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
        norm = tl.load(norm_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(scaled_ptr + offset, (acc * norm).to(dtype), mask=live)
        part_ptr = sum_squares_ptr + tl.program_id(0) * padded_rows
        tl.store(part_ptr + row, tl.sum(tl.where(live, acc * acc, 0.0), COL_AXIS))
    tl.store(out_ptr + offset, acc.to(dtype), mask=live)


@triton.jit
def _reduce_splits(
    acc,
    up,
    counter_ptr,
    partial_ptr,
    SPLIT_K: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """Leave this split's tile; the last split to arrive adds them all in order. Returns whether
    this program is that one, and the sums. Tiles are stored densely, each program's own."""
    MATS: tl.constexpr = 2 if EPILOGUE == 2 else 1
    SIZE: tl.constexpr = acc.shape[0] * acc.shape[1]
    tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    offset = (
        tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
    )
    offset += tile * (SPLIT_K * MATS * SIZE)
    mine_ptr = partial_ptr + tl.program_id(1) * (MATS * SIZE) + offset
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
            split_ptr = partial_ptr + split * (MATS * SIZE) + offset
            acc += tl.load(split_ptr, cache_modifier=".cg")
            if EPILOGUE == 2:
                up += tl.load(split_ptr + SIZE, cache_modifier=".cg")
        tl.store(counter_ptr + tile, 0)
    return last, acc, up


@triton.jit(do_not_specialize=["num_rows"])
def _dot_kernel(
    x_ptr,
    weight_ptr,
    sum_squares_in_ptr,
    residual_ptr,
    out_ptr,
    norm_ptr,
    scaled_ptr,
    sum_squares_out_ptr,
    partial_ptr,
    counter_ptr,
    num_rows,
    x_stride,
    parts_stride,
    padded_rows,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    ONE_SHOT: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PARTS: tl.constexpr,
    SWAP: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tensor-core tile [BLOCK_M, BLOCK_N] over one of SPLIT_K shares of K; grid (N, splits, M).

    ONE_SHOT: the share is one slab of BLOCK_K columns, loaded into registers before the wait.
    Else it is streamed in tiles, and PREFETCH asks for (the head of) the slab in L2 before it.
    """
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    SHARE: tl.constexpr = tl.cdiv(tl.cdiv(K, SPLIT_K), BLOCK_K) * BLOCK_K
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN: tl.constexpr = (N % BLOCK_N == 0) and (K % BLOCK_K == 0)
    begin = tl.program_id(1) * SHARE
    end = tl.minimum(begin + SHARE, K)
    inner = begin + tl.arange(0, BLOCK_K)
    x_row_ptr = x_ptr + row[:, None] * x_stride
    w_row_ptr = weight_ptr + col.to(tl.int64)[:, None] * K
    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros_like(acc)
    squares = 0.0
    if ONE_SHOT:
        live = (col < N)[:, None] & (inner < K)[None, :]
        if EVEN:
            w = tl.load(w_row_ptr + inner[None, :])
        else:
            w = tl.load(w_row_ptr + inner[None, :], mask=live, other=0.0)
        if EPILOGUE == 2:
            if EVEN:
                u = tl.load(w_row_ptr + N * K + inner[None, :])
            else:
                u = tl.load(w_row_ptr + N * K + inner[None, :], mask=live, other=0.0)
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        x_live = (row < num_rows)[:, None] & (inner < K)[None, :]
        x = tl.load(x_row_ptr + inner[None, :], mask=x_live, other=0.0)
        if PARTS > 0:
            squares = _load_squares(sum_squares_in_ptr, row, num_rows, parts_stride, PARTS, BLOCK_M)
        if SWAP:
            acc = tl.dot(w, tl.trans(x))
            if EPILOGUE == 2:
                up = tl.dot(u, tl.trans(x))
        else:
            acc = tl.dot(x, tl.trans(w))
            if EPILOGUE == 2:
                up = tl.dot(x, tl.trans(u))
    else:
        if PDL:
            if PREFETCH > 0:
                line = tl.minimum(begin + tl.arange(0, PREFETCH) * 64, end - 1)
                line_ptr = w_row_ptr + line[None, :]
                if not EVEN_N:
                    line_ptr = weight_ptr + tl.minimum(col, N - 1)[:, None] * K + line[None, :]
                tl.inline_asm_elementwise(
                    "prefetch.global.L2 [$1]; // $0",
                    "=r,l",
                    [line_ptr],
                    dtype=tl.int32,
                    is_pure=False,
                    pack=1,
                )
                if EPILOGUE == 2:
                    tl.inline_asm_elementwise(
                        "prefetch.global.L2 [$1]; // $0",
                        "=r,l",
                        [line_ptr + N * K],
                        dtype=tl.int32,
                        is_pure=False,
                        pack=1,
                    )
            gdc_launch_dependents()
            gdc_wait()
        if PARTS > 0:
            squares = _load_squares(sum_squares_in_ptr, row, num_rows, parts_stride, PARTS, BLOCK_M)
        for k in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
            k_col = k + tl.arange(0, BLOCK_K)
            live = (row < num_rows)[:, None]
            w_live = (col < N)[:, None] & (k_col < K)[None, :]
            if K % BLOCK_K != 0:
                live = live & (k_col < K)[None, :]
            x = tl.load(x_row_ptr + k_col[None, :], mask=live, other=0.0)
            if EVEN:
                w = tl.load(w_row_ptr + k_col[None, :])
            else:
                w = tl.load(w_row_ptr + k_col[None, :], mask=w_live, other=0.0)
            if SWAP:
                acc = tl.dot(w, tl.trans(x), acc)
            else:
                acc = tl.dot(x, tl.trans(w), acc)
            if EPILOGUE == 2:
                if EVEN:
                    u = tl.load(w_row_ptr + N * K + k_col[None, :])
                else:
                    u = tl.load(w_row_ptr + N * K + k_col[None, :], mask=w_live, other=0.0)
                if SWAP:
                    up = tl.dot(u, tl.trans(x), up)
                else:
                    up = tl.dot(x, tl.trans(u), up)
    last = True
    if SPLIT_K > 1:
        last, acc, up = _reduce_splits(acc, up, counter_ptr, partial_ptr, SPLIT_K, EPILOGUE)
    if last:
        _finish(
            acc, up, squares, row, col, num_rows, residual_ptr, out_ptr, norm_ptr, scaled_ptr,
            sum_squares_out_ptr, padded_rows, eps, N, K, EPILOGUE, PARTS, SWAP,
        )  # fmt: skip


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    workspace: LinearWorkspace,
    epilogue: int,
    config: _Config,
    norm_weight: torch.Tensor | None = None,
    sum_squares: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """norm_weight: of the norm before a gemv, or after a residual epilogue. Returns the output and,
    from a tensor-core kernel's residual epilogue, output * norm_weight and its parts of squares."""
    m, k = x.shape
    n = weight.shape[0] // (2 if epilogue == SILU else 1)
    assert weight.is_contiguous() and x.stride(1) == 1, (weight.stride(), x.stride())
    assert residual is None or residual.is_contiguous(), residual.stride()
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    pdl = gpu(x.device).pdl
    columns = cdiv(n, config.block_n)
    if config.kind == "gemv":
        _gemv_kernel[(columns,)](
            x,
            weight,
            x if norm_weight is None else norm_weight,
            x if residual is None else residual,
            out,
            x.stride(0),
            eps,
            M=m,
            N=n,
            K=k,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            NORM=norm_weight is not None and epilogue != RESIDUAL,
            EPILOGUE=epilogue,
            PDL=pdl,
            num_warps=config.warps,
            launch_pdl=pdl,
        )
        return out, None, None
    row_tiles = cdiv(m, config.block_m)
    scaled, squares = out, workspace.partial
    if epilogue == RESIDUAL:
        scaled = torch.empty_like(out)
        shape = (columns, row_tiles * config.block_m)
        squares = torch.empty(shape, dtype=torch.float32, device=x.device)
    tile_size = config.block_m * config.block_n * (2 if epilogue == SILU else 1)
    programs = columns * row_tiles * config.split_k
    assert config.split_k == 1 or (
        programs * tile_size <= workspace.partial.numel()
        and columns * row_tiles <= workspace.counters.numel()
    ), (m, n, k, config)
    share = cdiv(cdiv(k, config.split_k), config.block_k) * config.block_k
    _dot_kernel[(columns, config.split_k, row_tiles)](
        x,
        weight,
        workspace.partial if sum_squares is None else sum_squares,
        x if residual is None else residual,
        out,
        x if norm_weight is None else norm_weight,
        scaled,
        squares,
        workspace.partial,
        workspace.counters,
        m,
        x.stride(0),
        0 if sum_squares is None else sum_squares.stride(0),
        row_tiles * config.block_m,
        eps,
        N=n,
        K=k,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLIT_K=config.split_k,
        ONE_SHOT=config.kind == "one_shot",
        EPILOGUE=epilogue,
        PARTS=0 if sum_squares is None else sum_squares.shape[0],
        SWAP=config.swap,
        PREFETCH=next_power_of_2(min(share, 2048) // 64) if row_tiles == 1 else 0,
        PDL=pdl,
        STAGES=config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=pdl,
    )
    return (out, scaled, squares) if epilogue == RESIDUAL else (out, None, None)


def _choose(x: torch.Tensor, weight: torch.Tensor, epilogue: int) -> _Config | None:
    """The kernel for these shapes, or None for cuBLAS (and for tensors that no kernel takes)."""
    m, k = x.shape
    n = weight.shape[0] // (2 if epilogue == SILU else 1)
    if m == 0 or not use_triton(x) or not supports(m, n, k, x.dtype, epilogue):
        return None
    return _config(m, n, k, epilogue, gpu(x.device))


def normalize(x: NormInput) -> torch.Tensor:
    """The norm's result, dtype [M, K], computed unless it is there already."""
    return rms_norm(x.hidden, x.weight, x.eps) if x.normed is None else x.normed


def linear(x: torch.Tensor, weight: torch.Tensor, workspace: LinearWorkspace) -> torch.Tensor:
    """x @ weight^T.

    x: dtype [M, K] rows at any stride.
    weight: dtype [N, K].
    Returns dtype [M, N].
    """
    config = _choose(x, weight, PLAIN)
    if config is None:
        return linear_ref(x, weight)
    return _launch(x, weight, workspace, PLAIN, config)[0]


def norm_linear(
    x: NormInput, weight: torch.Tensor, workspace: LinearWorkspace
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """norm(x) @ weight^T.

    x: the stream and its norm, rows [M, K].
    weight: dtype [N, K].
    Returns (out: dtype [M, N], None), or (out, sum_squares) where cuBLAS took the rows before their
    1/rms: the reader has to apply it (`qk_norm_rope` does, given sum_squares and K).
    """
    config = _choose(x.hidden, weight, PLAIN)
    if config is not None:
        return _norm_launch(x, weight, workspace, PLAIN, config), None
    if x.scaled is not None:
        return F.linear(x.scaled, weight), x.sum_squares
    return F.linear(normalize(x), weight), None


def norm_linear_silu_mul(
    x: NormInput, weight: torch.Tensor, workspace: LinearWorkspace
) -> torch.Tensor:
    """SiLU(gate) * up of gate|up = norm(x) @ weight^T.

    x: the stream and its norm, rows [M, K].
    weight: dtype [2 * N, K] gate rows, then up rows.
    Returns dtype [M, N].
    """
    config = _choose(x.hidden, weight, SILU)
    if config is not None:
        return _norm_launch(x, weight, workspace, SILU, config)
    if x.scaled is not None:
        gate_up = F.linear(x.scaled, weight)
        return silu_and_mul(gate_up, x.sum_squares, x.hidden.shape[1], x.eps)
    return silu_and_mul(F.linear(normalize(x), weight))


def _norm_launch(
    x: NormInput, weight: torch.Tensor, workspace: LinearWorkspace, epilogue: int, config: _Config
) -> torch.Tensor:
    if config.kind == "gemv":
        return _launch(x.hidden, weight, workspace, epilogue, config, x.weight, eps=x.eps)[0]
    if x.scaled is None:
        return _launch(normalize(x), weight, workspace, epilogue, config)[0]
    return _launch(
        x.scaled, weight, workspace, epilogue, config, sum_squares=x.sum_squares, eps=x.eps
    )[0]


def residual_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    workspace: LinearWorkspace,
) -> NormInput:
    """residual + x @ weight^T, and what the norm after it needs.

    x: dtype [M, K] rows at any stride.
    weight: dtype [N, K].
    residual: dtype [M, N] the stream before; left as it is.
    norm_weight: dtype [N] of the norm that reads the new stream first.
    Returns the new stream with that norm.
    """
    config = _choose(x, weight, RESIDUAL)
    if config is None:
        return residual_linear_ref(x, weight, residual, norm_weight, eps)
    hidden, scaled, squares = _launch(
        x, weight, workspace, RESIDUAL, config, norm_weight, residual=residual
    )
    if scaled is None:
        return NormInput(hidden, norm_weight, eps)
    return NormInput(hidden, norm_weight, eps, scaled=scaled, sum_squares=squares)
