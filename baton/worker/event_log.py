"""The cache event log of a worker, shared by its engine thread and the streams of its readers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from threading import Lock

from baton.kv.events.event import CacheDelta, CacheEvent, StoredEvent
from baton.kv.events.log import MAX_EVENTS, CacheEventLog
from baton.kv.events.source import EventSource
from baton.kv.prefix_cache import PrefixCache

BATCH_INTERVAL_S = 0.01
"""Events of this time travel in one message."""


class SharedEventLog:
    """`extend` is called by the engine thread, everything else by an asyncio loop."""

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self._lock = Lock()
        self._log = CacheEventLog(max_events)
        self._wakes: set[Callable[[], None]] = set()
        self._publish: Callable[[Sequence[CacheEvent]], None] | None = None

    def attach(self, cache: PrefixCache, publish: Callable[[Sequence[CacheEvent]], None] | None = None) -> None:
        """Records all events of a cache that is empty now. `publish` gets them too, with contents, in its thread."""
        self._publish = publish
        cache.events = EventSource(self.extend, with_content=publish is not None)

    def extend(self, events: Sequence[CacheEvent]) -> None:
        """Appends events and wakes the readers; never blocks for one of them."""
        if self._publish is not None:
            self._publish(events)
            events = [_without_content(event) for event in events]
        with self._lock:
            self._log.extend(events)
            wakes = tuple(self._wakes)
        for wake in wakes:
            wake()

    def since(self, seq: int) -> CacheDelta | None:
        """See `CacheEventLog.since`."""
        with self._lock:
            return self._log.since(seq)

    async def follow(self, seq: int, ended: asyncio.Event) -> AsyncGenerator[CacheDelta, None]:
        """Deltas after event `seq`, each from where the last one ended, until `ended` is set.

        The reader sets the pace: what happens while it is busy comes as one delta, or as a snapshot if it was too much.
        """
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(changed.set)

        with self._lock:
            self._wakes.add(wake)
        stop = asyncio.ensure_future(ended.wait())
        try:
            while not ended.is_set():
                changed.clear()
                delta = self.since(seq)
                if delta is not None:
                    seq = delta.seq
                    yield delta
                    await asyncio.wait((stop,), timeout=BATCH_INTERVAL_S)
                    continue
                change = asyncio.ensure_future(changed.wait())
                try:
                    await asyncio.wait((stop, change), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    change.cancel()
        finally:
            stop.cancel()
            with self._lock:
                self._wakes.discard(wake)


def _without_content(event: CacheEvent) -> CacheEvent:
    """The event as the ring keeps it: tokens would take most of its memory."""
    return StoredEvent(event.key, event.parent) if isinstance(event, StoredEvent) else event
