"""ModelRunner: one rank's model, KV cache, CUDA graphs and sampler.

It turns a ScheduledBatch into sampled tokens. It knows tensors, never sequences or queues.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanovllm.attention import AttentionBackend, select_backend
from nanovllm.config import Config
from nanovllm.engine import cuda_graph, input_batch, kv_cache
from nanovllm.engine.batching import kinds_of_prefill, split_tokens, warm_up_batch
from nanovllm.engine.cuda_graph import DecodeGraphs, PrefillGraphs, StepResult
from nanovllm.engine.decode_state import DecodeState
from nanovllm.engine.input_batch import InputBatch
from nanovllm.engine.kv_cache import CacheShape
from nanovllm.engine.placement import select_device, select_dtype
from nanovllm.engine.prefix_groups import NO_GROUPS, key_step, work_list
from nanovllm.engine.redraw import Redrawer
from nanovllm.engine.row_by_row import each_row, hidden_states
from nanovllm.engine.sequence import IntArray, ScheduledBatch
from nanovllm.engine.step_handle import StepHandle
from nanovllm.kernels.copy_tokens import copy_tokens
from nanovllm.layers.attention import Attention
from nanovllm.layers.collectives import share_tokens_of_rank0
from nanovllm.layers.logprobs import Logprobs, prompt_logprobs_of_pieces
from nanovllm.layers.sampler import Sampler
from nanovllm.models import get_model_class
from nanovllm.utils import distributed
from nanovllm.utils.loader import fingerprint, load_dummy, load_model

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
        is_hopeless: Callable[[], bool] = lambda: False,
    ) -> None:
        """Load the model, size the KV cache and capture the graphs of one rank.

        hf_config: the checkpoint's transformers config, checked already.
        init_method: where the ranks meet; unused when there is one.
        is_hopeless: whether to stop waiting for the others there.
        """
        self.config = config
        self.max_model_len = max_model_len
        self.device = select_device(config, rank)
        self.dtype = select_dtype(config, hf_config, self.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        num_ranks = config.tensor_parallel_size
        row_bytes = hf_config.hidden_size * self.dtype.itemsize
        distributed.init(rank, num_ranks, init_method, self.device, row_bytes, is_hopeless)
        self._fingerprint = fingerprint(checkpoint)
        try:
            self._start(hf_config, checkpoint)
        except BaseException:
            distributed.destroy()
            raise

    def _start(self, hf_config: Any, checkpoint: Path) -> None:
        """What __init__ does once the rank has joined the others."""
        config, block_size = self.config, self.config.kvcache_block_size
        self.model: Any = self._load_model(hf_config, checkpoint)
        layers = [m for m in self.model.modules() if isinstance(m, Attention)]
        self.num_parameters = sum(p.numel() for p in self.model.parameters())
        self.backend, self.backend_reason = self._select_backend(layers[0].head_dim)
        for layer in layers:
            layer.backend = self.backend
        # Of the last step's groups and rows: most steps have the same.
        self._known_list: tuple[IntArray, int, dict[str, IntArray]] = NO_GROUPS, 0, {}
        self._heads = layers[0].num_heads, layers[0].num_kv_heads
        head: Any = self.model.lm_head
        self.sampler = Sampler(head.first_row, head.num_tokens)
        self.num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        max_num_blocks = -(-self.max_model_len // block_size)
        self.state = DecodeState.create(self.num_rows, max_num_blocks, block_size, self.device)
        self.redrawer = Redrawer(self.num_rows, self.max_model_len, self.device)
        self.last_result: StepResult | None = None  # its logits may be overwritten by the next step
        self._logits: torch.Tensor | None = None
        self.decode_graphs: DecodeGraphs | None = None
        self.prefill_graphs: PrefillGraphs | None = None
        shape = CacheShape(
            num_layers=len(layers),
            block_size=block_size,
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
        if len(batch.copies):
            copy_tokens(self.pool, torch.from_numpy(batch.copies))
        if batch.as_decode:
            batch = input_batch.enter(batch, self.state)
        graphs = self.prefill_graphs if batch.is_prefill else self.decode_graphs
        result = None if graphs is None else graphs.replay(batch)
        prompts: list[Logprobs] = []
        if result is None:
            inputs = input_batch.build(batch, self.state, self._work_list)
            if len(batch.prompt_logprobs):
                result, prompts = self._forward_with_prompts(inputs, batch)
            else:
                result = self._forward(inputs, batch.all_greedy)
        self.last_result = result
        logprobs = self._redraw(batch, result) if batch.is_redrawn else None
        return StepHandle(result.tokens, logprobs, prompts)

    def _redraw(self, batch: ScheduledBatch, result: StepResult) -> Logprobs | None:
        """Draw again, on rank 0, for the rows that ask for it, and let every rank know."""
        tokens = result.tokens
        logits = self.model.lm_head.gather(result.logits)
        logprobs = None if logits is None else self.redrawer.redraw(batch.special, logits, tokens)
        share_tokens_of_rank0(tokens)
        rows = torch.tensor(batch.rows[batch.is_sampled], dtype=torch.int64, device=self.device)
        self.state.last_tokens[rows] = tokens.int()
        return logprobs

    def facts(self) -> dict[str, Any]:
        """What every rank must have found alike, as JSON values."""
        return {
            "checkpoint": self._fingerprint,
            "dtype": str(self.dtype),
            "kvcache_block_size": self.config.kvcache_block_size,
            "num_kvcache_blocks": self.num_blocks,
            "max_model_len": self.max_model_len,
        }

    def _work_list(self, groups: IntArray, num_rows: int) -> dict[str, IntArray]:
        """What rows of a decode share, as arrays of a SharedPrefixes; none if that is not used."""
        least = self.backend.min_shared_batch
        if not self.config.cascade_attention or least is None or num_rows < least:
            return {}
        known_groups, known_rows, lists = self._known_list
        if num_rows != known_rows or not np.array_equal(groups, known_groups):
            items = self.backend.shared_items(*self._heads, self.device)
            step = key_step(self.config.kvcache_block_size)
            lists = work_list(groups, num_rows, step, *items)
            self._known_list = groups, num_rows, lists
        return lists

    def _forward(
        self, inputs: InputBatch, all_greedy: bool = False, logits_out: torch.Tensor | None = None
    ) -> StepResult:
        states = hidden_states(self.model, inputs, inputs.context, self.config)
        logits = each_row(self.model.compute_logits, self.config)(states, logits_out)
        return self._finish_step(inputs, logits, all_greedy)

    def _forward_with_prompts(
        self, inputs: InputBatch, batch: ScheduledBatch
    ) -> tuple[StepResult, list[Logprobs]]:
        """A prefill that also reports log-probabilities of prompt tokens."""
        indices = inputs.context.logits_indices
        assert indices is not None, "a prefill samples some of its rows"
        ctx = replace(inputs.context, logits_indices=None)
        states = hidden_states(self.model, inputs, ctx, self.config)
        compute_logits = each_row(self.model.compute_logits, self.config)
        found = prompt_logprobs_of_pieces(
            states,
            lambda rows: self.model.lm_head.gather(compute_logits(rows)),
            torch.tensor(batch.next_ids, device=self.device),
            batch.num_scheduled_tokens.tolist(),
            batch.prompt_logprobs.tolist(),
        )
        logits = compute_logits(states.index_select(0, indices))
        return self._finish_step(inputs, logits), found

    def _finish_step(
        self, inputs: InputBatch, logits: torch.Tensor, all_greedy: bool = False
    ) -> StepResult:
        tokens = each_row(self.sampler, self.config)(
            logits, inputs.temperatures, inputs.seeds, inputs.draw_positions, all_greedy
        )
        self.state.append(inputs.rows, tokens)  # each rank advances its own copy of the state
        return StepResult(tokens, logits)

    def _captured_forward(self, inputs: InputBatch) -> StepResult:
        # One buffer for every graph's logits, which stay readable until the next replay.
        out = None if self._logits is None else self._logits[: len(inputs.rows)]
        return self._forward(inputs, logits_out=out)

    def close(self) -> None:
        """Give back the device memory and leave the process group."""
        self.decode_graphs = self.prefill_graphs = None
        self.last_result = self._logits = None
        del self.model, self.pool, self.state, self.redrawer
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
            num_blocks = kv_cache.num_blocks_on_cpu(shape, config.max_num_seqs * self.max_model_len)
        return distributed.min_over_ranks(num_blocks)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Run the largest step there can be, so that the allocator's peak is known.

        The largest prefill, then sampling at the largest batch: with a large vocabulary the
        logits of max_num_seqs rows outgrow the activations. All layers run: the first and the last
        by themselves hold less at once than those between them.
        """
        config = self.config
        lens = split_tokens(config.max_num_batched_tokens, self.max_model_len)
        self.launch(warm_up_batch(lens[: self.num_rows], config.kvcache_block_size))
        self.launch(warm_up_batch([1] * self.num_rows, config.kvcache_block_size))

    @torch.inference_mode()
    def _compile_prefills(self) -> None:
        """Run each kind of prefill once, so that no kernel is compiled while a user waits, the copy
        that may come before it and the draw that may come after it.

        What is written lies in slots and rows that nobody owns yet.
        """
        copy_tokens(self.pool, torch.zeros(1, 3, dtype=torch.int32))
        self.redrawer.compile(self.model.lm_head.vocab_size)
        most, block_size = self.config.max_num_batched_tokens, self.config.kvcache_block_size
        for batch in kinds_of_prefill(self.num_rows, self.max_model_len - 1, most, block_size):
            with self.model.shortened():
                self._forward(input_batch.build(batch, self.state, self._work_list))

    @torch.inference_mode()
    def _capture_graphs(self) -> None:
        config = self.config
        if not self.backend.is_graph_safe:
            return
        step, state, rehearsal = self._captured_forward, self.state, self.model.shortened
        max_num_seqs = min(self.num_rows, self.num_blocks)
        decode = partial(DecodeGraphs, step, state, self._work_list, max_num_seqs)
        if config.enforce_eager:  # none is kept, but no kernel is left to compile later
            decode(partial(cuda_graph.rehearse, rehearsal=rehearsal))
            return
        pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        shape = (self.num_rows, self.model.lm_head.num_rows)
        self._logits = torch.empty(shape, dtype=self.dtype, device=self.device)
        capture = partial(cuda_graph.capture, rehearsal=rehearsal, pool=pool)
        self.decode_graphs = decode(capture)
        # NCCL's sums stay out of prefills' graphs, which would gain little.
        row_bytes = self.model.lm_head.weight[0].nbytes
        limit = min(config.max_num_batched_tokens, distributed.max_rows_of_sums(row_bytes))
        self.prefill_graphs = PrefillGraphs(step, state, limit, capture)
