"""What a start logs, and that it is seen."""

import logging

import nanovllm
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.utils import distributed

logger = logging.getLogger("nanovllm")


def show_log() -> None:
    """Let the log line be seen when the program has not set up logging itself."""
    if not logging.getLogger().handlers and not logger.handlers:
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)


def log_start(runner: ModelRunner, device_name: str, seconds: float) -> None:
    """The one line of a start: what runs where, and for how many tokens there is room."""
    num_ranks, size = distributed.tp_size(), runner.config.kvcache_block_size
    ranks = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
    reason = f"; {runner.backend_reason}" if runner.backend_reason else ""
    logger.info(
        f"nanovllm {nanovllm.__version__} on {device_name}: "
        f"{str(runner.dtype).removeprefix('torch.')}, attention {runner.backend.name}, "
        f"{runner.num_parameters / 1e6:.1f}M parameters{ranks}, {runner.num_blocks} KV blocks of "
        f"{size} tokens ({runner.num_blocks * size} tokens), ready in {seconds:.1f} s{reason}"
    )
