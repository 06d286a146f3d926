"""The reception book as one simulated process sees it: the shared `MemoryBook` behind a link that may fail.

An operation whose answer is lost has happened all the same, as with Redis. News come by looking again within a
heartbeat, which is all that the contract promises once messages can be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from baton.domain.ids import AttemptId, Incarnation, RequestId, WorkerId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.worker import WorkerRecord
from baton.state.base import RequestRecord, StateBook, StateUnavailable
from simulation.network import Network
from simulation.process import Process

NAME = "book"
TIMEOUT_S = 1.0

Answer = TypeVar("Answer")


class SimBook:
    """A `StateBook` over the network."""

    def __init__(self, book: StateBook, network: Network, process: Process, heartbeat_s: float) -> None:
        self._book = book
        self._link = network.link(process.name, NAME)
        self._process = process
        self._heartbeat_s = heartbeat_s

    async def create(self, record: RequestRecord) -> bool:
        return await self._ask(lambda: self._book.create(record))

    async def advance(
        self, id: AttemptId, event: RequestEvent, *, num_emitted: int = 0, failure_code: str = ""
    ) -> RequestState:
        return await self._ask(
            lambda: self._book.advance(id, event, num_emitted=num_emitted, failure_code=failure_code)
        )

    async def get(self, id: RequestId) -> RequestRecord | None:
        return await self._ask(lambda: self._book.get(id))

    async def announce(self, record: WorkerRecord) -> bool:
        return await self._ask(lambda: self._book.announce(record))

    async def withdraw(self, id: WorkerId, incarnation: Incarnation) -> None:
        await self._ask(lambda: self._book.withdraw(id, incarnation))

    async def workers(self) -> list[WorkerRecord]:
        return await self._ask(self._book.workers)

    async def changes(self) -> AsyncIterator[None]:
        while True:
            yield
            await asyncio.sleep(self._process.rng.uniform(0.2, 1.0) * self._heartbeat_s)

    async def ping(self) -> None:
        await self._ask(self._book.ping)

    async def close(self) -> None:
        """The shared book stays open."""

    async def _ask(self, operation: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        await self._travel()
        answer = await operation()
        await self._travel()
        return answer

    async def _travel(self) -> None:
        """Lets the time pass that a message takes; raises `StateUnavailable` for one that is lost or too late."""
        now = asyncio.get_running_loop().time()
        at = self._link.arrival(now)
        late = at is None or at - now > TIMEOUT_S
        await asyncio.sleep(TIMEOUT_S if at is None or late else at - now)
        if late:
            raise StateUnavailable("the book did not answer in time")
