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
    size = runner.config.kvcache_block_size
    reason = f"; {runner.backend_reason}" if runner.backend_reason else ""
    logger.info(
        "nanovllm %s on %s: %s, attention %s, %.1fM parameters%s, %d KV blocks of %d tokens"
        " (%d tokens), ready in %.1f s%s",
        nanovllm.__version__,
        device_name,
        str(runner.dtype).removeprefix("torch."),
        runner.backend.name,
        runner.num_parameters / 1e6,
        f" on each of {distributed.tp_size()} ranks" if distributed.tp_size() > 1 else "",
        runner.num_blocks,
        size,
        runner.num_blocks * size,
        seconds,
        reason,
    )
