"""Window slots of pages that come from elsewhere into a prefix cache: from a tier, or from another worker. Pure.

Only the window parts that the token behind the pages reads are wanted; the others come without. Where there are too few
slots, none comes, and a prompt goes on from what can be used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from baton.domain.ids import PageId
from baton.kv.prefix_cache import PrefixCache


class ArrivalSlots:
    """The slots of one arrival, held until its pages are in the cache. They count as reserved meanwhile."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._pages: list[PageId] = []  # whose slots are held

    def take(self, pages: Sequence[PageId], first_page: int, has_window: Callable[[int], bool]) -> int:
        """Gives slots to those of `pages`, number `first_page` on of a sequence, that are read behind the last one.

        `has_window`: tells if the page at a position comes with its window part. Returns the first position that comes
        with it, 0 where window parts are in their pages, or the number of pages if none can.
        """
        windows, window = self._cache.pool.windows, self._cache.window
        if windows is None or window is None:
            return 0
        first = max(0, window.first_page((first_page + len(pages)) * window.page_size) - first_page)
        wanted = pages[first:]
        if not all(map(has_window, range(first, len(pages)))) or not windows.reserve(len(wanted)):
            return len(pages)
        if not windows.take(wanted):
            windows.reserve(-len(wanted))
            return len(pages)
        self._pages = list(wanted)
        return first

    def follow(self, pages: Sequence[PageId], used: Sequence[PageId]) -> None:
        """The first of `pages` gave way to those in `used`, which are cached: `PrefixCache.insert`."""
        instead = dict(zip(pages, used, strict=False))
        self._pages = [instead.get(page, page) for page in self._pages]

    def drop(self, pages: Collection[PageId]) -> None:
        """Drops the holds of the slots of `pages`. Ignores others."""
        windows, mine = self._cache.pool.windows, [page for page in self._pages if page in pages]
        if windows is not None and mine:
            windows.drop(mine)
            windows.reserve(-len(mine))
            self._pages = [page for page in self._pages if page not in pages]
