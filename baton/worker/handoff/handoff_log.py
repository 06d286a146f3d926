"""Events of every open handoff, for decode workers to watch. Owned by the asyncio loop.

A watcher may come before the prompt, as the router calls both workers at once, or after some chunks. It gets all
events from the first. An entry is removed when its export ends. The end itself is remembered (`handoff_ends`): a
watcher that comes later, because a reservation or a link was slow, gets it at once. Where so many have ended that some
are forgotten, a watcher whose prompt this worker does not have waits for `PATIENCE_S` at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from baton.domain.errors import BatonError, Cancelled, DeadlineExceeded, LeaseEnded
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId
from baton.engine.handoff.export_events import Seal
from baton.worker.handoff.handoff_ends import HandoffEnds

HandoffEvent = PublishedChunk | Seal | BatonError
"""An error is the last event of a handoff that failed, before or after its seal."""

PATIENCE_S = 30.0
"""Longest wait for a prompt whose handoff may have ended and be forgotten. The router calls both workers at once; only
images, which go first, make a prompt later than its watcher."""
WATCHABLE_S = 600.0
"""An attempt is not watched later than this after its end: requests have a deadline."""


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

    def __init__(
        self, is_coming: Callable[[AttemptId], bool] = lambda id: False, ends: HandoffEnds | None = None
    ) -> None:
        """`is_coming`: this worker has the prompt of the attempt, or waits for it with the router's call open."""
        self._entries: dict[AttemptId, _Entry] = {}
        self._ends = HandoffEnds() if ends is None else ends
        self._is_coming = is_coming

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, id: AttemptId, event: HandoffEvent) -> None:
        """Adds an event and wakes the watchers."""
        entry = self._entries.setdefault(id, _Entry())
        entry.events.append(event)
        entry.ended = entry.ended or not isinstance(event, PublishedChunk)
        entry.wake()

    def end(self, id: AttemptId, error: BatonError | None = None) -> None:
        """Removes the entry of an ended export. Its watchers get the end, and so does whoever watches it later.

        The end is the error that was appended last, or else `error`, by default `Cancelled`.
        """
        entry = self._entries.pop(id, None)
        last = entry.events[-1] if entry is not None and entry.events else None
        end = last if isinstance(last, BatonError) else error or Cancelled(f"{id}: the handoff was aborted")
        self._ends.remember(id, end, asyncio.get_running_loop().time())
        if entry is None:
            return
        if not entry.ended:
            entry.events.append(end)
            entry.ended = True
        entry.wake()

    async def watch(self, id: AttemptId, timeout_s: float) -> AsyncGenerator[HandoffEvent, None]:
        """Yields all events of `id`, from the first to a seal or an error. `timeout_s` bounds the wait for each.

        A prompt that comes while its end is in doubt starts that wait anew.
        """
        if (end := self._ends.find(id)) is not None:
            yield end
            return
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
                in_doubt = not entry.events and self._may_have_ended(id)
                try:
                    async with asyncio.timeout(min(timeout_s, PATIENCE_S) if in_doubt else timeout_s):
                        await changed.wait()
                except TimeoutError:
                    if in_doubt and self._is_coming(id):
                        continue  # it came meanwhile
                    if in_doubt:
                        yield LeaseEnded(f"{id}: the handoff has ended, or never began")
                    else:
                        yield DeadlineExceeded(f"{id}: no event for {timeout_s} s")
                    return
        finally:
            entry.num_watchers -= 1
            if not entry.events and not entry.num_watchers and self._entries.get(id) is entry:
                del self._entries[id]

    def _may_have_ended(self, id: AttemptId) -> bool:
        """True if this worker does not have the prompt, and the end of its handoff may be forgotten."""
        since = asyncio.get_running_loop().time() - WATCHABLE_S
        return not self._is_coming(id) and self._ends.has_forgotten(since)
