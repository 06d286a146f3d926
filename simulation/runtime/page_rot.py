"""Memory that rots: one bit of some settled pages flips."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random

from baton.domain.ids import PageId
from baton.kv.memory import PoolMemory
from baton.kv.pages import Owner, PagePool


def settled_pages(pool: PagePool, owners: Collection[Owner]) -> list[int]:
    """Settled pages of `owners`."""
    pages = pool.digests.settled([PageId(page) for page in range(pool.num_pages)])
    return [page for page in pages if pool.owner(page) in owners]


def flip_bits(rng: Random, memory: PoolMemory, pages: Sequence[int]) -> list[int]:
    """Flips one bit in each of some of `pages`, perhaps in a window part; returns those. None if `pages` is empty."""
    flipped = sorted(rng.sample(list(pages), rng.randint(1, len(pages)))) if pages else []
    for page in flipped:
        (parts,) = memory.parts([page])
        at = rng.randrange(sum(map(len, parts)))
        for part in parts:
            if at < len(part):
                part[at] ^= 1 << rng.randrange(8)
                break
            at -= len(part)
    return flipped
