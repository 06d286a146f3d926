"""Compares pages with the digests that they settled with: matched pages before their use, idle ones slowly. Pure.

`PageChecks` selects and compares. `Scrubber` paces the comparison of all settled pages: one slice of `SLICE_BYTES` at a
time, a round in `ROUND_S` on an idle worker, at most one slice a `BUSY_INTERVAL_S` on a busy one. After a fault one
round runs at once, a slice a turn: a burst rarely hits one page. The caller quarantines what differs
(`baton.kv.quarantine`).
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.domain.arithmetic import ceil_div
from baton.domain.ids import PageId
from baton.kv.prefix_cache import PrefixCache

SLICE_BYTES = 8 * 1024 * 1024
"""About 0.3 ms at the 30 GB/s of xxh3 on cold host memory."""
ROUND_S = 600.0
BUSY_INTERVAL_S = 1.0


class PageChecks:
    """Checks of one pool's settled pages. Without a hasher in the cache (digests off) nothing is ever checked."""

    def __init__(self, cache: PrefixCache, sample: int = 1) -> None:
        """`sample`: one of so many matched pages is checked, e.g. 16; 1: all; 0: none, and no scrubbing."""
        self._cache = cache
        self._pool = cache.pool
        self._hasher = cache.hasher
        self._sample = sample
        self.num_checked = 0

    @property
    def enabled(self) -> bool:
        return self._hasher is not None and self._sample > 0

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self._pool.num_pages

    def select(self, pages: Sequence[PageId]) -> list[PageId]:
        """Those of the matched `pages` to check before use; of a sample, the ones that were checked longest ago."""
        if not self.enabled or not pages:
            return []
        if self._sample == 1:
            return list(pages)
        return self._pool.digests.least_recently_checked(pages, ceil_div(len(pages), self._sample))

    def mismatches(self, pages: Sequence[PageId]) -> list[PageId]:
        """Hashes the settled ones of `pages` and returns those whose bytes are not what they settled with."""
        digests = self._pool.digests
        settled = digests.settled(pages)
        digests.mark_checked(settled)
        return self.compare(settled, digests.all_of(settled))

    def compare(self, pages: Sequence[PageId], digests: Sequence[int]) -> list[PageId]:
        """Those of `pages` whose bytes do not have the digest given for them."""
        if self._hasher is None or not pages:
            return []
        self.num_checked += len(pages)
        fits = self._pool.digests.fits
        found = zip(pages, self._hasher.digests(pages), digests, strict=True)
        return [page for page, one, wanted in found if not fits(page, one, wanted)]

    def take_wrong(self) -> list[PageId]:
        """Takes the damaged pages that the cache met when it entered their duplicates."""
        return self._cache.take_wrong()

    def check_matched(self, pages: Sequence[PageId]) -> list[PageId]:
        """`mismatches` of those that `select` takes."""
        return self.mismatches(self.select(pages))


class Scrubber:
    """Visits all pages in a circle, slice by slice."""

    def __init__(self, checks: PageChecks, page_bytes: int) -> None:
        self._checks = checks
        self._slice_pages = min(checks.num_pages, max(1, SLICE_BYTES // page_bytes))
        self._interval_s = ROUND_S * self._slice_pages / checks.num_pages
        self._next_page = 0
        self._last_slice_at: float | None = None
        self._num_hurried = 0  # pages left of a round that runs at once
        self.num_rounds = 0

    def hurry(self) -> None:
        """Makes one whole round due now."""
        if self._checks.enabled:
            self._num_hurried = self._checks.num_pages

    def next_slice_at(self, now: float) -> float | None:
        """Time of the next slice on an idle worker; None if nothing is scrubbed."""
        if not self._checks.enabled:
            return None
        if self._last_slice_at is None:
            self._last_slice_at = now
        return now if self._num_hurried else self._last_slice_at + self._interval_s

    def run_slice(self, now: float, *, busy: bool) -> list[PageId]:
        """Checks the next slice if it is due; returns the pages that differ from their digests."""
        due_at = self.next_slice_at(now)
        if due_at is None or self._last_slice_at is None or now < due_at:
            return []
        if busy and not self._num_hurried and now < self._last_slice_at + BUSY_INTERVAL_S:
            return []
        self._last_slice_at = now
        stop = min(self._checks.num_pages, self._next_page + self._slice_pages)
        pages = [PageId(page) for page in range(self._next_page, stop)]
        self._num_hurried = max(0, self._num_hurried - len(pages))
        self._next_page = stop % self._checks.num_pages
        self.num_rounds += self._next_page == 0
        return self._checks.mismatches(pages)
