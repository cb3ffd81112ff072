"""A step one token at a time, for results whose bits do not depend on what else is in it.

How a product or a softmax rounds depends on the shape of the call: a row of a batch, a chunk of a
prompt and a single token get different last bits. Here every call has the shape of one token of its
position, whatever the scheduler did: a prompt's chunk is as many decodes, one after the other.
"""

from collections.abc import Callable
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.engine.input_batch import InputBatch
from nanovllm.utils.context import Context, use_context


def each_row(function: Callable[..., Any], config: Config) -> Callable[..., Any]:
    """`function` of rows, which is called with one row of each tensor at a time if the config is
    deterministic. It may give None for a row, and then does for all."""

    def call(*args: Any) -> Any:
        if not config.deterministic or not len(args[0]):
            return function(*args)
        columns = [a.split(1) if torch.is_tensor(a) else [a] * len(args[0]) for a in args]
        # Cloned: every row begins where an allocation does, wherever it stood.
        parts = [function(row.clone(), *rest) for row, *rest in zip(*columns, strict=True)]
        return None if parts[0] is None else torch.cat(parts)

    return call


def hidden_states(model: Any, inputs: InputBatch, ctx: Context, config: Config) -> torch.Tensor:
    """The model's result for the step that ctx describes, float [num_logits, hidden_size].

    If the config is deterministic, by a decode of each token after those before it.
    """
    if not config.deterministic:
        with use_context(ctx):
            return model(inputs.input_ids, inputs.positions)
    size, known = config.kvcache_block_size, ctx.block_tables
    chunks = ctx.slot_mapping.split(ctx.seqlens_q or 1)
    # A prefill without tables begins with each sequence's first slot, hence knows all its blocks.
    tables = [c[None, ::size] // size for c in chunks] if known is None else known.split(1)
    tables = [table for table, c in zip(tables, chunks, strict=True) for _ in c]
    columns = (t.split(1) for t in (inputs.input_ids, inputs.positions, ctx.slot_mapping))
    rows = []
    for token, position, slot, table in zip(*columns, tables, strict=True):
        # The longest length is left out: the CPU's backend looks at the lengths themselves.
        decode = Context(
            is_prefill=False, slot_mapping=slot, block_tables=table, context_lens=position + 1
        )
        with use_context(decode):
            rows.append(model(token, position))
    return torch.cat(rows) if ctx.logits_indices is None else torch.cat(rows)[ctx.logits_indices]
