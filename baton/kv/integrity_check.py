"""Checks the page bookkeeping of an idle engine in slices, so that a request waits for one slice at most. Pure."""

from __future__ import annotations

from baton.kv.prefix_cache import PrefixCache


class IntegrityCheck:
    """Runs one round over all pages after every period of work. A round starts where the last one stopped."""

    def __init__(self, cache: PrefixCache, max_slice_pages: int | None = None) -> None:
        """`max_slice_pages`: pages per slice; None: one slice checks all pages and the totals."""
        self._cache = cache
        self._max_slice_pages = max_slice_pages
        self._next_page = 0
        self._num_left = cache.pool.num_pages

    @property
    def done(self) -> bool:
        """True if every page was checked since `restart`."""
        return self._num_left == 0

    def restart(self) -> None:
        """Starts another round."""
        self._num_left = self._cache.pool.num_pages

    def run_slice(self) -> None:
        """Checks the next pages. Raises `Broken`."""
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
