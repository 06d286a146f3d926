"""Who holds which page of one worker's pool. Owned by the engine thread; no locks, no tensors, no clock.

A page may be held several times and for several reasons (a running row and an export may share it) and may also be in
the prefix cache. It returns to the free list the moment nothing holds it and the cache does not want it. For the books
every page has exactly one `Owner`, so that the owners' counts always add up to the pool:
`free + cached + pinned + live + reserved + draining == total`.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Sequence

from baton.domain.errors import Broken
from baton.domain.ids import PageId


class Hold(enum.IntEnum):
    """Why a page may not be reused."""

    PINNED = 0  # published in an export, until commit, abort or lease end
    LIVE = 1  # in the page table of a prompt being chunked or a row being decoded
    RESERVED = 2  # bound to an import
    DRAINING = 3  # given up, but a read into it may still be in flight


class Owner(enum.IntEnum):
    """A page's one line in the books: the strongest reason that applies."""

    FREE = 0
    CACHED = 1
    PINNED = 2
    LIVE = 3
    RESERVED = 4
    DRAINING = 5


_OWNERS_BY_PRIORITY = (
    (Hold.DRAINING, Owner.DRAINING),
    (Hold.RESERVED, Owner.RESERVED),
    (Hold.LIVE, Owner.LIVE),
    (Hold.PINNED, Owner.PINNED),
)


class PagePool:
    """Counts holds per page. `allocate` takes from the free list only; evicting is the prefix cache's business."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = [PageId(i) for i in reversed(range(num_pages))]
        self._free_index = array("I", reversed(range(num_pages)))  # where a free page is in `_free`
        self._holds = {hold: array("I", bytes(4 * num_pages)) for hold in Hold}
        self._cached = bytearray(num_pages)
        self._owners = bytearray(num_pages)  # Owner.FREE == 0
        self._num_owned = [num_pages] + [0] * (len(Owner) - 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that only the prefix cache wants; all of them can be evicted."""
        return self._num_owned[Owner.CACHED]

    def num_owned(self, owner: Owner) -> int:
        """Pages booked to `owner`."""
        return self._num_owned[owner]

    def counts(self) -> dict[Owner, int]:
        """Pages by owner; the values add up to `num_pages`."""
        return {owner: self._num_owned[owner] for owner in Owner}

    def owner(self, page: PageId) -> Owner:
        return Owner(self._owners[page])

    def allocate(self, num_pages: int, hold: Hold) -> list[PageId] | None:
        """`num_pages` free pages, held once for `hold`; None (and no change) when there are not that many."""
        if num_pages > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._holds[hold][page] += 1
            self._update_owner(page)
        return pages

    def hold(self, pages: Iterable[PageId], hold: Hold) -> None:
        """One more hold on each page. Raises `Broken` for a free page: it may already be reserved to another."""
        for page in pages:
            if self._owners[page] == Owner.FREE:
                raise Broken(f"page {page} is free and cannot be held")
            self._holds[hold][page] += 1
            self._update_owner(page)

    def drop(self, pages: Iterable[PageId], hold: Hold) -> None:
        """One hold fewer on each page; frees those that nothing else wants. Raises `Broken` if it was not held."""
        for page in pages:
            if self._holds[hold][page] == 0:
                raise Broken(f"page {page} has no {hold.name} hold to drop")
            self._holds[hold][page] -= 1
            self._update_owner(page)

    def move(self, pages: Sequence[PageId], old: Hold, new: Hold) -> None:
        """Changes the reason without a moment in which the pages are unheld."""
        self.hold(pages, new)
        self.drop(pages, old)

    def set_cached(self, page: PageId, cached: bool) -> None:
        """Called by the prefix cache alone, when a page enters or leaves it."""
        self._cached[page] = cached
        self._update_owner(page)

    def is_cached(self, page: PageId) -> bool:
        """Whether the prefix cache holds the page, beside any other reason."""
        return bool(self._cached[page])

    def check(self) -> None:
        """Recomputes every owner from the holds. Raises `Broken` at the first page that does not agree."""
        self.check_pages(0, self.num_pages)
        counted = [0] * len(Owner)
        for page in range(self.num_pages):
            counted[self._strongest_owner(page)] += 1
        if counted != self._num_owned:
            raise Broken(f"owners' counts {self._num_owned} are really {counted}")

    def check_pages(self, start: int, stop: int) -> None:
        """The part of `check` that looks at single pages, for those in [start, stop). Totals are not recounted."""
        if len(self._free) != self._num_owned[Owner.FREE]:
            raise Broken(f"{len(self._free)} pages are on the free list, {self._num_owned[Owner.FREE]} are free")
        for page in range(start, stop):
            owner = self._strongest_owner(page)
            if owner != self._owners[page]:
                raise Broken(f"page {page} is counted as {Owner(self._owners[page]).name}, is {owner.name}")
            if (owner == Owner.FREE) != self._is_on_free_list(page):
                raise Broken(f"page {page} is {owner.name}, the free list says otherwise")

    def _is_on_free_list(self, page: int) -> bool:
        index = self._free_index[page]
        return index < len(self._free) and self._free[index] == page

    def _strongest_owner(self, page: int) -> Owner:
        for hold, owner in _OWNERS_BY_PRIORITY:
            if self._holds[hold][page]:
                return owner
        return Owner.CACHED if self._cached[page] else Owner.FREE

    def _update_owner(self, page: PageId) -> None:
        before, now = self._owners[page], self._strongest_owner(page)
        if before == now:
            return
        self._owners[page] = now
        self._num_owned[before] -= 1
        self._num_owned[now] += 1
        if now == Owner.FREE:
            self._free_index[page] = len(self._free)
            self._free.append(page)
