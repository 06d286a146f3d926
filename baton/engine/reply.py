"""An answer that an engine thread owes somebody in an asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from baton.domain.errors import BatonError, DeadlineExceeded

Answer = TypeVar("Answer")


class Reply(Generic[Answer]):
    """Made in the loop, sent along with a command, answered once from the engine thread.

    `on_late` gets an answer that nobody waits for any more (in the loop), where such an answer must not be lost.
    """

    def __init__(self, on_late: Callable[[Answer], None] | None = None) -> None:
        self._on_late = on_late
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[Answer] = self._loop.create_future()

    def send(self, answer: Answer | BatonError) -> None:
        """Answers; an error is raised where the answer is awaited. May be called from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._resolve, answer)
        except RuntimeError:  # the loop has closed: nobody waits any more
            return

    async def wait(self, timeout_s: float) -> Answer:
        """The answer. Raises the error that was sent, or `DeadlineExceeded`."""
        try:
            return await asyncio.wait_for(self._future, timeout_s)
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
