"""What can be refused before a device is touched: a config, a checkpoint, a backend."""

from pathlib import Path
from typing import Any

import torch

from nanovllm.attention import select_backend
from nanovllm.config import Config
from nanovllm.engine.placement import select_device, select_dtype
from nanovllm.layers.attention import Attention
from nanovllm.models import get_model_class
from nanovllm.utils.loader import check_checkpoint


def check_model(config: Config, hf_config: Any, checkpoint: Path) -> tuple[int, int]:
    """Refuse what cannot work before the device is touched; (longest sequence, head_dim)."""
    if config.deterministic and select_device(config, 0).type == "cuda":
        raise ValueError("deterministic: got True on CUDA, needs the CPU, try device='cpu'")
    model_class = get_model_class(hf_config)
    tp_size, max_model_len = config.tensor_parallel_size, config.max_model_len
    max_model_len = model_class.check_config(hf_config, tp_size, max_model_len)
    with torch.device("meta"):
        skeleton = model_class(hf_config)
    if config.load_format == "auto":
        check_checkpoint(skeleton, checkpoint)
    head_dim = next(m.head_dim for m in skeleton.modules() if isinstance(m, Attention))
    return max_model_len, head_dim


def check_backend(config: Config, hf_config: Any, head_dim: int) -> None:
    """Refuse a device, dtype or attention backend that cannot be had."""
    device = select_device(config, 0)
    dtype = select_dtype(config, hf_config, device)
    select_backend(config.attention_backend, device, dtype, head_dim, config.kvcache_block_size)
