"""Keeps pages that no row owns any more while a step in flight may read or write them. Owned by a scheduler. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from baton.domain.errors import Broken
from baton.domain.ids import PageId
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, PagePool
from baton.kv.windows.slots import NO_SLOT

SPARE_PAGES = 2
"""Window slots that each row reserves beyond those of its steps, for pages that give way to cached ones."""


class PageFence:
    """Holds pages for the steps that are in flight now. Steps end in the order of their start."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        # Until a step ends: its number, pages, and slots.
        self._held: deque[tuple[int, list[PageId], list[int]]] = deque()
        self._num_started = self._num_ended = 0

    @property
    def num_in_flight(self) -> int:
        """Steps that were started and have not ended."""
        return self._num_started - self._num_ended

    @property
    def num_pages(self) -> int:
        """Pages that are held, one for each time."""
        return sum(len(pages) for _, pages, _ in self._held)

    def on_started(self) -> None:
        """Counts a step that starts."""
        self._num_started += 1

    def hold(self, pages: Iterable[PageId]) -> None:
        """Holds `pages`, and their window slots as they are now, until every step ends that is in flight now.

        Does nothing if none is.
        """
        kept = list(pages)
        if kept and self.num_in_flight:
            self._pool.hold(kept, Hold.IN_FLIGHT)
            windows = self._pool.windows
            self._held.append((self._num_started, kept, [] if windows is None else windows.fence(kept)))

    def has_slots(self, table: PageTable, num_full: int) -> bool:
        """True if `replacement` keeps no more window slots than the row's spare ones and those that nobody reserved.

        A row that was preempted enters all its pages at once, and its earlier ones may still have slots.
        """
        windows = self._pool.windows
        if windows is None:
            return True
        num_slots = sum(slot != NO_SLOT for slot in table.window_slots[len(table.cached_keys) : num_full])
        return num_slots <= max(SPARE_PAGES, windows.num_unreserved)

    @contextmanager
    def replacement(self, table: PageTable, num_full: int) -> Iterator[None]:
        """Holds those of the first `num_full` pages of `table` that cached ones replace meanwhile.

        Their slots are fenced before: a page that is replaced loses its own. Pages that stay get no hold. It would
        outlast the holds of their parents, which then could not be evicted before them.
        """
        num_before = len(self._held)
        for page in table.pages[len(table.cached_keys) : num_full]:
            self.hold([page])
        yield
        mine = [self._held.pop() for _ in range(len(self._held) - num_before)]
        here = set(table.pages)
        for number, pages, slots in reversed(mine):
            if here.isdisjoint(pages):
                self._held.append((number, pages, slots))
            else:
                self._drop(pages, slots)

    def on_ended(self) -> None:
        """Drops the pages that were held for the oldest step in flight. Raises `Broken` if none is."""
        if not self.num_in_flight:
            raise Broken("a step ended that was not started")
        self._num_ended += 1
        while self._held and self._held[0][0] <= self._num_ended:
            _, pages, slots = self._held.popleft()
            self._drop(pages, slots)

    def _drop(self, pages: list[PageId], slots: list[int]) -> None:
        if self._pool.windows is not None:
            self._pool.windows.unfence(slots)
        self._pool.drop(pages, Hold.IN_FLIGHT)
