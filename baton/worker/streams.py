"""One event stream an attempt, from the engine to the servicer of that attempt. Owned by the asyncio loop.

deliver -> take, while the reader waits   most tokens: no queue, no task switch, no timer
        -> queue -> next -> the reader    whatever `take` leaves, and all that comes until the reader waits again
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton.domain.errors import DeadlineExceeded, Superseded
from baton.domain.ids import AttemptId

Event = TypeVar("Event")

Take = Callable[[Event], bool]
"""Handles an event at once and returns True, or leaves it to the reader. Must not raise or wait."""


@dataclass(slots=True)
class _Stream(Generic[Event]):
    take: Take[Event] | None
    events: deque[Event] = field(default_factory=deque)
    waiter: asyncio.Future[None] | None = None
    num_taken: int = 0


class AttemptStreams(Generic[Event]):
    """Delivers events by attempt. Drops events of an attempt without an open stream."""

    def __init__(self, on_empty: Callable[[], None] = lambda: None) -> None:
        self._on_empty = on_empty
        self._streams: dict[AttemptId, _Stream[Event]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def is_open(self, id: AttemptId) -> bool:
        """True while a reader collects the events of `id`."""
        return id in self._streams

    def open(self, id: AttemptId, take: Take[Event] | None = None) -> None:
        """Starts to collect the events of `id`. Raises `Superseded` if a stream of `id` is open.

        `take` is called for an event while the reader waits, so all earlier events have been read and handled.
        """
        if id in self._streams:
            raise Superseded(f"{id} is being served already")
        self._streams[id] = _Stream(take)

    def deliver(self, id: AttemptId, event: Event) -> None:
        """Hands over an event, or queues it; never blocks (an attempt has a bounded number of events)."""
        stream = self._streams.get(id)
        if stream is None:
            return
        waiter = stream.waiter
        if waiter is None or waiter.done():
            stream.events.append(event)
        elif stream.take is not None and stream.take(event):
            stream.num_taken += 1
        else:
            stream.events.append(event)
            waiter.set_result(None)

    async def next(self, id: AttemptId, timeout_s: float) -> Event:
        """The next event of an open stream that was not taken.

        Raises `DeadlineExceeded` after a silence of `timeout_s`; where events are taken, of at most twice that.
        """
        stream = self._streams[id]
        while not stream.events:
            num_taken = stream.num_taken
            stream.waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout_s):
                    await stream.waiter
            except TimeoutError:
                if not stream.events and stream.num_taken == num_taken:
                    raise DeadlineExceeded(f"{id}: no event within {timeout_s:.1f} s") from None
            finally:
                stream.waiter = None
        return stream.events.popleft()

    def close(self, id: AttemptId) -> None:
        """Stops collecting; calls `on_empty` if no stream is left. Idempotent."""
        self._streams.pop(id, None)
        if not self._streams:
            self._on_empty()
