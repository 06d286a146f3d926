"""The page pool of one worker: holds per page. Owned by the engine thread; no locks, no tensors, no clock.

A page can be held several times and for several reasons, e.g. by a row and by an export, and can be cached as well. It
returns to the free list as soon as it has no hold and is not cached. Every page has exactly one `Owner`, so the
owners' counts add up to the pool: `free + cached + pinned + live + reserved + draining + retired == total`.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Iterable, Sequence

from baton.domain.errors import Broken
from baton.domain.ids import PageId
from baton.kv.page_digests import PageDigests, PageState
from baton.kv.windows.slots import WindowSlots


class Hold(enum.IntEnum):
    """Reason why a page may not be reused."""

    PINNED = 0  # published by an export, until commit, abort or lease end
    LIVE = 1  # in the page table of a prompt or a row
    RESERVED = 2  # allocated to an import
    DRAINING = 3  # of an ended import, while a read into it may be in flight
    IN_FLIGHT = 4  # of an ended row, while a step that reads or writes it is in flight


class Owner(enum.IntEnum):
    """Owner of a page: the strongest of its holds. RETIRED: its memory was faulty twice; it is never allocated."""

    FREE = 0
    CACHED = 1
    PINNED = 2
    LIVE = 3
    RESERVED = 4
    DRAINING = 5
    RETIRED = 6


_OWNERS_BY_PRIORITY = (
    (Hold.DRAINING, Owner.DRAINING),
    (Hold.RESERVED, Owner.RESERVED),
    (Hold.LIVE, Owner.LIVE),
    (Hold.IN_FLIGHT, Owner.LIVE),
    (Hold.PINNED, Owner.PINNED),
)
_OWNERS = tuple(Owner)
"""By number. Calling the class takes several times longer, and this runs for every page of every step."""
_UNHELD = (Owner.FREE, Owner.RETIRED)
_IS_HELD = tuple(owner not in (Owner.FREE, Owner.CACHED, Owner.RETIRED) for owner in Owner)


class PagePool:
    """Counts holds per page. `allocate` takes from the free list only; the prefix cache evicts.

    `digests` are the pages' own: a page that is freed loses its digest here.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = [PageId(i) for i in reversed(range(num_pages))]
        self._free_index = array("I", reversed(range(num_pages)))  # index of a free page in `_free`
        self._holds = {hold: array("I", bytes(4 * num_pages)) for hold in Hold}
        self._holds_by_priority = tuple((self._holds[hold], owner) for hold, owner in _OWNERS_BY_PRIORITY)
        self._cached = bytearray(num_pages)
        self._owners = bytearray(num_pages)  # Owner.FREE == 0
        self._num_owned = [num_pages] + [0] * (len(Owner) - 1)
        self.digests = PageDigests(num_pages)
        self.on_evictable: Callable[[PageId], None] | None = None
        """Called with a page whose last hold was dropped and that is cached. Only the prefix cache sets it."""
        self.windows: WindowSlots | None = None
        """Slots of the pages' window parts; None: pages that have one have it in themselves."""

    def add_window_slots(self, num_slots: int, num_parts: int) -> WindowSlots:
        """Keeps window parts, the last of a page's `num_parts` parts, apart. Call it before the first page is used."""
        self.digests.keep_windows_apart(num_parts)
        self.windows = WindowSlots(num_slots, self.num_pages, self.is_cached, self.digests)
        return self.windows

    @property
    def num_window_parts(self) -> int:
        """Parts of a page, the last of which has a slot or is not there; 1: no page is without a part."""
        return 1 if self.windows is None else self.digests.num_parts

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Pages that are not retired."""
        return self.num_pages - self._num_owned[Owner.RETIRED]

    @property
    def num_cached(self) -> int:
        """Pages that only the prefix cache holds; each can be evicted."""
        return self._num_owned[Owner.CACHED]

    def num_owned(self, owner: Owner) -> int:
        """Number of pages of `owner`."""
        return self._num_owned[owner]

    def counts(self) -> dict[Owner, int]:
        """Number of pages by owner; the values add up to `num_pages`."""
        return {owner: self._num_owned[owner] for owner in Owner}

    def owner(self, page: PageId) -> Owner:
        return _OWNERS[self._owners[page]]

    def has_hold(self, page: PageId, hold: Hold) -> bool:
        """True if the page is held for `hold`."""
        return self._holds[hold][page] > 0

    def num_held_once(self, pages: Iterable[PageId]) -> int:
        """Number of `pages` that have exactly one hold."""
        counts = tuple(self._holds.values())
        return sum(sum([count[page] for count in counts]) == 1 for page in pages)

    def allocate(self, num_pages: int, hold: Hold) -> list[PageId] | None:
        """Takes `num_pages` free pages, held once for `hold`. None, without a change, if there are too few."""
        if num_pages > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._holds[hold][page] += 1
            self._update_owner(page)
        return pages

    def hold(self, pages: Iterable[PageId], hold: Hold) -> None:
        """Adds a hold to each page. Raises `Broken` for a free or retired page."""
        for page in pages:
            if self._owners[page] in _UNHELD:
                raise Broken(f"page {page} is free and cannot be held")
            self._holds[hold][page] += 1
            self._update_owner(page)

    def drop(self, pages: Iterable[PageId], hold: Hold) -> None:
        """Drops a hold of each page and frees unheld, uncached ones. Raises `Broken` for a page without that hold."""
        for page in pages:
            if self._holds[hold][page] == 0:
                raise Broken(f"page {page} has no {hold.name} hold to drop")
            self._holds[hold][page] -= 1
            self._update_owner(page)

    def move(self, pages: Sequence[PageId], old: Hold, new: Hold) -> None:
        """Changes the hold of pages without a gap."""
        self.hold(pages, new)
        self.drop(pages, old)

    def set_cached(self, page: PageId, cached: bool) -> None:
        """Marks a page as cached. Only the prefix cache calls this."""
        self._cached[page] = cached
        if not _IS_HELD[self._owners[page]]:  # of a held page the strongest hold decides
            self._update_owner(page)

    def is_cached(self, page: PageId) -> bool:
        """True if the page is in the prefix cache, whatever else holds it."""
        return bool(self._cached[page])

    def condemn(self, page: PageId) -> None:
        """Forbids the use of a held, uncached page until it is freed; ignores a page without a hold."""
        if self._owners[page] not in _UNHELD:
            self.digests.condemn(page)

    def check(self) -> None:
        """Recomputes every owner from the holds. Raises `Broken` at the first difference."""
        self.check_pages(0, self.num_pages)
        if self.windows is not None:
            self.windows.check()
        counted = [self._owners.count(owner) for owner in Owner]
        if counted != self._num_owned:
            raise Broken(f"owners' counts {self._num_owned} are really {counted}")

    def check_pages(self, start: int, stop: int) -> None:
        """The part of `check` that concerns single pages, for pages [start, stop). Totals are not recounted."""
        if len(self._free) != self._num_owned[Owner.FREE]:
            raise Broken(f"{len(self._free)} pages are on the free list, {self._num_owned[Owner.FREE]} are free")
        if self.windows is not None:
            self.windows.check_pages(start, stop)
        for page in range(start, stop):
            owner = self._strongest_owner(page)
            if owner != self._owners[page]:
                raise Broken(f"page {page} is counted as {Owner(self._owners[page]).name}, is {owner.name}")
            if (owner == Owner.FREE) != self._is_on_free_list(page):
                raise Broken(f"page {page} is {owner.name}, the free list says otherwise")
            if owner == Owner.FREE and self.digests.state(PageId(page)) is not PageState.NONE:
                raise Broken(f"page {page} is free and {self.digests.state(PageId(page)).name}")

    def _is_on_free_list(self, page: int) -> bool:
        index = self._free_index[page]
        return index < len(self._free) and self._free[index] == page

    def _strongest_owner(self, page: int) -> Owner:
        for counts, owner in self._holds_by_priority:
            if counts[page]:
                return owner
        if self._cached[page]:
            return Owner.CACHED
        return Owner.RETIRED if self.digests.is_retired(PageId(page)) else Owner.FREE

    def _update_owner(self, page: PageId) -> None:
        before, now = self._owners[page], self._strongest_owner(page)
        if before == now:
            return
        if now == Owner.FREE and self.windows is not None:
            self.windows.on_freed(page)
        if now == Owner.FREE and self.digests.on_freed(page):
            now = Owner.RETIRED
        self._owners[page] = now
        self._num_owned[before] -= 1
        self._num_owned[now] += 1
        if now == Owner.FREE:
            self._free_index[page] = len(self._free)
            self._free.append(page)
        elif now == Owner.CACHED and self.on_evictable is not None:
            self.on_evictable(page)
