"""ModelRunner: one rank's model, KV cache, CUDA graphs and, on rank 0, the sampler.

It turns a ScheduledBatch into sampled tokens. It knows tensors, never sequences or queues.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.attention import AttentionBackend, select_backend
from nanovllm.config import Config
from nanovllm.engine import input_batch, kv_cache
from nanovllm.engine.cuda_graph import DecodeGraphs, PrefillGraphs, StepResult
from nanovllm.engine.decode_state import DecodeState
from nanovllm.engine.input_batch import InputBatch
from nanovllm.engine.kv_cache import CacheShape
from nanovllm.engine.sequence import ScheduledBatch
from nanovllm.layers.attention import Attention
from nanovllm.layers.sampler import Sampler
from nanovllm.models import get_model_class
from nanovllm.utils import distributed
from nanovllm.utils.context import use_context
from nanovllm.utils.loader import load_dummy, load_model

logger = logging.getLogger(__name__)


class StepHandle:
    """A launched step's sampled tokens, on their way to the host."""

    def __init__(self, tokens: torch.Tensor) -> None:
        """tokens: int64 [num_sampled]; may be overwritten once this returns."""
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = tokens

    def token_ids(self) -> npt.NDArray[np.int64]:
        """int64 [num_sampled], -1 where the logits were not finite; the one wait for the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()


class ModelRunner:
    keep_logits = False  # tests: make the logits of captured steps available in last_result

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
        try:
            self._start(hf_config, checkpoint)
        except BaseException:
            distributed.destroy()
            raise

    def _start(self, hf_config: Any, checkpoint: Path) -> None:
        """What __init__ does once the rank has joined the others."""
        config = self.config
        self.model: Any = self._load_model(hf_config, checkpoint)
        layers = [m for m in self.model.modules() if isinstance(m, Attention)]
        self.num_parameters = sum(p.numel() for p in self.model.parameters())
        self.backend, self.backend_reason = self._select_backend(layers[0].head_dim)
        for layer in layers:
            layer.backend = self.backend
        self.sampler = Sampler()
        self.num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.state = DecodeState.create(
            self.num_rows,
            -(-self.max_model_len // config.kvcache_block_size),
            config.kvcache_block_size,
            self.device,
        )
        self.last_result: StepResult | None = None
        self.decode_graphs: DecodeGraphs | None = None
        self.prefill_graphs: PrefillGraphs | None = None
        shape = CacheShape(
            num_layers=len(layers),
            block_size=config.kvcache_block_size,
            num_kv_heads=layers[0].num_kv_heads,
            head_dim=layers[0].head_dim,
            dtype=self.dtype,
        )
        self.num_blocks = self._size_pool(shape)
        self.pool = kv_cache.allocate(self.model, shape, self.num_blocks, self.backend, self.device)
        if self.device.type == "cuda":
            self._compile_prefills()
            self._capture_graphs()

    def _select_backend(self, head_dim: int) -> tuple[AttentionBackend, str]:
        name, block_size = self.config.attention_backend, self.config.kvcache_block_size
        return select_backend(name, self.device, self.dtype, head_dim, block_size)

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> StepHandle:
        """Start one step; its tokens reach the next on the device, and the host by the handle."""
        graphs = self.prefill_graphs if batch.is_prefill else self.decode_graphs
        result = None if graphs is None else graphs.replay(batch)
        if result is None:
            result = self._forward(self._build(batch), batch.all_greedy)
        self.last_result = result
        return StepHandle(result.tokens)

    def _build(self, batch: ScheduledBatch) -> InputBatch:
        if batch.is_prefill:
            return input_batch.build_prefill(batch, self.state)
        arrays = input_batch.decode_arrays(batch, batch.num_seqs)
        max_context_len = int(batch.num_cached_tokens.max()) + 1
        t = input_batch.to_device(arrays, self.device)
        return input_batch.build_decode(t["rows"], t["new_blocks"], self.state, max_context_len)

    def _forward(self, inputs: InputBatch, all_greedy: bool = False) -> StepResult:
        with use_context(inputs.context):
            hidden_states = self.model(inputs.input_ids, inputs.positions)
            logits = self.model.compute_logits(hidden_states)
        if logits is not None:
            tokens = self.sampler(
                logits, inputs.temperatures, inputs.seeds, inputs.draw_positions, all_greedy
            )
        else:
            tokens = torch.empty(len(inputs.rows), dtype=torch.int64, device=self.device)
        distributed.broadcast(tokens)  # each rank advances its own copy of the state
        self.state.append(inputs.rows, tokens)
        return StepResult(tokens, logits)

    def _captured_step(self, rows: torch.Tensor, new_blocks: torch.Tensor) -> StepResult:
        # Lengths are read on the device: the bound only has to hold for every replay.
        inputs = input_batch.build_decode(rows, new_blocks, self.state, self.max_model_len)
        return self._forward(inputs)

    def close(self) -> None:
        """Give back the device memory and leave the process group."""
        self.decode_graphs = self.prefill_graphs = None
        self.last_result = None
        del self.model, self.pool, self.state
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        distributed.destroy()

    def _make_model(self, hf_config: Any) -> torch.nn.Module:
        """The model with uninitialised weights."""
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device(self.device):
                return get_model_class(hf_config)(hf_config).eval()
        finally:
            torch.set_default_dtype(default_dtype)

    def _load_model(self, hf_config: Any, checkpoint: Path) -> torch.nn.Module:
        model = self._make_model(hf_config)
        if self.config.load_format == "dummy":
            load_dummy(model, self.config.seed)
        else:
            load_model(model, checkpoint, self.device, show_progress=distributed.tp_rank() == 0)
        return model

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
        num_full, rest = divmod(config.max_num_batched_tokens, self.max_model_len)
        lens = [self.max_model_len] * num_full + [rest] * (rest > 0)
        self.launch(warm_up_batch(lens[: self.num_rows], config.kvcache_block_size))
        self.launch(warm_up_batch([1] * self.num_rows, config.kvcache_block_size))

    @torch.inference_mode()
    def _compile_prefills(self) -> None:
        """Run each kind of prefill once, so that no kernel is compiled while a user waits.

        With and without cached context, few sequences and many; what is written lies in slots and
        rows that nobody owns yet.
        """
        length = min(16, self.max_model_len - 1)
        for num_seqs in {min(2, self.num_rows), min(257, self.num_rows)}:
            for num_cached in (0, 1):
                batch = warm_up_batch(
                    [length] * num_seqs, self.config.kvcache_block_size, num_cached
                )
                self._forward(self._build(batch))

    @torch.inference_mode()
    def _capture_graphs(self) -> None:
        config = self.config
        if config.enforce_eager or not self.backend.is_graph_safe:
            return
        pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        max_num_seqs = min(self.num_rows, self.num_blocks)
        self.decode_graphs = DecodeGraphs(
            self._captured_step, max_num_seqs, pool, self.keep_logits, self.device
        )
        self.prefill_graphs = PrefillGraphs(
            self._forward, self.state, config.max_num_batched_tokens, pool, self.keep_logits
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


def warm_up_batch(seq_lens: list[int], block_size: int, num_cached: int = 0) -> ScheduledBatch:
    """A prefill of zeros with these lengths after num_cached tokens, sampled at random."""
    lens = np.array(seq_lens, np.int32)
    n = len(lens)
    return ScheduledBatch(
        is_prefill=True,
        rows=np.arange(n, dtype=np.int32),
        seq_ids=np.arange(n),
        num_cached_tokens=np.full(n, num_cached, np.int32),
        num_scheduled_tokens=lens,
        is_sampled=np.ones(n, np.bool_),
        all_greedy=False,
        new_blocks=np.empty(0, np.int32),
        input_ids=np.zeros(lens.sum(), np.int32),
        block_tables=np.zeros((n, -(-(int(lens.max()) + num_cached) // block_size)), np.int32),
        temperatures=np.ones(n, np.float32),
        seeds=np.zeros(n, np.int64),
    )
