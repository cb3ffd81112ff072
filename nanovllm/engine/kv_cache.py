"""The paged KV cache: how many blocks fit, the memory itself, and handing it to the layers."""

import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from nanovllm.attention.base import AttentionBackend
from nanovllm.layers.attention import Attention

# On the CPU the pool is virtual memory until it is written; it is still bounded, so that a long
# run on a laptop does not push everything else out of memory.
_CPU_POOL_BYTES = 4 << 30
_CPU_SHARE_OF_MEMORY = 0.25


@dataclass(frozen=True, slots=True)
class CacheShape:
    num_layers: int
    block_size: int
    num_kv_heads: int  # of this rank
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """K and V of one block over all layers: 28 MiB for Qwen3-0.6B and 256 tokens in bf16."""
        per_layer = self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return 2 * self.num_layers * per_layer


def num_blocks_on_cpu(shape: CacheShape, max_tokens: int) -> int:
    """Blocks for max_tokens tokens, as far as a fair share of the memory allows; at least one."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    budget = min(_CPU_POOL_BYTES, int(total * _CPU_SHARE_OF_MEMORY))
    wanted = -(-max_tokens // shape.block_size)
    return max(1, min(wanted, budget // shape.bytes_per_block))


def num_blocks_on_cuda(shape: CacheShape, utilization: float, device: torch.device) -> int:
    """Blocks that fit once the largest step has run (ModelRunner warms up before it asks).

    What the process may plan for, less what is in use by anybody, less the growth that the
    warm-up showed beyond what is still allocated. Raises ValueError when not even one block fits.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    peak, current = stats["allocated_bytes.all.peak"], stats["allocated_bytes.all.current"]
    budget = int(total * utilization) - (total - free) - (peak - current)
    num_blocks = budget // shape.bytes_per_block
    if num_blocks < 1:
        gib = 1 << 30
        raise ValueError(
            f"gpu_memory_utilization: got {utilization}, which leaves {budget / gib:.2f} GiB for"
            f" the KV cache on a device with {free / gib:.2f} of {total / gib:.2f} GiB free, needs"
            f" {shape.bytes_per_block / gib:.3f} GiB for one block; try a higher value, a smaller"
            " max_num_batched_tokens, or free the device"
        )
    return num_blocks


def allocate(
    model: nn.Module,
    shape: CacheShape,
    num_blocks: int,
    backend: AttentionBackend,
    device: torch.device,
) -> torch.Tensor:
    """Allocate the pool and bind each layer's K and V.

    Returns the pool: dtype [2, num_layers, num_blocks, block_size, num_kv_heads, head_dim], zeros,
    so that slots not written yet hold finite values. Raises ValueError where there is no room.
    """
    sizes = (
        2, shape.num_layers, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim
    )  # fmt: skip
    num_bytes = num_blocks * shape.bytes_per_block
    try:
        if device.type == "cpu":
            # numpy's zeros take no memory until a page is written, torch's do at once.
            pool = torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(shape.dtype).view(sizes)
        else:
            pool = torch.zeros(sizes, dtype=shape.dtype, device=device)
    except (MemoryError, ValueError, torch.OutOfMemoryError) as error:
        raise ValueError(
            f"num_kvcache_blocks: got {num_blocks} blocks of {shape.block_size} tokens, which take"
            f" {num_bytes >> 30} GiB, needs what the device has free, try fewer"
        ) from error
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    assert len(layers) == shape.num_layers, (len(layers), shape.num_layers)
    for i, layer in enumerate(layers):
        layer.bind(pool[0, i], pool[1, i], backend)
    return pool
