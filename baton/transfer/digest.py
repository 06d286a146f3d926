"""Page digests: computed by prefill before it announces a page, checked by the puller as the page lands.

64 bits of xxh3: they find flipped bits, torn reads and layout bugs; they are no defence against a forger.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from baton.domain.ids import PageId
from baton.kv.memory import PageMemory


def page_digest(page: memoryview) -> int:
    """xxh3-64 of one page's bytes, in [0, 2**64)."""
    return xxhash.xxh3_64_intdigest(page)


def digest_pages(memory: PageMemory, pages: Sequence[PageId]) -> tuple[int, ...]:
    """The digests of `pages`, in order. Raises `IndexError` for a page outside the pool."""
    return tuple(page_digest(memory.page(page)) for page in pages)


def mismatches(memory: PageMemory, pages: Sequence[PageId], digests: Sequence[int]) -> list[int]:
    """Positions in `pages` whose bytes do not have the digest at the same position."""
    pairs = zip(pages, digests, strict=True)
    return [position for position, (page, digest) in enumerate(pairs) if page_digest(memory.page(page)) != digest]
