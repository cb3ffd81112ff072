"""Time every kernel on this GPU against torch, cuBLAS and, where installed, flash-attn.

    python tests/kernels/bench_kernels.py [--only NAME ...] [--check] [--sweep] [--small]

Each case is captured in a CUDA graph over several layers' tensors, more than the L2 cache holds, as
in a model; times are medians per layer. A line gives us, TB/s or TFLOP/s, the share of this GPU's
measured copy or matmul rate, and how many times longer each alternative takes. Kernels are compiled
in parallel processes first. --check runs the gpu tests before; --sweep times other configurations
than the tables'; --small leaves out the 8B shapes.
"""

import argparse
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from cases import rope_table  # noqa: E402

from nanovllm.attention.triton_attn import TritonBackend  # noqa: E402
from nanovllm.engine.prefix_groups import find_groups, key_step, work_list  # noqa: E402
from nanovllm.kernels import (  # noqa: E402
    copy_tokens,
    grouped_gemm,
    launch,
    paged_attention,
    prefill_attention,
    shared_prefix,
    small_linear,
)
from nanovllm.kernels.moe_routing import route_ref, routing  # noqa: E402
from nanovllm.kernels.qk_norm_rope import norm_rope_ref, qk_norm_rope  # noqa: E402
from nanovllm.kernels.rms_norm import (  # noqa: E402
    add_rms_norm,
    add_rms_norm_ref,
    rms_norm,
    rms_norm_ref,
)
from nanovllm.kernels.sample import sample  # noqa: E402
from nanovllm.kernels.silu_and_mul import silu_and_mul, silu_and_mul_ref  # noqa: E402

DEVICE, DTYPE, EPS = "cuda", torch.bfloat16, 1e-6
# hidden, query heads, kv heads, intermediate; head_dim is 128
MODELS = {"0.6B": (1024, 16, 8, 3072), "8B": (4096, 32, 8, 12288)}


@dataclass
class Case:
    name: str
    run: object  # run(layer)
    layers: int
    work: float  # bytes or FLOP a layer
    unit: str = "TB/s"
    others: dict = field(default_factory=dict)  # name -> run(layer)


def rand(*shape, scale=1.0):
    return torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_(0, scale)


def graph_us(run, layers, seconds=0.02):
    """Median time of run(layer) in a replayed graph of all layers."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for layer in range(layers):
            run(layer)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            run(layer)

    def replay(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / times / layers

    replay(2)
    times = max(2, int(seconds * 1e6 / 5 / (replay(2) * layers)))
    return statistics.median(replay(times) for _ in range(5))


def limits():
    """(copy TB/s, bf16 matmul TFLOP/s) of this GPU."""
    source = torch.empty(2**30, dtype=DTYPE, device=DEVICE)
    target = torch.empty_like(source)
    copy = 2 * source.numel() * 2 / graph_us(lambda _: target.copy_(source), 1, 0.05) / 1e6
    a, b = rand(8192, 8192), rand(8192, 8192)
    return copy, 2 * 8192**3 / graph_us(lambda _: a @ b, 1, 0.1) / 1e6


# --- the cases of each kernel -----------------------------------------------------------------


def optional_flash():
    try:
        import flash_attn
    except ImportError:
        flash_attn = None
    try:
        import flash_attn_interface
    except ImportError:
        flash_attn_interface = None
    return flash_attn, flash_attn_interface


def decode_case(label, lens, heads=(16, 8), fused=False, block_size=256, max_context=4096):
    num_heads, num_kv_heads = heads
    batch, head_dim = len(lens), 128
    per_seq = [-(-length // block_size) for length in lens]
    work = sum(lens) * num_kv_heads * head_dim * 4
    layers = max(2, min(128, int(4e8 / work)))
    shape = (layers, sum(per_seq), block_size, num_kv_heads, head_dim)
    k, v = rand(*shape), rand(*shape)
    order, at = torch.randperm(sum(per_seq)), 0
    tables = torch.zeros(batch, max_context // block_size, dtype=torch.int32)
    for seq, blocks in enumerate(per_seq):
        tables[seq, :blocks] = order[at : at + blocks]
        at += blocks
    tables = tables.to(DEVICE)
    context = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    space = paged_attention.decode_workspace(
        batch, num_heads, num_kv_heads, head_dim, max_context, tables.device
    )
    out = rand(batch, num_heads, head_dim)
    scale = head_dim**-0.5
    if fused:
        qkv = rand(batch, (num_heads + 2 * num_kv_heads) * head_dim)
        norm, cos_sin = rand(head_dim), rope_table(head_dim, device=DEVICE)

        def run(i):
            paged_attention.fused_decode_attention(
                qkv, norm, norm, cos_sin, k[i], v[i], tables, context, scale, EPS, out, space
            )
    else:
        q = rand(batch, num_heads, head_dim)

        def run(i):
            paged_attention.paged_decode_attention(
                q, k[i], v[i], tables, context, scale, out, space
            )

    case = Case(label, run, layers, work)
    flash = optional_flash()[0]
    if flash is not None and not fused and block_size % 256 == 0:

        def run_flash(i):
            flash.flash_attn_with_kvcache(
                q[:, None], k[i], v[i], cache_seqlens=context, block_table=tables, causal=True
            )

        case.others["FA2"] = run_flash
    return case


def spread(batch, low, high):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, high + 1, (batch,), generator=generator).tolist()


def attention_cases(small):
    for batch, length in ((1, 600), (1, 4096), (8, 600), (16, 600)):
        yield decode_case(f"fused decode {batch} x {length}", [length] * batch, fused=True)
    yield decode_case("decode 8 x 600", [600] * 8)
    yield decode_case("decode 32 x 600", [600] * 32)
    yield decode_case("decode 64 x 600", [600] * 64)
    yield decode_case("decode 256 x 600", [600] * 256)
    yield decode_case("decode 256 x 100-2048", spread(256, 100, 2048))
    longest_first = sorted(spread(256, 100, 2048), reverse=True)  # as prefix_groups.py orders rows
    yield decode_case("decode 256 x 100-2048, longest first", longest_first)
    yield decode_case(
        "decode 256 x 100-2048, model 40960", spread(256, 100, 2048), max_context=40960
    )
    yield decode_case("decode 256 x 100-2048, blocks 16", spread(256, 100, 2048), block_size=16)
    yield decode_case("decode 512 x 64-192", spread(512, 64, 192))
    yield decode_case("decode 1 x 32768", [32768], max_context=40960)
    if not small:
        yield decode_case("decode 128 x 100-2048, 32/8 heads", spread(128, 100, 2048), (32, 8))


def cascade_case(label, groups, own_lens, heads=(16, 8), config=None, keys=None):
    """Rows of own_lens tokens, dealt out to groups, each the blocks that its rows share. The work
    is the bytes of K/V, each once. keys: of an item, None: as the engine chooses."""
    num_heads, num_kv_heads = heads
    batch, head_dim, block_size, max_context = len(own_lens), 128, 256, 8192
    per_row = [-(-n // block_size) for n in own_lens]
    work = (sum(own_lens) + sum(groups) * block_size) * num_kv_heads * head_dim * 4
    layers = max(2, min(128, int(4e8 / work)))
    num_blocks = sum(per_row) + sum(groups)
    shape = (layers, num_blocks, block_size, num_kv_heads, head_dim)
    k, v = rand(*shape), rand(*shape)
    ids = torch.randperm(num_blocks).split(groups + per_row)
    tables = torch.zeros(batch, max_context // block_size, dtype=torch.int32)
    lens = torch.zeros(batch, dtype=torch.int32)
    for row in range(batch):
        shared = ids[row % len(groups)] if groups else ids[0][:0]
        blocks = torch.cat([shared, ids[len(groups) + row]])
        tables[row, : len(blocks)] = blocks
        lens[row] = len(shared) * block_size + own_lens[row]
    rows, found = find_groups(
        torch.arange(batch).numpy(), tables.numpy(), (lens.numpy() - 1) // block_size, 4, 1
    )
    tables, lens = (
        tables[torch.from_numpy(rows)].to(DEVICE),
        lens[torch.from_numpy(rows)].to(DEVICE),
    )
    found = found * torch.tensor([1, 1, block_size, block_size]).numpy()
    sizes = TritonBackend().shared_items(*heads, torch.device(DEVICE, 0))
    sizes = sizes if keys is None else (sizes[0], keys, 1 << 20)
    lists = {
        name: torch.from_numpy(array).to(DEVICE)
        for name, array in work_list(found, batch, key_step(block_size), *sizes).items()
    }
    q, out, scale = (
        rand(batch, num_heads, head_dim),
        rand(batch, num_heads, head_dim),
        head_dim**-0.5,
    )
    partials = shared_prefix.shared_partials(
        len(lists["items"]), q, lists["own_starts"], lists["partial_starts"]
    )
    space = paged_attention.decode_workspace(
        batch, num_heads, num_kv_heads, head_dim, max_context, tables.device
    )

    def run(i):
        usual = shared_prefix._CONFIGS
        if config:
            shared_prefix._CONFIGS = dict.fromkeys(usual, config)
        shared_prefix.shared_prefix_attention(
            q, k[i], v[i], tables, lists["items"], lists["num_items"], partials, scale
        )
        shared_prefix._CONFIGS = usual
        paged_attention.paged_decode_attention(
            q, k[i], v[i], tables, lens, scale, out, space, partials
        )

    def run_plain(i):
        paged_attention.paged_decode_attention(q, k[i], v[i], tables, lens, scale, out, space)

    return Case(label, run, layers, work, others={"plain": run_plain})


def cascade_cases(small):
    yield cascade_case("cascade 256, 2048 shared, 64-192 own", [8], spread(256, 64, 192))
    yield cascade_case("cascade 64, 4096 shared, 1-256 own", [16], spread(64, 1, 256))
    yield cascade_case("cascade 512, 32 x 2048, 64-192", [8] * 32, spread(512, 64, 192))
    yield cascade_case("cascade 256, 64 x 256, 64-192", [1] * 64, spread(256, 64, 192))
    yield cascade_case("cascade 24, 2048 shared, 64-192", [8], spread(24, 64, 192))
    yield cascade_case("nothing shared 256 x 100-2048", [], spread(256, 100, 2048))
    yield cascade_case("nothing shared 64 x 600", [], [600] * 64)
    yield cascade_case("nothing shared 32 x 600", [], [600] * 32)
    if not small:
        own = spread(256, 64, 192)
        yield cascade_case("cascade 256, 2048 shared, 32/8 heads", [8], own, (32, 8))


def cascade_sweep_cases(small):
    own = spread(256, 64, 192)
    for config in ((64, 4, 5, 2), (64, 4, 4, 2), (64, 4, 3, 2), (32, 4, 5, 2), (32, 4, 5, 3),
                   (128, 4, 3, 1), (128, 8, 3, 1), (64, 8, 5, 1), (64, 4, 5, 1)):  # fmt: skip
        for keys in (256, 512, 1024):
            label = f"sweep cascade 256 x 2048 {config} {keys}"
            yield cascade_case(label, [8], own, config=config, keys=keys)
    for keys in (256, 512, 1024, 2048):
        yield cascade_case(f"sweep cascade 64 x 4096 {keys}", [16], spread(64, 1, 256), keys=keys)
        label, own = f"sweep cascade 512, 32 x 2048 {keys}", spread(512, 64, 192)
        yield cascade_case(label, [8] * 32, own, keys=keys)


def copy_cases(small):
    """Samples of one prompt, each with a copy of its last block: bytes read and written."""
    for num_copies in (1, 64):
        pool = rand(2, 28, num_copies + 1, 256, 8, 128)
        copies = torch.tensor([[0, i + 1, 255] for i in range(num_copies)], dtype=torch.int32)
        work = 2 * num_copies * 255 * pool[:, :, 0, 0].nbytes
        on_device = copies.to(DEVICE)
        yield Case(
            f"copies {num_copies} x 255 tokens",
            lambda _, pool=pool, copies=on_device: copy_tokens._copy_at_once(pool, copies),
            1,
            work,
            others={"torch": lambda _, p=pool, c=copies: copy_tokens.copy_tokens_ref(p, c)},
        )


def prefill_case(label, lens, paged=False, heads=(16, 8), config=None):
    """lens: (new tokens, keys) of each sequence."""
    num_heads, num_kv_heads = heads
    head_dim, block_size = 128, 256
    q_lens, k_lens = zip(*lens, strict=True)

    def bounds(sizes):
        return torch.tensor([0, *torch.tensor(sizes).cumsum(0)], dtype=torch.int32, device=DEVICE)

    cu_q, cu_k = bounds(q_lens), bounds(k_lens)
    q = rand(sum(q_lens), num_heads, head_dim)
    if paged:
        width = -(-max(k_lens) // block_size)
        k, v = (rand(width * len(lens), block_size, num_kv_heads, head_dim) for _ in range(2))
        tables = torch.randperm(width * len(lens)).view(len(lens), width).to(DEVICE, torch.int32)
    else:
        k, v = (rand(sum(k_lens), num_kv_heads, head_dim) for _ in range(2))
        tables = None
    out = torch.empty_like(q)
    scale = head_dim**-0.5

    def run(_):
        prefill_attention.prefill_attention(q, k, v, cu_q, cu_k, scale, tables, out, config)

    pairs = sum(n * m - n * (n - 1) / 2 for n, m in lens)
    case = Case(label, run, 1, 4 * pairs * num_heads * head_dim, "TFLOP/s")
    flash, flash3 = optional_flash()
    window = (cu_q, cu_k, max(q_lens), max(k_lens))
    if flash is not None:
        table = {} if tables is None else {"block_table": tables}
        case.others["FA2"] = lambda _: flash.flash_attn_varlen_func(
            q, k, v, *window, causal=True, **table
        )
    if flash3 is not None and not paged:
        case.others["FA3"] = lambda _: flash3.flash_attn_varlen_func(q, k, v, *window, causal=True)
    if not paged and len(set(lens)) == 1 and q_lens == k_lens:
        dense = [t.view(len(lens), -1, *t.shape[1:]).transpose(1, 2) for t in (q, k, v)]
        case.others["SDPA"] = lambda _: F.scaled_dot_product_attention(
            *dense, is_causal=True, enable_gqa=True
        )
    return case


def prefill_cases(small):
    yield prefill_case("prefill 4 x 4096", [(4096, 4096)] * 4)
    yield prefill_case("prefill 1 x 16384", [(16384, 16384)])
    yield prefill_case("prefill 64 x 256", [(256, 256)] * 64)
    yield prefill_case("prefill 32 x 100-1024", [(n, n) for n in spread(32, 100, 1024)])
    yield prefill_case("prefill 4 x 4096, paged", [(4096, 4096)] * 4, paged=True)
    yield prefill_case("prefill 16 x 64 after 2048, paged", [(64, 2112)] * 16, paged=True)
    if not small:
        yield prefill_case("prefill 4 x 4096, 32/8 heads", [(4096, 4096)] * 4, heads=(32, 8))


def shapes_of(model):
    hidden, heads, kv_heads, inter = MODELS[model]
    return {
        "qkv": ((heads + 2 * kv_heads) * 128, hidden, small_linear.PLAIN),
        "o": (hidden, heads * 128, small_linear.RESIDUAL),
        "gate_up": (inter, hidden, small_linear.SILU),
        "down": (hidden, inter, small_linear.RESIDUAL),
    } | ({"head": (151936, hidden, small_linear.PLAIN)} if model == "0.6B" else {})


def linear_case(model, name, m, chosen=None):
    n, k, epilogue = shapes_of(model)[name]
    rows = n * (2 if epilogue == small_linear.SILU else 1)
    layers = max(2, min(28, int(4e8 / (rows * k * 2))))
    weight = rand(layers, rows, k, scale=k**-0.5)
    x, residual, norm, next_norm = rand(m, k), rand(m, n), rand(k), rand(n)
    space = small_linear.linear_workspace(weight.device)
    facts = launch.gpu(weight.device)
    chosen = chosen or small_linear.config(m, n, k, epilogue, facts)
    tail = {}
    if epilogue == small_linear.RESIDUAL:
        tail = {"residual": residual, "next_norm_weight": next_norm}
    elif chosen.kind == "gemv":
        tail = {"norm_weight": norm, "eps": EPS}
    else:
        down = small_linear.config(m, k, shapes_of(model)["down"][1], small_linear.RESIDUAL, facts)
        squares = torch.rand(launch.cdiv(k, down.block_n), max(m, 16), device=DEVICE)
        tail = {"sum_squares": squares, "eps": EPS}

    def run(i):
        small_linear.small_linear(x, weight[i], space, chosen, epilogue, **tail)

    def cublas(i):
        F.linear(x, weight[i])

    def unfused(i):
        if epilogue == small_linear.RESIDUAL:
            add_rms_norm(F.linear(x, weight[i]), residual, next_norm, EPS)
        elif epilogue == small_linear.SILU:
            silu_and_mul(F.linear(rms_norm(x, norm, EPS), weight[i]))
        else:
            F.linear(rms_norm(x, norm, EPS), weight[i])

    label = f"{model} {name} M={m} {chosen.kind}"
    others = {"cuBLAS": cublas, "with our norm kernels": unfused}
    return Case(label, run, layers, rows * k * 2, others=others)


def linear_cases(small):
    for model, batches in {"0.6B": (1, 2, 4, 8, 16, 32, 64, 128, 256), "8B": (1, 8, 32)}.items():
        if small and model != "0.6B":
            continue
        for m in batches:
            for name, (n, k, epilogue) in shapes_of(model).items():
                if small_linear.supports(m, n, k, DTYPE, epilogue):
                    yield linear_case(model, name, m)


def moe_case(tokens, hidden=2048, inter=768, experts=128, top_k=8, chosen=None, label="moe"):
    """Router's logits to the normed stream; the weights read are those of the experts picked."""
    expert_size = 3 * hidden * inter
    layers = 3  # of 1.2 GB: other layers pick other experts
    gate_up = rand(layers, experts, 2 * inter, hidden, scale=hidden**-0.5)
    down = rand(layers, experts, hidden, inter, scale=inter**-0.5)
    logits = rand(layers, tokens, experts)
    x, residual, norm = rand(tokens, hidden), rand(tokens, hidden), rand(hidden)
    picked = [len(route_ref(row, top_k, True)[1].unique()) for row in logits]
    unit, work = "TB/s", sum(picked) / layers * expert_size * 2
    if tokens * top_k / experts > 64:  # beyond, products take longer than reading
        unit, work = "TFLOP/s", tokens * top_k * expert_size * 2

    def run(i):
        copies = grouped_gemm.expert_copies(x, logits[i], gate_up[i], down[i], top_k, True, chosen)
        grouped_gemm.sum_copies_add_rms_norm(copies, residual, norm, EPS)

    def routed(i):
        routing(logits[i], top_k, True, 16 if tokens < 128 else 128)

    return Case(f"{label} T={tokens}", run, layers, work, unit, {"routing alone": routed})


def moe_cases(small):
    """Qwen3-30B-A3B, and its share on each of two ranks."""
    for tokens in (1, 2, 8, 32, 64, 128, 256, 1024, 4096):
        yield moe_case(tokens)
    for tokens in (1, 8, 64) if not small else ():
        yield moe_case(tokens, inter=384, label="moe, half")


def elementwise_cases(small):
    hidden, num_heads, num_kv_heads, inter = MODELS["0.6B"]
    width = (num_heads + 2 * num_kv_heads) * 128
    norm, weight = rand(128), rand(hidden)
    cos_sin = rope_table(128, device=DEVICE)
    for tokens in (1, 64, 256, 16384):
        layers = 20 if tokens < 1000 else 2
        blocks = tokens // 256 + 1
        qkv = rand(layers, tokens, width)
        cache = rand(2, layers, blocks, 256, num_kv_heads, 128)
        slots = torch.randperm(blocks * 256, device=DEVICE)[:tokens].to(torch.int32)
        positions = torch.arange(tokens, device=DEVICE) % 4096

        def run_qk(i, qkv=qkv, cache=cache, slots=slots, positions=positions):
            qk_norm_rope(
                qkv[i], norm, norm, positions, cos_sin, num_kv_heads, 128, EPS,
                cache[0, i], cache[1, i], slots,
            )  # fmt: skip

        long_slots = slots.long()

        def torch_qk(i, qkv=qkv, cache=cache, slots=long_slots, positions=positions):
            heads = qkv[i].view(len(slots), -1, 128)
            q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], 1)
            norm_rope_ref(q, norm, positions, cos_sin, EPS)
            flat = cache[:, i].view(2, -1, num_kv_heads, 128)
            flat[0][slots] = norm_rope_ref(k, norm, positions, cos_sin, EPS)
            flat[1][slots] = v

        # q, k, v read, q, k written, k, v stored
        moved = tokens * 128 * 2 * (2 * num_heads + 5 * num_kv_heads)
        yield Case(f"qk_norm_rope T={tokens}", run_qk, layers, moved, others={"torch": torch_qk})
        x, residual, gate_up = (rand(layers, tokens, n) for n in (hidden, hidden, 2 * inter))

        def run_norm(i, x=x, residual=residual):
            add_rms_norm(x[i], residual[i], weight, EPS)

        def torch_norm(i, x=x, residual=residual):
            add_rms_norm_ref(x[i], residual[i], weight, EPS)

        moved = tokens * hidden * 2 * 4
        yield Case(
            f"add_rms_norm T={tokens}", run_norm, layers, moved, others={"torch": torch_norm}
        )
        yield Case(
            f"rms_norm T={tokens}",
            lambda i, x=x: rms_norm(x[i], weight, EPS),
            layers,
            moved / 2,
            others={"torch": lambda i, x=x: rms_norm_ref(x[i], weight, EPS)},
        )
        yield Case(
            f"silu_and_mul T={tokens}",
            lambda i, gate_up=gate_up: silu_and_mul(gate_up[i]),
            layers,
            tokens * inter * 2 * 3,
            others={"torch": lambda i, gate_up=gate_up: silu_and_mul_ref(gate_up[i])},
        )


def sample_cases(small):
    vocab = 151936
    for batch in (1, 8, 64, 256, 512):
        layers = max(2, min(20, int(4e8 / (batch * vocab * 2))))
        logits = rand(layers, batch, vocab, scale=2.0)
        temperatures = torch.full((batch,), 0.8, device=DEVICE)
        seeds = torch.arange(batch, device=DEVICE)
        positions = torch.full((batch,), 600, dtype=torch.int32, device=DEVICE)

        def run(i, logits=logits, t=temperatures, seeds=seeds, positions=positions):
            sample(logits[i], t, seeds, positions)

        def race(i, logits=logits, t=temperatures):
            probabilities = logits[i].float().div_(t[:, None]).softmax(-1)
            noise = torch.empty_like(probabilities).exponential_(1).clamp_min_(1e-10)
            probabilities.div_(noise).argmax(-1)

        others = {"torch race": race, "torch argmax": lambda i, logits=logits: logits[i].argmax(-1)}
        yield Case(f"sample B={batch}", run, layers, batch * vocab * 2, others=others)


def sweep_cases(small):
    """Configurations beside the tables', for a new GPU or a new Triton."""
    for config in ((128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 2),
                   (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2)):  # fmt: skip
        yield prefill_case(f"sweep prefill 4 x 4096 {config}", [(4096, 4096)] * 4, config=config)
    table = dict(paged_attention._CONFIGS)
    for batch in (64, 256, 512):
        for config in ((32, 2, 3, 1), (32, 2, 5, 1), (64, 4, 3, 1), (128, 4, 2, 1), (64, 4, 2, 2),
                       (64, 4, 3, 4)):  # fmt: skip
            paged_attention._CONFIGS.update(dict.fromkeys(table, (4, *config)))
            yield decode_case(f"sweep decode {batch} {config}", spread(batch, 100, 2048))
    for batch in (1, 8, 16):
        for config in ((2, 64, 4, 2, 1), (4, 64, 4, 2, 1), (4, 32, 4, 2, 1), (8, 32, 4, 2, 1)):
            paged_attention._CONFIGS.update(dict.fromkeys(table, config))
            yield decode_case(f"sweep fused {batch} x 600 {config}", [600] * batch, fused=True)
    paged_attention._CONFIGS.update(table)
    for model in ("0.6B",) if small else ("0.6B", "8B"):
        for name, (n, k, epilogue) in shapes_of(model).items():
            usual = small_linear.config(1, n, k, epilogue, launch.gpu(torch.device(DEVICE)))
            for block_n, warps in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 4)):
                mats = 2 if epilogue == small_linear.SILU else 1
                if mats * block_n * usual.block_k > 256 * 32 * warps:
                    continue  # would spill registers
                case = linear_case(model, name, 1, replace(usual, block_n=block_n, warps=warps))
                yield Case(f"sweep {case.name} {block_n} {warps}", case.run, case.layers, case.work)


def moe_sweep_cases(small):
    """The same beside the table of grouped_gemm, for few rows an expert and for many."""
    few = [(16, (32, 32), 128, 4, True), (16, (64, 64), 64, 4, True), (16, (64, 64), 128, 4, True),
           (16, (64, 64), 256, 4, True), (16, (64, 128), 128, 4, True),
           (16, (128, 128), 64, 4, True), (16, (64, 64), 128, 4, False),
           (16, (64, 64), 128, 8, True), (32, (64, 64), 64, 4, True), (32, (64, 64), 128, 4, True),
           (32, (128, 128), 64, 4, True), (32, (64, 64), 128, 4, False)]  # fmt: skip
    many = [(64, (64, 64), 64, 4), (64, (64, 128), 64, 4), (64, (64, 64), 128, 4),
            (64, (128, 128), 64, 8), (128, (64, 128), 64, 4), (128, (64, 128), 64, 8),
            (128, (128, 128), 64, 8), (128, (128, 256), 64, 8),
            (128, (128, 128), 32, 8)]  # fmt: skip
    for configs, tokens in ((few, (1, 8, 64, 256)), (many, (256, 1024, 4096))):
        for num_tokens in tokens:
            for chosen in configs:
                label = f"sweep moe {chosen}"
                yield moe_case(num_tokens, chosen=grouped_gemm.Config(*chosen), label=label)


SECTIONS = {
    "attention": attention_cases,
    "cascade": cascade_cases,
    "copies": copy_cases,
    "prefill": prefill_cases,
    "linear": linear_cases,
    "moe": moe_cases,
    "elementwise": elementwise_cases,
    "sample": sample_cases,
}


SWEEPS = {"sweep": sweep_cases, "sweep_cascade": cascade_sweep_cases, "sweep_moe": moe_sweep_cases}


def compile_in_parallel(names, small):
    """Launch every case once in a process a section: Triton's disk cache is then filled."""
    arguments = [sys.executable, __file__, "--compile"] + (["--small"] if small else [])
    children = [subprocess.Popen([*arguments, "--only", name]) for name in names]
    failures = [child.wait() for child in children]
    if any(failures):
        print("some case failed to compile, see above", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*SECTIONS, *SWEEPS], default=list(SECTIONS))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sections = SECTIONS | SWEEPS
    names = options.only + ([*SWEEPS] if options.sweep else [])
    if options.compile:
        for name in names:
            for case in sections[name](options.small):
                case.run(0)
        torch.cuda.synchronize()
        return
    if options.check:
        workers = str(min(8, os.cpu_count() or 1))
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", workers, str(HERE)]
        subprocess.run(command, check=False)
    compile_in_parallel(names, options.small)
    copy, matmul = limits()
    print(
        f"{torch.cuda.get_device_name()}: copy {copy:.2f} TB/s, bf16 matmul {matmul:.0f} TFLOP/s; "
        f"torch {torch.__version__}, triton {launch.triton.__version__}"
    )
    for name in names:
        for case in sections[name](options.small):
            us = graph_us(case.run, case.layers)
            rate, limit = case.work / us / 1e6, copy if case.unit == "TB/s" else matmul
            line = f"{case.name:38s} {us:8.2f} us {rate:7.2f} {case.unit:7s} {rate / limit:4.0%}"
            for other, run in case.others.items():
                try:
                    other_us = graph_us(run, case.layers)
                    line += f" | {other} {other_us:.1f} us {other_us / us:.2f}x"
                except (RuntimeError, ValueError, TypeError) as error:
                    line += f" | {other} failed: {str(error).splitlines()[0][:60]}"
            print(line, flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
