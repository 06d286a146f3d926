"""An answer that an engine thread owes somebody in an asyncio loop."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from baton.domain.errors import BatonError, DeadlineExceeded

Answer = TypeVar("Answer")


class Reply(Generic[Answer]):
    """Made in the loop, sent along with a command, answered once from the engine thread."""

    def __init__(self) -> None:
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
            return
        if isinstance(answer, BatonError):
            self._future.set_exception(answer)
        else:
            self._future.set_result(answer)
