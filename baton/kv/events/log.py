"""The numbered events of one worker's cache: a bounded ring, and the content after the last event.

The ring serves readers that keep up. A reader whose next event was overwritten, or whose number this log never gave,
gets a snapshot, and its cursor becomes the snapshot's number: a cursor that stayed behind would ask for snapshots
forever.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.domain.ids import PageKey
from baton.kv.events.event import CacheDelta, CacheEvent, ClearedEvent, RemovedEvent, StoredEvent

MAX_EVENTS = 1 << 16


class CacheEventLog:
    """Events 1 to `seq` of a cache that began empty. Not thread-safe."""

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self.seq = 0
        self._max_events = max_events
        self._ring: list[CacheEvent] = []  # event n lies at (n - 1) % max_events
        self._pages: dict[PageKey, None] = {}

    def extend(self, events: Iterable[CacheEvent]) -> None:
        """Appends events; the oldest are overwritten."""
        for event in events:
            if len(self._ring) < self._max_events:
                self._ring.append(event)
            else:
                self._ring[self.seq % self._max_events] = event
            self.seq += 1
            match event:
                case StoredEvent(key):
                    self._pages[key] = None
                case RemovedEvent(key):
                    self._pages.pop(key, None)
                case ClearedEvent():
                    self._pages.clear()

    def since(self, seq: int) -> CacheDelta | None:
        """What changed after event `seq`; None if nothing did. A snapshot if the ring does not reach back to it."""
        if seq == self.seq:
            return None
        if seq > self.seq or seq < self.seq - len(self._ring):
            return self.snapshot()
        present: dict[PageKey, bool] = {}
        reset = False
        for number in range(seq, self.seq):
            match self._ring[number % self._max_events]:
                case StoredEvent(key):
                    present[key] = True
                case RemovedEvent(key):
                    present[key] = False
                case ClearedEvent():
                    present.clear()
                    reset = True
        stored = tuple(key for key, is_stored in present.items() if is_stored)
        removed = () if reset else tuple(key for key, is_stored in present.items() if not is_stored)
        return CacheDelta(seq, self.seq, stored, removed, reset)

    def snapshot(self) -> CacheDelta:
        """The whole content after the last event."""
        return CacheDelta(0, self.seq, tuple(self._pages), reset=True)
