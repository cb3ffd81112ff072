"""Decode attention with shared keys read once: random trees of prefixes, under the 2x rule."""

import random
from dataclasses import replace

import pytest
import torch
from cases import POISON, assert_error_at_most_twice_torch, to_float

from nanovllm.engine import prefix_groups
from nanovllm.kernels import paged_attention
from nanovllm.kernels import shared_prefix as op


class Tree:
    """A batch whose rows share leading blocks, in one layer's cache with all else poisoned.

    sizes: rows below each node, as nested (blocks, [children]) with a leaf's tokens as an int:
        (2, [(1, [5, 5]), 7]) is two rows under 3 shared blocks, and one under 2 of these.
    min_rows: of a group; with 1 a row's own full blocks are one too.
    alike: so many first keys of all leaves below one node are equal, and groups go on through them.
    """

    def __init__(
        self, nodes, heads, head_dim, block_size, dtype, device="cpu", min_rows=1, alike=0
    ):
        self.num_heads, num_kv_heads = heads
        rows, next_block = [], 1

        def walk(node, blocks):
            nonlocal next_block
            if isinstance(node, int):
                num_blocks = -(-node // block_size)
                own = list(range(next_block, next_block + num_blocks))
                next_block += num_blocks
                rows.append((blocks + own, len(blocks) * block_size + node, len(blocks)))
                return
            shared = list(range(next_block, next_block + node[0]))
            next_block += node[0]
            for child in node[1]:
                walk(child, blocks + shared)

        for node in nodes:
            walk(node, [])
        random.Random(0).shuffle(rows)
        order = torch.randperm(next_block)
        lens = torch.tensor([length for _, length, _ in rows], dtype=torch.int32)
        width = max(len(blocks) for blocks, _, _ in rows) + 1
        tables = torch.full((len(rows), width), int(order[0]), dtype=torch.int32)
        shape = (next_block, block_size, num_kv_heads, head_dim)
        k, v = torch.full(shape, POISON), torch.full(shape, POISON)
        same = torch.randn(2, alike, num_kv_heads, head_dim)
        for row, (blocks, length, num_shared) in enumerate(rows):
            ids = order[torch.tensor(blocks)]
            tables[row, : len(ids)] = ids
            slots = (ids[:, None] * block_size + torch.arange(block_size)).flatten()[:length]
            for cache, part in zip((k, v), same, strict=True):
                slot_rows = cache.view(-1, num_kv_heads, head_dim)
                slot_rows[slots] = torch.randn(length, num_kv_heads, head_dim)
                own = slots[num_shared * block_size :][:alike]
                slot_rows[own] = part[: len(own)]
        self.key_step, self.device = prefix_groups.key_step(block_size), device
        rows, self.groups = prefix_groups.find_groups(
            torch.arange(len(rows)).numpy(),
            tables.numpy(),
            ((lens - 1) // block_size).numpy(),
            min_rows,
            0,
        )
        self.groups *= torch.tensor([1, 1, block_size, block_size]).numpy().astype("int32")
        order = torch.from_numpy(rows).long()
        for i, (first, end, _, key) in enumerate(self.groups.tolist()):
            if (self.groups[i + 1 :, 0] >= end).all():
                room = min(alike, int(lens[order[first:end]].min()) - 1 - key)
                self.groups[i, 3] += max(room, 0) // self.key_step * self.key_step
        self.block_tables, self.context_lens = tables[order].to(device), lens[order].to(device)
        self.k, self.v = k.to(device, dtype), v.to(device, dtype)
        wide = torch.randn(len(rows), self.num_heads + 2, head_dim).to(device, dtype)
        self.q = wide[:, : self.num_heads]  # rows strided, as in a view of packed qkv

    def plan(self, keys_per_item, num_wanted=1 << 20):
        """items, num_items and SharedPartials full of NaN, of a batch one row larger."""
        num_rows, num_kv_heads = len(self.q), self.k.size(2)
        rows_per_item = max(op.ITEM_ROWS * num_kv_heads // self.num_heads, 1)
        lists = prefix_groups.work_list(
            self.groups, num_rows, self.key_step, rows_per_item, keys_per_item, num_wanted
        )
        lists = {name: torch.from_numpy(a).to(self.device) for name, a in lists.items()}
        shared = op.shared_partials(
            len(lists["items"]), self.q, lists["own_starts"], lists["partial_starts"]
        )
        shared.values.fill_(torch.nan)
        shared.lse.fill_(torch.nan)
        return lists["items"], lists["num_items"], shared


def check(tree, keys_per_item=512, num_wanted=1 << 20):
    scale = tree.q.size(2) ** -0.5
    items, num_items, shared = tree.plan(keys_per_item, num_wanted)
    cache = tree.k, tree.v, tree.block_tables

    def attend(prefix, decode, q, k, v, shared=shared):
        shared.values.fill_(torch.nan)
        shared.lse.fill_(torch.nan)
        prefix(q, k, v, tree.block_tables, items, num_items, shared, scale)
        return decode(q, k, v, tree.block_tables, tree.context_lens, scale, shared=shared)

    refs = op.shared_prefix_attention_ref, paged_attention.paged_decode_attention_ref
    inputs = tree.q, tree.k, tree.v
    plain = paged_attention.paged_decode_attention_ref(tree.q, *cache, tree.context_lens, scale)
    exact = paged_attention.paged_decode_attention_ref(
        *to_float((tree.q, *cache, tree.context_lens, scale))
    )
    out = attend(op.shared_prefix_attention, paged_attention.paged_decode_attention, *inputs)
    assert_error_at_most_twice_torch(out, plain, exact, tree.groups.tolist())
    # And the reference with shared keys is the one without, but for the order of the sums.
    in_float = replace(shared, values=shared.values.float())
    in_floats = attend(*refs, *to_float(inputs), in_float)
    assert (in_floats - exact).abs().max() < 1e-5
    again = attend(op.shared_prefix_attention, paged_attention.paged_decode_attention, *inputs)
    assert torch.equal(out, again), "not deterministic"
    return int(num_items)


def random_nodes(rng, depth, max_blocks, max_own):
    if depth == 0 or rng.random() < 0.2:
        return rng.randint(1, max_own)
    children = [random_nodes(rng, depth - 1, max_blocks, max_own) for _ in range(rng.randint(1, 4))]
    return rng.randint(1, max_blocks), children


SMALL = [
    # query and kv heads, head_dim, block_size, dtype
    ((4, 2), 64, 16, torch.float32),
    ((9, 3), 80, 32, torch.float16),
    ((5, 1), 96, 16, torch.float32),
    ((2, 2), 16, 64, torch.float16),
    ((33, 1), 32, 16, torch.float16),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_random_trees(case):
    heads, head_dim, block_size, dtype = case
    rng = random.Random(str(case))
    nodes = [random_nodes(rng, 3, 2, 2 * block_size) for _ in range(3)]
    assert check(Tree(nodes, heads, head_dim, block_size, dtype), keys_per_item=block_size) > 3


def test_groups_that_go_on_into_blocks_of_their_rows():
    nodes = [(1, [100, 80, 90]), (1, [(1, [9, 120]), 3])]
    tree = Tree(nodes, (4, 2), 64, 128, torch.float32, min_rows=2, alike=79)
    assert tree.groups.tolist() in (
        [[0, 3, 0, 192], [3, 6, 0, 128], [3, 5, 128, 256]],
        [[0, 3, 0, 128], [0, 2, 128, 256], [3, 6, 0, 192]],
    )
    assert check(tree, keys_per_item=64) == 7
    assert check(tree, keys_per_item=64, num_wanted=3) == 3


def test_nothing_shared_is_plain_decode():
    tree = Tree([5, 16, 17, 40], (4, 2), 64, 16, torch.float32, min_rows=2)
    assert check(tree) == 0


def test_rows_past_a_tile_make_another_item():
    """33 rows of a group of two heads fill 64 query rows and begin others."""
    tree = Tree([(1, [1] * 33)], (2, 1), 16, 16, torch.float32)
    assert check(tree) == 2


@pytest.mark.parametrize("num_blocks", [31, 32, 70])
def test_items_of_more_blocks_than_are_looked_up_at_once(num_blocks):
    tree = Tree([(num_blocks, [3, 40, 1])], (2, 1), 16, 32, torch.float32, min_rows=2)
    assert check(tree, keys_per_item=1 << 20) == 1


def test_padding_rows_give_zero():
    tree = Tree([(1, [3] * 4)], (4, 2), 64, 16, torch.float32)
    tree.context_lens = torch.cat([tree.context_lens, torch.zeros(2, dtype=torch.int32)])
    tree.block_tables = torch.nn.functional.pad(tree.block_tables, (0, 0, 0, 2))
    tree.q = torch.cat([tree.q, tree.q[:2]])
    items, num_items, shared = tree.plan(512)
    scale = 0.1
    args = tree.k, tree.v, tree.block_tables
    op.shared_prefix_attention(tree.q, *args, items, num_items, shared, scale)
    out = paged_attention.paged_decode_attention(
        tree.q, *args, tree.context_lens, scale, shared=shared
    )
    assert (out[4:] == 0).all() and torch.isfinite(out).all()


LARGE = [
    # nodes, heads, head_dim, block_size
    ([(8, [64 + i for i in range(128)])] * 2, (16, 8), 128, 256),
    ([(100, [5, 300, 17, 1])], (16, 8), 128, 256),
    ([(1, [1 + i % 255 for i in range(512)])], (16, 8), 128, 256),
    ([(4, [(4, [(1, [64] * 4), *[90] * 12])] * 8)], (16, 8), 128, 256),
    (
        [(1, [100]), (2, [600]), *[(3, [9] * n) for n in (2, 3, 4, 5, 31, 32, 33)]],
        (32, 8),
        128,
        256,
    ),
    ([(130, [3, 40, 16] * 7), 17, 1500], (64, 8), 128, 16),
    ([(5, [31, 33] * 10)], (9, 3), 80, 32),
    ([(2, [257] * 20)], (25, 5), 96, 256),
    ([(2, [257] * 20)], (4, 4), 256, 256),
    ([(3, [70] * 40)], (14, 2), 64, 256),
    ([(2, [5] * 18)], (71, 1), 64, 256),
    ([700, 1000, 256, 257] * 5, (16, 8), 128, 256),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=lambda case: str(case)[:60])
def test_trees_on_gpu(case):
    tree = Tree(*case, torch.bfloat16, "cuda")
    check(tree)
    check(tree, keys_per_item=1 << 20)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_random_trees_on_gpu(seed):
    rng = random.Random(seed)
    nodes = [random_nodes(rng, 4, 6, 900) for _ in range(rng.randint(1, 6))]
    dtype = rng.choice([torch.bfloat16, torch.float16, torch.float32])
    heads = rng.choice([(16, 8), (32, 8), (3, 3), (8, 1)])
    head_dim, block_size = rng.choice([32, 64, 128]), rng.choice([16, 64, 256])
    alike = rng.choice([0, 64, 200])
    tree = Tree(nodes, heads, head_dim, block_size, dtype, "cuda", alike=alike)
    check(tree, keys_per_item=rng.choice([256, 512, 4096]), num_wanted=rng.choice([8, 16, 1 << 20]))
