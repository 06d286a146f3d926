"""A future that the engine thread resolves and an asyncio loop awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from baton.domain.errors import BatonError, DeadlineExceeded

Answer = TypeVar("Answer")


class Reply(Generic[Answer]):
    """Created in the loop, sent along with a command, resolved once from the engine thread.

    `on_late` gets an answer that came after the wait had ended. It runs in the loop.
    """

    def __init__(self, on_late: Callable[[Answer], None] | None = None) -> None:
        self._on_late = on_late
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[Answer] = self._loop.create_future()

    def send(self, answer: Answer | BatonError) -> None:
        """Resolves the reply; `wait` raises an error that was sent. May be called from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._resolve, answer)
        except RuntimeError:  # the loop has closed: there is no waiter left
            return

    async def wait(self, timeout_s: float) -> Answer:
        """The answer. Raises the error that was sent, or `DeadlineExceeded`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._future
        except TimeoutError:
            raise DeadlineExceeded(f"the engine did not answer within {timeout_s} s") from None

    def _resolve(self, answer: Answer | BatonError) -> None:
        if self._future.done():
            if self._on_late is not None and not isinstance(answer, BatonError):
                self._on_late(answer)
        elif isinstance(answer, BatonError):
            self._future.set_exception(answer)
        else:
            self._future.set_result(answer)
