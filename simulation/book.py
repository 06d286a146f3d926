"""The reception book: the process that keeps it, and how another process reaches it over a link that may fail.

An operation whose answer is lost has happened all the same, as with Redis. News come by looking again within a
heartbeat, which is all that the contract promises once messages can be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from baton.domain.ids import AttemptId, Incarnation, OwnerId, RequestId, WorkerId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.worker import WorkerRecord
from baton.state.base import (
    CallRecord,
    CallStatus,
    JournalEntry,
    JournalPart,
    RequestRecord,
    StateBook,
    StateUnavailable,
    Written,
)
from simulation.network import Network
from simulation.process import Process
from simulation.scenario import BOOK

TIMEOUT_S = 1.0

Answer = TypeVar("Answer")


class BookHost:
    """The process that keeps the book. `lost_at_s`: when all that it knew was last lost."""

    def __init__(self, make: Callable[[], StateBook]) -> None:
        self._make = make
        self.book = make()
        self.lost_at_s = 0.0

    async def lose(self) -> None:
        """The process dies; the one that follows it knows nothing."""
        lost, self.book = self.book, self._make()
        self.lost_at_s = asyncio.get_running_loop().time()
        await lost.close()


class SimBook:
    """A `StateBook` over the network."""

    def __init__(self, host: BookHost, network: Network, process: Process, heartbeat_s: float) -> None:
        self._host = host
        self._link = network.link(process.name, BOOK)
        self._process = process
        self._heartbeat_s = heartbeat_s

    async def create(self, record: RequestRecord) -> bool:
        return await self._ask(lambda book: book.create(record))

    async def advance(
        self,
        id: AttemptId,
        *events: RequestEvent,
        num_emitted: int = 0,
        failure_code: str = "",
        fingerprint: str = "",
    ) -> RequestState:
        return await self._ask(
            lambda book: book.advance(
                id, *events, num_emitted=num_emitted, failure_code=failure_code, fingerprint=fingerprint
            )
        )

    async def get(self, id: RequestId) -> RequestRecord | None:
        return await self._ask(lambda book: book.get(id))

    async def open_call(self, record: CallRecord) -> bool:
        return await self._ask(lambda book: book.open_call(record))

    async def end_call(self, id: RequestId, epoch: int, status: CallStatus) -> bool:
        return await self._ask(lambda book: book.end_call(id, epoch, status))

    async def get_call(self, id: RequestId) -> CallRecord | None:
        return await self._ask(lambda book: book.get_call(id))

    async def claim_call(self, id: RequestId, epoch: int, owner: OwnerId) -> CallRecord | None:
        return await self._ask(lambda book: book.claim_call(id, epoch, owner))

    async def hold(self, owner: OwnerId) -> None:
        await self._ask(lambda book: book.hold(owner))

    async def let_go(self, owner: OwnerId) -> None:
        await self._ask(lambda book: book.let_go(owner))

    async def orphans(self) -> list[CallRecord]:
        return await self._ask(lambda book: book.orphans())

    async def write_journal(self, entries: Sequence[JournalEntry]) -> list[Written]:
        return await self._ask(lambda book: book.write_journal(entries))

    async def read_journal(self, id: RequestId, start: int, wait_s: float) -> JournalPart:
        return await self._ask(lambda book: book.read_journal(id, start, wait_s))

    async def announce(self, record: WorkerRecord) -> bool:
        return await self._ask(lambda book: book.announce(record))

    async def withdraw(self, id: WorkerId, incarnation: Incarnation) -> None:
        await self._ask(lambda book: book.withdraw(id, incarnation))

    async def workers(self) -> list[WorkerRecord]:
        return await self._ask(lambda book: book.workers())

    async def changes(self) -> AsyncIterator[None]:
        while True:
            yield
            await asyncio.sleep(self._process.rng.uniform(0.2, 1.0) * self._heartbeat_s)

    async def ping(self) -> None:
        await self._ask(lambda book: book.ping())

    async def close(self) -> None:
        """The shared book stays open."""

    async def _ask(self, operation: Callable[[StateBook], Awaitable[Answer]]) -> Answer:
        await self._travel(self._process.name)
        answer = await operation(self._host.book)
        await self._travel(BOOK)
        return answer

    async def _travel(self, sender: str) -> None:
        """Lets the time pass that a message takes; raises `StateUnavailable` for one that is lost or too late."""
        now = asyncio.get_running_loop().time()
        at = self._link.arrival(sender, now)
        late = at is None or at - now > TIMEOUT_S
        await asyncio.sleep(TIMEOUT_S if at is None or late else at - now)
        if late:
            raise StateUnavailable("the book did not answer in time")
