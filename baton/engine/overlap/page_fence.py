"""Keeps pages that no row owns any more while a step in flight may read or write them. Owned by a scheduler. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from baton.domain.errors import Broken
from baton.domain.ids import PageId
from baton.kv.pages import Hold, PagePool


class PageFence:
    """Holds pages for the steps that are in flight now. Steps end in the order of their start."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._held: deque[tuple[int, list[PageId]]] = deque()  # until the step of that number ends
        self._num_started = self._num_ended = 0

    @property
    def num_in_flight(self) -> int:
        """Steps that were started and have not ended."""
        return self._num_started - self._num_ended

    @property
    def num_pages(self) -> int:
        """Pages that are held, one for each time."""
        return sum(len(pages) for _, pages in self._held)

    def on_started(self) -> None:
        """Counts a step that starts."""
        self._num_started += 1

    def hold(self, pages: Iterable[PageId]) -> None:
        """Holds `pages` until every step ends that is in flight now; does nothing if none is."""
        kept = list(pages)
        if kept and self.num_in_flight:
            self._pool.hold(kept, Hold.IN_FLIGHT)
            self._held.append((self._num_started, kept))

    def on_ended(self) -> None:
        """Drops the pages that were held for the oldest step in flight. Raises `Broken` if none is."""
        if not self.num_in_flight:
            raise Broken("a step ended that was not started")
        self._num_ended += 1
        while self._held and self._held[0][0] <= self._num_ended:
            self._pool.drop(self._held.popleft()[1], Hold.IN_FLIGHT)
