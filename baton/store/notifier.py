"""Wakes everyone who waits for the registry to change, in this process. Owned by a store; asyncio only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class ChangeNotifier:
    """Rings that come while a listener is busy melt into one."""

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
        """Yields once at once, then at every notify and at the latest every heartbeat, until the bell is closed."""
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
    """Waits for the event, at most `timeout_s`; whether it came."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
