"""Page digests: computed once, when a page settles (`baton.kv.page_digests`); the puller and later checks compare.

A page has one digest a part (`baton.kv.geometry`), joined into one number. 64 bits of xxh3 detect flipped bits, torn
reads and layout bugs. They do not protect against forgery; page tags do (`baton.kv.page_tags`).
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from baton.domain.ids import PageId
from baton.kv.memory import PoolMemory, page_parts
from baton.kv.page_digests import PART_BITS, join_parts
from baton.kv.page_tags import TagVerifier
from baton.transfer.base import Pull

READ_BYTES = 16 * 1024 * 1024
"""Most bytes read at once, or one page if that is more. Device memory is copied to be read."""


def page_digest(page: memoryview, part_ends: Sequence[int] = ()) -> int:
    """xxh3-64 of each part of one page's bytes, joined; without `part_ends` of the whole page, in [0, 2**64)."""
    return xxhash.xxh3_64_intdigest(page) if len(part_ends) <= 1 else _digest(page_parts(page, part_ends))


class PoolHasher:
    """`baton.kv.page_digests.PageHasher` of a pool's bytes."""

    def __init__(self, memory: PoolMemory) -> None:
        self._memory = memory

    def digests(self, pages: Sequence[PageId]) -> tuple[int, ...]:
        """See `PageHasher`."""
        return digest_pages(self._memory, pages)


def digest_pages(memory: PoolMemory, pages: Sequence[PageId]) -> tuple[int, ...]:
    """Digests of `pages`, in order. Raises `IndexError` for a page outside the pool."""
    return tuple(_digests(memory, pages))


def mismatches(memory: PoolMemory, pages: Sequence[PageId], digests: Sequence[int]) -> list[int]:
    """Positions in `pages` whose digest differs from the given one."""
    pairs = zip(_digests(memory, pages), digests, strict=True)
    return [position for position, (found, wanted) in enumerate(pairs) if found != wanted]


def wrong_positions(
    memory: PoolMemory, pull: Pull, part: slice, verifier: TagVerifier, found: dict[int, int]
) -> list[int]:
    """Positions in `pull`, of those in `part`, whose local bytes differ from their digest or do not fit their tag.

    Compares the parts that are read. `found` gets the digests of whole pages, by position, where not all of them are.
    """
    pages, wrong = pull.local_pages[part], set[int]()
    if pull.digests is not None:
        mask = -1 if pull.num_parts is None else (1 << PART_BITS * pull.num_parts) - 1
        digests = digest_pages(memory, pages)
        if pull.num_parts is not None:
            found.update(enumerate(digests, part.start))
        pairs = zip(digests, pull.digests[part], strict=True)
        wrong |= {at for at, (is_now, wanted) in enumerate(pairs) if (is_now ^ wanted) & mask}
    if pull.tags is not None:
        wrong |= set(verifier.mismatches(memory, pages, pull.tags[part], pull.num_parts))
    return [part.start + at for at in sorted(wrong)]


def _digests(memory: PoolMemory, pages: Sequence[PageId]) -> list[int]:
    step, found = max(1, READ_BYTES // memory.page_bytes), list[int]()
    for start in range(0, len(pages), step):
        read = pages[start : start + step]
        if len(memory.part_ends) == 1:  # without a call between
            found += map(xxhash.xxh3_64_intdigest, memory.read(read))
        else:
            found += map(_digest, memory.parts(read))
    return found


def _digest(parts: Sequence[memoryview]) -> int:
    return join_parts([xxhash.xxh3_64_intdigest(part) for part in parts], len(parts))[0]
