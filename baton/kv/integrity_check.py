"""Checks of the page bookkeeping while an engine is idle, slice by slice: a request waits for one slice at most.

Called by both engine loops. Pure: when to run a slice is the caller's business.
"""

from __future__ import annotations

from baton.kv.prefix_cache import PrefixCache


class IntegrityCheck:
    """One round over all pages after each time of work. The next round goes on where the last one stopped."""

    def __init__(self, cache: PrefixCache, max_slice_pages: int | None = None) -> None:
        """`max_slice_pages`: pages a slice; None: every page, and the totals as well."""
        self._cache = cache
        self._max_slice_pages = max_slice_pages
        self._next_page = 0
        self._num_left = cache.pool.num_pages

    @property
    def done(self) -> bool:
        """Whether every page was checked since `restart`."""
        return self._num_left == 0

    def restart(self) -> None:
        """Asks for another round: pages have changed hands."""
        self._num_left = self._cache.pool.num_pages

    def run_slice(self) -> None:
        """Checks the next pages of the round. Raises `Broken`."""
        if self._max_slice_pages is None:
            self._cache.pool.check()
            self._cache.check()
            self._num_left = 0
            return
        num_pages = self._cache.pool.num_pages
        start = self._next_page
        stop = min(num_pages, start + self._max_slice_pages, start + self._num_left)
        self._cache.pool.check_pages(start, stop)
        self._cache.check_pages(start, stop)
        self._next_page = stop % num_pages
        self._num_left -= stop - start
