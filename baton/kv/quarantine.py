"""Takes pages with wrong bytes out of use, with everything computed from them, and numbers their keys for peers. Pure.

Children of a wrong page have good digests of wrong numbers, so the whole subtree goes: here, and on each linked decode
worker, which asks for the keys since the last number that it has (`since`). A reply that is lost is asked for again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from baton.domain.ids import PageId, PageKey
from baton.kv.prefix_cache import PrefixCache

MAX_INCIDENTS = 3
INCIDENTS_WINDOW_S = 600.0
"""`MAX_INCIDENTS` within this time make the worker unfit: its memory is not to be trusted."""
INCIDENT_S = 10.0
"""Faults found within this time of the first belong to one incident. One burst may hit many pages."""
MAX_KEPT_KEYS = 4096
"""Keys kept for peers. A worker with three incidents in ten minutes leaves, so a linked peer misses none."""


class Quarantine:
    """The quarantined pages of one worker. Owned by the engine thread."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._keys: deque[PageKey] = deque(maxlen=MAX_KEPT_KEYS)  # the roots of the subtrees, numbered from 1
        self._foreign: deque[PageKey] = deque(maxlen=MAX_KEPT_KEYS)  # of peers, for a tier below the pool
        self._incidents: deque[float] = deque(maxlen=MAX_INCIDENTS)  # times of their first faults
        self.number = 0
        self.num_foreign = 0
        self.num_faults = 0
        self.num_pages = 0

    def add_pages(self, pages: Iterable[PageId], now: float) -> None:
        """Quarantines pages whose bytes differ from their digests. Unheld ones are freed, held ones condemned.

        All faults are recorded first: a page that is freed with its parent would not be retired.
        """
        pages = list(pages)
        for page in pages:
            self.num_faults += 1
            if not self._incidents or now - self._incidents[-1] > INCIDENT_S:
                self._incidents.append(now)
            self._cache.pool.digests.record_fault(page, now)
            if self._cache.pool.windows is not None:
                self._cache.pool.windows.record_fault(page, now)
        for page in pages:
            key = self._cache.key_of(page)
            if key is None:
                self._cache.pool.condemn(page)
            else:
                self._add(key)

    def add_keys(self, keys: Iterable[PageKey]) -> int:
        """Quarantines pages by their keys, on behalf of a peer. Returns the number of pages taken out here."""
        before = self.num_pages
        for key in keys:
            self._add(key)
        return self.num_pages - before

    def add_foreign_keys(self, keys: Iterable[PageKey]) -> int:
        """Like `add_keys`, but spares pages that were computed here and only over such pages: those are intact.

        The peer's page of the same key may be another copy. Taking out ours would fail its readers, and two workers
        that read from each other would return the key to each other.
        """
        keys = list(keys)
        self._foreign.extend(keys)
        self.num_foreign += len(keys)
        return self.add_keys([foreign for key in keys for foreign in self._cache.foreign(key)])

    def foreign_since(self, number: int) -> tuple[tuple[PageKey, ...], int]:
        """Like `since`, of the keys of `add_foreign_keys`, cached or not: a copy in a tier may outlive its page."""
        return _newest(self._foreign, self.num_foreign - number), self.num_foreign

    def since(self, number: int) -> tuple[tuple[PageKey, ...], int]:
        """The keys quarantined after the first `number` ones, oldest first, and the number to ask with next time.

        A number from the future, of another incarnation, gets all kept keys.
        """
        num_new = self.number - number if number <= self.number else self.number
        return _newest(self._keys, num_new), self.number

    def is_unfit(self, now: float) -> bool:
        """True after `MAX_INCIDENTS` within `INCIDENTS_WINDOW_S`."""
        return len(self._incidents) == MAX_INCIDENTS and now - self._incidents[0] <= INCIDENTS_WINDOW_S

    def _add(self, key: PageKey) -> None:
        taken = self._cache.quarantine(key)
        if taken:
            self.num_pages += len(taken)
            self.number += 1
            self._keys.append(key)


def _newest(keys: deque[PageKey], num_keys: int) -> tuple[PageKey, ...]:
    return tuple(keys)[max(0, len(keys) - num_keys) :]
