"""Copies of leading tokens' K/V from block to block, all layers and all copies in one launch.

torch's own copy takes a launch for each layer, since their distance exceeds 31 bits.
"""

import torch

from nanovllm.kernels import launch
from nanovllm.kernels.launch import tl, triton

_SIZE = 4096  # elements a program


def copy_tokens_ref(pool: torch.Tensor, copies: torch.Tensor) -> None:
    for source, target, num_tokens in copies.tolist():
        pool[:, :, target, :num_tokens] = pool[:, :, source, :num_tokens]


# Later waves of copies begin anywhere in their list.
@triton.jit(do_not_specialize=["copies_ptr", "num_blocks"])
def _copy_tokens_kernel(
    pool_ptr, copies_ptr, num_blocks,
    TOKEN: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """TOKEN, BLOCK: elements of one token and one block of a layer's K or V."""
    copy_ptr = copies_ptr + tl.program_id(0) * 3
    source = tl.load(copy_ptr).to(tl.int64)
    target = tl.load(copy_ptr + 1).to(tl.int64)
    at = tl.program_id(2) * SIZE + tl.arange(0, SIZE)
    live = at < tl.load(copy_ptr + 2) * TOKEN
    layer_ptr = pool_ptr + tl.program_id(1).to(tl.int64) * num_blocks * BLOCK
    values = tl.load(layer_ptr + source * BLOCK + at, mask=live)
    tl.store(layer_ptr + target * BLOCK + at, values, mask=live)


def copy_tokens(pool: torch.Tensor, copies: torch.Tensor) -> None:
    """Copy K/V of leading tokens between blocks, as if one copy followed the other.

    pool: dtype [2, num_layers, num_blocks, block_size, num_kv_heads, head_dim], contiguous.
    copies: int32 [n, 3] source block, target block, tokens; on the host.
    """
    if not launch.use_triton(pool):
        copy_tokens_ref(pool, copies)
        return
    assert pool.is_contiguous(), pool.stride()
    for wave in copies.to(pool.device, non_blocking=True).split(_wave_sizes(copies)):
        _copy_at_once(pool, wave)


def _copy_at_once(pool: torch.Tensor, copies: torch.Tensor) -> None:
    """copies: on the device, none of which touches what another one writes."""
    token = pool[0, 0, 0, 0].numel()
    block = pool.size(3) * token
    grid = len(copies), 2 * pool.size(1), launch.cdiv(block, _SIZE)
    _copy_tokens_kernel[grid](
        pool, copies, pool.size(2), TOKEN=token, BLOCK=block, SIZE=_SIZE, num_warps=4
    )


def _wave_sizes(copies: torch.Tensor) -> list[int]:
    """How many copies may run at once, again and again: none touches what another one writes."""
    sizes, read, written = [0], set[int](), set[int]()
    for source, target, _ in copies.tolist():
        if source in written or target in read or target in written:
            sizes.append(0)
            read.clear()
            written.clear()
        read.add(source)
        written.add(target)
        sizes[-1] += 1
    return sizes
