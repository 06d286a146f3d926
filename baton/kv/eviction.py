"""Which cached page to evict first: a policy ranks pages, a lazy heap has the leaves that can be evicted. Pure.

The policies are those of SGLang's `evict_policy.py`, with pages for radix-tree nodes:

* `lru`: the page whose last use is the longest ago.
* `lfu`: the page that the fewest requests have matched; of those, the least recently used.
* `slru`: segmented LRU (Karedla, Love and Wherry, 1994). Pages that were never matched after they were computed are
  on probation and go first, so one scan of unique prompts cannot evict what many requests share.
* `priority`: the page whose requests had the lowest priority; of those, the least recently used. Pages that no request
  has used yet, read ahead from a tier or from another worker, go before all.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable
from dataclasses import dataclass

from baton.domain.ids import PageKey

NO_PRIORITY = -(2**31)
"""Below that of any request."""


class EvictionPolicy(enum.StrEnum):
    """Order in which unheld cached pages are evicted. Leaves go first under every policy."""

    LRU = "lru"
    LFU = "lfu"
    SLRU = "slru"
    PRIORITY = "priority"


@dataclass(slots=True)
class PageUse:
    """Use of one cached page. `last_use` counts uses of the whole cache; `num_hits` counts requests that matched it.

    `priority`: the highest of the requests that used it. A page's is never above that of the page before it.
    """

    last_use: int = 0
    num_hits: int = 0
    priority: int = NO_PRIORITY


Rank = tuple[int, int]

_RANKS: dict[EvictionPolicy, Callable[[PageUse], Rank]] = {
    EvictionPolicy.LRU: lambda use: (0, use.last_use),
    EvictionPolicy.LFU: lambda use: (use.num_hits, use.last_use),
    EvictionPolicy.SLRU: lambda use: (min(1, use.num_hits), use.last_use),
    EvictionPolicy.PRIORITY: lambda use: (use.priority, use.last_use),
}


class EvictionQueue:
    """Leaves that could be evicted when they were pushed, the first to go on top.

    An entry is stale as soon as its page is pushed again or forgotten. `pop` skips stale ones, and the heap is rebuilt
    when they are more than half of it, so it has about twice as many entries as there are leaves at most.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._rank = _RANKS[policy]
        self._heap: list[tuple[Rank, PageKey]] = []
        self._ranks: dict[PageKey, Rank] = {}  # of the entries that are not stale

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._ranks

    def push(self, key: PageKey, use: PageUse) -> None:
        """Adds a leaf, or ranks it anew."""
        rank = self._rank(use)
        self._ranks[key] = rank
        heapq.heappush(self._heap, (rank, key))
        if len(self._heap) > 2 * len(self._ranks) + 8:
            self._rebuild()

    def forget(self, key: PageKey) -> None:
        """Removes a page that is held, has children or is cached no more. Does nothing for any other page."""
        self._ranks.pop(key, None)

    def pop(self, use_of: Callable[[PageKey], PageUse | None]) -> PageKey | None:
        """Takes the leaf to evict first; None if there is none.

        `use_of` gives a page's use now, None for one that cannot be evicted. A leaf used since its push is ranked anew.
        """
        while self._heap:
            rank, key = heapq.heappop(self._heap)
            if self._ranks.get(key) != rank:
                continue
            del self._ranks[key]
            use = use_of(key)
            if use is None:
                continue
            if self._rank(use) == rank:
                return key
            self.push(key, use)
        return None

    def _rebuild(self) -> None:
        self._heap = [(rank, key) for key, rank in self._ranks.items()]
        heapq.heapify(self._heap)
