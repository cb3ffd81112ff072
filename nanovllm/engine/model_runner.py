"""ModelRunner: one rank's model, KV cache, CUDA graphs and, on rank 0, the sampler.

It turns a ScheduledBatch into sampled tokens. It knows tensors, never sequences or queues.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.attention import select_backend
from nanovllm.config import Config
from nanovllm.engine import input_batch, kv_cache
from nanovllm.engine.cuda_graph import DecodeGraphs
from nanovllm.engine.kv_cache import CacheShape
from nanovllm.engine.sequence import ScheduledBatch
from nanovllm.layers.attention import Attention
from nanovllm.layers.sampler import Sampler
from nanovllm.models import get_model_class
from nanovllm.utils import distributed
from nanovllm.utils.context import use_context
from nanovllm.utils.loader import load_dummy, load_model

logger = logging.getLogger(__name__)


class ModelRunner:
    def __init__(
        self,
        config: Config,
        hf_config: Any,
        checkpoint: Path,
        max_model_len: int,
        rank: int,
        init_method: str,
    ) -> None:
        """Load the model, size the KV cache and capture the graphs of one rank.

        hf_config: the checkpoint's transformers config, checked already.
        init_method: where the ranks meet; unused when there is one.
        """
        self.config = config
        self.max_model_len = max_model_len
        self.device = select_device(config, rank)
        self.dtype = select_dtype(config, hf_config, self.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        distributed.init(
            rank,
            config.tensor_parallel_size,
            init_method,
            "nccl" if self.device.type == "cuda" else "gloo",
            self.device,
        )
        self.model: Any = self._load_model(hf_config, checkpoint)
        layers = [m for m in self.model.modules() if isinstance(m, Attention)]
        self.num_parameters = sum(p.numel() for p in self.model.parameters())
        self.backend, self.backend_reason = select_backend(
            config.attention_backend,
            self.device,
            self.dtype,
            layers[0].head_dim,
            config.kvcache_block_size,
        )
        for layer in layers:
            layer.backend = self.backend
        self.sampler = Sampler()
        self.generator = torch.Generator(self.device).manual_seed(config.seed)
        shape = CacheShape(
            num_layers=len(layers),
            block_size=config.kvcache_block_size,
            num_kv_heads=layers[0].num_kv_heads,
            head_dim=layers[0].head_dim,
            dtype=self.dtype,
        )
        self.num_blocks = self._size_pool(shape)
        self.pool = kv_cache.allocate(self.model, shape, self.num_blocks, self.backend, self.device)
        self.graphs = self._capture_graphs()

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> npt.NDArray[np.int64] | None:
        """Compute one step; on rank 0 the sampled tokens, int64 [num sampled], elsewhere None.

        -1 stands for a row whose logits were not finite.
        """
        inputs = input_batch.build(batch, self.config.kvcache_block_size, self.device)
        with use_context(inputs.context):
            if batch.is_prefill or self.graphs is None or batch.num_seqs > self.graphs.sizes[-1]:
                hidden_states = self.model(inputs.input_ids, inputs.positions)
            else:
                hidden_states = self.graphs.replay(inputs)
            logits = self.model.compute_logits(hidden_states)
        if logits is None:
            return None
        token_ids = self.sampler(logits, inputs.temperatures, self.generator, inputs.all_greedy)
        return token_ids.cpu().numpy()

    def close(self) -> None:
        """Give back the device memory and leave the process group."""
        self.graphs = None
        del self.model, self.pool
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        distributed.destroy()

    def _load_model(self, hf_config: Any, checkpoint: Path) -> torch.nn.Module:
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device(self.device):
                model = get_model_class(hf_config)(hf_config)
        finally:
            torch.set_default_dtype(default_dtype)
        if self.config.load_format == "dummy":
            load_dummy(model, self.config.seed)
        else:
            load_model(model, checkpoint, self.device, show_progress=distributed.tp_rank() == 0)
        return model.eval()

    def _size_pool(self, shape: CacheShape) -> int:
        """Blocks of this engine's pool: as configured or as fits, the same on every rank."""
        config = self.config
        if config.num_kvcache_blocks is not None:
            num_blocks = config.num_kvcache_blocks
        elif self.device.type == "cuda":
            self._warm_up()
            num_blocks = kv_cache.num_blocks_on_cuda(
                shape, config.gpu_memory_utilization, self.device
            )
        else:
            max_tokens = config.max_num_seqs * self.max_model_len
            num_blocks = kv_cache.num_blocks_on_cpu(shape, max_tokens)
        return distributed.min_over_ranks(num_blocks)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Run the largest step there can be, so that the allocator's peak is known.

        The largest prefill, then sampling at the largest batch: with a large vocabulary the
        logits of max_num_seqs rows outgrow the activations.
        """
        config = self.config
        budget = config.max_num_batched_tokens
        num_full, rest = divmod(budget, self.max_model_len)
        lens = [self.max_model_len] * num_full + [rest] * (rest > 0)
        self.run(_warm_up_batch(lens, config.kvcache_block_size))
        self.run(_warm_up_batch([1] * min(config.max_num_seqs, budget), config.kvcache_block_size))

    @torch.inference_mode()
    def _capture_graphs(self) -> DecodeGraphs | None:
        config = self.config
        if self.device.type != "cuda" or config.enforce_eager or not self.backend.is_graph_safe:
            return None
        return DecodeGraphs(
            self.model,
            min(config.max_num_seqs, config.max_num_batched_tokens, self.num_blocks),
            -(-self.max_model_len // config.kvcache_block_size),
            self.max_model_len,
            self.device,
        )


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


def _warm_up_batch(seq_lens: list[int], block_size: int) -> ScheduledBatch:
    """A prefill of zeros with these lengths and random sampling; no cache is bound yet."""
    lens = np.array(seq_lens, np.int32)
    n = len(lens)
    return ScheduledBatch(
        is_prefill=True,
        rows=np.arange(n, dtype=np.int32),
        input_ids=np.zeros(lens.sum(), np.int32),
        num_cached_tokens=np.zeros(n, np.int32),
        num_scheduled_tokens=lens,
        block_tables=np.zeros((n, -(-int(lens.max()) // block_size)), np.int32),
        is_sampled=np.ones(n, np.bool_),
        temperatures=np.ones(n, np.float32),
    )
