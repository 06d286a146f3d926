"""Waits within a process: for changes of the registry, and for events with a time. asyncio only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class ChangeNotifier:
    """Notifications that arrive while a listener is busy are coalesced."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._listeners: set[asyncio.Event] = set()
        self._closed = False

    def notify(self) -> None:
        """Wakes every listener."""
        for listener in self._listeners:
            listener.set()

    def close(self) -> None:
        """Ends every listener's iteration; idempotent."""
        self._closed = True
        self.notify()

    async def listen(self) -> AsyncIterator[None]:
        """Yields at once, then at every notification and at least every heartbeat, until `close`."""
        notified = asyncio.Event()
        self._listeners.add(notified)
        try:
            while not self._closed:
                yield
                if not self._closed:
                    await wait_for_event(notified, self._heartbeat_s)
                    notified.clear()
        finally:
            self._listeners.discard(notified)


class TimedEvent:
    """As `asyncio.Event`, of one event loop, but a wait has a time: it costs a timer, and no `asyncio.timeout`."""

    __slots__ = ("_is_set", "_waiters")

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[asyncio.Future[None]] = []

    def is_set(self) -> bool:
        """True from `set` to `clear`."""
        return self._is_set

    def set(self) -> None:
        """Wakes all that wait."""
        self._is_set = True
        for waiter in self._waiters:
            _end_wait(waiter)

    def clear(self) -> None:
        """Later waits wait."""
        self._is_set = False

    async def wait(self, timeout_s: float) -> bool:
        """Waits until it is set, for at most `timeout_s`; returns True if it is."""
        if self._is_set:
            return True
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.append(waiter)
        timer = loop.call_later(timeout_s, _end_wait, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiters.remove(waiter)
        return self._is_set


def _end_wait(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Waits for the event for at most `timeout_s`; returns True if it is set."""
    if event.is_set():
        return True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
