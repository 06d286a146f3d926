"""Events of every open handoff, for decode workers to watch. Owned by the asyncio loop.

A watcher may come before the prompt, as the router calls both workers at once, or after some chunks. It gets all
events from the first. An entry is removed when its export ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from baton.domain.errors import BatonError, Cancelled, DeadlineExceeded
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId
from baton.engine.handoff.export_events import Seal

HandoffEvent = PublishedChunk | Seal | BatonError
"""An error is the last event of a handoff that failed, before or after its seal."""


@dataclass(slots=True)
class _Entry:
    events: list[HandoffEvent] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    num_watchers: int = 0
    ended: bool = False

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class HandoffLog:
    """Handoff events by attempt."""

    def __init__(self) -> None:
        self._entries: dict[AttemptId, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, id: AttemptId, event: HandoffEvent) -> None:
        """Adds an event and wakes the watchers."""
        entry = self._entries.setdefault(id, _Entry())
        entry.events.append(event)
        entry.ended = entry.ended or not isinstance(event, PublishedChunk)
        entry.wake()

    def end(self, id: AttemptId, error: BatonError | None = None) -> None:
        """Removes the entry of an ended export. Its watchers get `error`, by default `Cancelled`."""
        entry = self._entries.pop(id, None)
        if entry is None:
            return
        if not entry.ended:
            entry.events.append(error or Cancelled(f"{id}: the handoff was aborted"))
            entry.ended = True
        entry.wake()

    async def watch(self, id: AttemptId, timeout_s: float) -> AsyncGenerator[HandoffEvent, None]:
        """Yields all events of `id`, from the first to a seal or an error. `timeout_s` bounds the wait for each."""
        entry = self._entries.setdefault(id, _Entry())
        entry.num_watchers += 1
        num_seen = 0
        try:
            while True:
                changed = entry.changed
                while num_seen < len(entry.events):
                    num_seen += 1
                    yield entry.events[num_seen - 1]
                if entry.ended:
                    return
                try:
                    async with asyncio.timeout(timeout_s):
                        await changed.wait()
                except TimeoutError:
                    yield DeadlineExceeded(f"{id}: no event for {timeout_s} s")
                    return
        finally:
            entry.num_watchers -= 1
            if not entry.events and not entry.num_watchers and self._entries.get(id) is entry:
                del self._entries[id]
