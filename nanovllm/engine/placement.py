"""Where and in which type a rank computes."""

from typing import Any

import torch

from nanovllm.config import Config


def select_device(config: Config, rank: int) -> torch.device:
    """This rank's device; ValueError when CUDA is asked for and there are too few GPUs."""
    num_gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    if config.device == "cpu" or (config.device == "auto" and num_gpus == 0):
        return torch.device("cpu")
    if num_gpus < config.tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size: got {config.tensor_parallel_size} on CUDA with {num_gpus} GPUs"
            " visible, needs one GPU per rank, try a smaller number or device='cpu'"
        )
    return torch.device("cuda", rank)


def select_dtype(config: Config, hf_config: Any, device: torch.device) -> torch.dtype:
    """The type to compute in.

    "auto" is the checkpoint's own type on CUDA (bfloat16 when it names none) and float32 on the
    CPU, where half types are emulated slowly and gain nothing.
    """
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if device.type == "cpu":
        return torch.float32
    # transformers 5 calls the field dtype, earlier releases torch_dtype; each may be a string.
    dtype = getattr(hf_config, "dtype", None) or getattr(hf_config, "torch_dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
