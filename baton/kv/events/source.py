"""Collects the events of one prefix cache during a turn of its engine."""

from __future__ import annotations

from collections.abc import Callable

from baton.domain.ids import PageKey
from baton.kv.events.event import EMPTY, CacheEvent, ClearedEvent, PageContent, RemovedEvent, StoredEvent


class EventSource:
    """Owned by the engine thread. `flush` passes on what one turn changed, in order."""

    def __init__(self, on_events: Callable[[list[CacheEvent]], None], *, with_content: bool = False) -> None:
        """`with_content`: events of stored pages have their tokens, and name their images."""
        self.with_content = with_content
        self._on_events = on_events
        self._events: list[CacheEvent] = []
        self._has_begun = False

    def stored(self, key: PageKey, parent: PageKey | None, content: PageContent = EMPTY) -> None:
        """Records a page that entered the cache."""
        self._has_begun = True
        self._events.append(StoredEvent(key, parent, content if self.with_content else EMPTY))

    def withheld(self) -> None:
        """Records that a page entered the cache that is not announced.

        If it is the first page, readers are told that they see an empty cache: what they see of one without events is
        not known to be all of it, and they count on what was routed there.
        """
        if not self._has_begun:
            self.cleared()

    def removed(self, key: PageKey) -> None:
        """Records a page that left the cache."""
        self._events.append(RemovedEvent(key))

    def cleared(self) -> None:
        """Records that the cache is empty."""
        self._has_begun = True
        self._events.append(ClearedEvent())

    def flush(self) -> None:
        """Passes the events on. Nothing happens without any."""
        if self._events:
            events, self._events = self._events, []
            self._on_events(events)
