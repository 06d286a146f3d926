"""An event that is waited for with a time, within one process. asyncio only."""

from __future__ import annotations

import asyncio


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
