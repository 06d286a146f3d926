"""One event stream an attempt, from the engine to the servicer of that attempt. Owned by the asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from baton.domain.errors import DeadlineExceeded, Superseded
from baton.domain.ids import AttemptId

Event = TypeVar("Event")


class AttemptStreams(Generic[Event]):
    """Delivers events by attempt. Drops events of an attempt without an open stream."""

    def __init__(self, on_empty: Callable[[], None] = lambda: None) -> None:
        self._on_empty = on_empty
        self._queues: dict[AttemptId, asyncio.Queue[Event]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def open(self, id: AttemptId) -> None:
        """Starts to collect the events of `id`. Raises `Superseded` if a stream of `id` is open."""
        if id in self._queues:
            raise Superseded(f"{id} is being served already")
        self._queues[id] = asyncio.Queue()

    def deliver(self, id: AttemptId, event: Event) -> None:
        """Queues an event; never blocks (an attempt has a bounded number of events)."""
        queue = self._queues.get(id)
        if queue is not None:
            queue.put_nowait(event)

    async def next(self, id: AttemptId, timeout_s: float) -> Event:
        """The next event of an open stream. Raises `DeadlineExceeded`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._queues[id].get()
        except TimeoutError:
            raise DeadlineExceeded(f"{id}: no event within {timeout_s:.1f} s") from None

    def close(self, id: AttemptId) -> None:
        """Stops collecting; calls `on_empty` if no stream is left. Idempotent."""
        self._queues.pop(id, None)
        if not self._queues:
            self._on_empty()
