"""A queue with one reader: what every token passes on its way from a worker to the client. asyncio, one event loop.

`asyncio.Queue` serves many readers, and `asyncio.timeout` sets a timer for every wait; at one wait a token both are a
good part of what a token costs. Here one reader waits on one future, and one timer is set again only when it has gone
off too early. Used by `dispatch.attempt` and `api.mixer`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class AsyncMailbox(Generic[T]):
    """Items come out in the order in which they went in. With a `capacity`, who puts may have to wait."""

    def __init__(self, capacity: int | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._waiting_for_room: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._read_until = 0.0

    def put_nowait(self, item: T) -> None:
        """Adds an item, whatever the capacity."""
        self._items.append(item)
        self.wake()

    async def put(self, item: T) -> None:
        """Adds an item once there is room for it."""
        while self._capacity is not None and len(self._items) >= self._capacity:
            room = self._loop.create_future()
            self._waiting_for_room.append(room)
            await room
        self.put_nowait(item)

    def wake(self) -> None:
        """Ends the reader's wait, if it waits."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> T:
        """The next item, which is waited for."""
        while not self._items:
            self._reader = self._loop.create_future()
            await self._reader
        return self._take()

    async def get_until(self, at: float) -> T | None:
        """The next item; None if there is none at `at` (of the loop's clock), or when `wake` is called before."""
        if not self._items:
            self._read_until = at
            self._set_timer(at)
            self._reader = self._loop.create_future()
            await self._reader
        return self._take() if self._items else None

    def close(self) -> None:
        """No wait ends by its time any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _take(self) -> T:
        while self._waiting_for_room:  # all look again: one that gives up meanwhile must not keep the room
            room = self._waiting_for_room.popleft()
            if not room.done():
                room.set_result(None)
        return self._items.popleft()

    def _set_timer(self, at: float) -> None:
        """A timer that goes off at `at` or before; an earlier one is left as it is."""
        if self._timer is None or at < self._timer_at:
            self.close()
            self._timer, self._timer_at = self._loop.call_at(at, self._ring), at

    def _ring(self) -> None:
        self._timer = None
        if self._reader is None or self._reader.done():
            return
        if self._loop.time() < self._read_until:
            self._set_timer(self._read_until)
        else:
            self.wake()
