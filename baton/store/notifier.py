"""Notifies all waiting readers in this process of changes in the registry. Owned by a store; asyncio only."""

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


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Waits for the event for at most `timeout_s`; returns True if it is set."""
    if event.is_set():
        return True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
