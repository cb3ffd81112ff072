"""SiLU(gate) * up on packed gate|up rows. Knows rows, not layers."""

import torch

from nanovllm.kernels import launch
from nanovllm.kernels.launch import gdc_launch_dependents, gdc_wait, tl, triton


def silu_and_mul_ref(
    gate_up: torch.Tensor,
    sum_squares: torch.Tensor | None = None,
    hidden_size: int = 0,
    eps: float = 0.0,
) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    if sum_squares is not None:
        rstd = torch.rsqrt(sum_squares.sum(0)[: len(gate_up), None] / hidden_size + eps)
        gate, up = (gate * rstd).to(gate_up.dtype), (up * rstd).to(gate_up.dtype)
    return torch.nn.functional.silu(gate).mul_(up)


@triton.jit(do_not_specialize=["num_rows"])
def _silu_and_mul_kernel(
    gate_up_ptr, sum_squares_ptr, out_ptr, num_rows, row_stride, parts, parts_stride, hidden_size,
    eps,
    N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = row.to(tl.int64)[:, None]
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    live = (rows < num_rows) & (cols < N)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up_ptr + rows * row_stride + cols, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + rows * row_stride + N + cols, mask=live, other=0.0).to(tl.float32)
    if BLOCK_PARTS > 0:
        part = tl.arange(0, BLOCK_PARTS)[None, :]
        squares = tl.load(
            sum_squares_ptr + part * parts_stride + row[:, None],
            mask=(part < parts) & (row[:, None] < num_rows),
            other=0.0,
        )
        rstd = tl.rsqrt(tl.sum(squares, 1) / hidden_size + eps)[:, None]
        gate *= rstd
        up *= rstd
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + rows * N + cols, y.to(out_ptr.dtype.element_ty), mask=live)


def silu_and_mul(
    gate_up: torch.Tensor,
    sum_squares: torch.Tensor | None = None,
    hidden_size: int = 0,
    eps: float = 0.0,
) -> torch.Tensor:
    """SiLU(gate) * up.

    gate_up: dtype [T, 2 * N] gate columns, then up columns; rows at any stride.
    sum_squares: fp32 [parts, >= T], if the matmul before was fed h * norm weight: parts of the sum
        of h * h, from which 1/rms over hidden_size is applied here.
    Returns dtype [T, N].
    """
    if not launch.use_triton(gate_up) or gate_up.numel() == 0:
        return silu_and_mul_ref(gate_up, sum_squares, hidden_size, eps)
    num_rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, n), dtype=gate_up.dtype, device=gate_up.device)
    rows = 4 if num_rows >= 1024 else 1
    block_n = min(1024, launch.next_power_of_2(n))
    parts, stride = (0, 0) if sum_squares is None else (len(sum_squares), sum_squares.stride(0))
    pdl = launch.gpu(gate_up.device).pdl
    _silu_and_mul_kernel[(launch.cdiv(num_rows, rows), launch.cdiv(n, block_n))](
        gate_up, sum_squares, out, num_rows, gate_up.stride(0), parts, stride, hidden_size, eps,
        N=n, BLOCK_N=block_n, ROWS=rows,
        BLOCK_PARTS=launch.next_power_of_2(parts) if parts else 0, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    return out
