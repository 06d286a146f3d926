"""Memory that rots: one bit of some settled pages flips."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random

from baton.domain.ids import PageId
from baton.kv.memory import PageMemory
from baton.kv.pages import Owner, PagePool


def settled_pages(pool: PagePool, owners: Collection[Owner]) -> list[int]:
    """Settled pages of `owners`."""
    pages = pool.digests.settled([PageId(page) for page in range(pool.num_pages)])
    return [page for page in pages if pool.owner(page) in owners]


def flip_bits(rng: Random, memory: PageMemory, pages: Sequence[int]) -> list[int]:
    """Flips one bit in each of some of `pages`; returns those. None if `pages` is empty."""
    flipped = sorted(rng.sample(list(pages), rng.randint(1, len(pages)))) if pages else []
    for page in flipped:
        memory.page(page)[rng.randrange(memory.page_bytes)] ^= 1 << rng.randrange(8)
    return flipped
