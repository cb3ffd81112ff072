"""In which order waiting prompts are admitted so that those that share a prefix stand together."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def order_by_prefix(
    items: list[T], chains: list[list[int]], is_cached: Callable[[int], bool]
) -> list[T]:
    """The items, sharers of the most leading blocks next to each other, else in their old order.

    chains: of each item, the chained hashes of its full blocks: equal ones are equal prefixes.
    is_cached: whether the block of a hash is in the prefix cache, so that its readers go first,
        before it is evicted.

        prompts      A1  B1  A2  C1  B2  A1'         A1 and A1' share more than A2 does
        come out     A1  A1' A2  B1  B2  C1
    """
    first_seen: dict[int, int] = {}
    for i, chain in enumerate(chains):
        for block_hash in chain:
            first_seen.setdefault(block_hash, i)

    def key(i: int) -> tuple[bool, list[int]]:
        chain = chains[i]
        return not (chain and is_cached(chain[0])), [first_seen[h] for h in chain]

    return [items[i] for i in sorted(range(len(items)), key=key)]
