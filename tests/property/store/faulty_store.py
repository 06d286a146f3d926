"""A memory store behind a faulty connection, for the tests of the writer."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from baton.domain.ids import AttemptId, Ballot, RequestId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from baton.store.store import (
    CallOwner,
    CallRecord,
    CallStatus,
    Durability,
    JournalEntry,
    SequenceRecord,
    StoreUnavailable,
    WriteOutcome,
)
from baton.store.write_chain import ChainedWrite, WriteResult

OPTIONS = StoreOptions()
T = TypeVar("T")


class Fault(enum.Enum):
    """Outcome of one operation."""

    NONE = "none"
    NOT_RECEIVED = "not received"
    ANSWER_LOST = "answer lost"
    RECORDS_LOST = "records lost"


class FaultyStore:
    """A memory store behind a faulty connection: applies the scripted faults, one an operation, then none.

    While its gate is shut, operations wait at it until `release_one`; while it is open, they do not wait.
    """

    def __init__(self, faults: Sequence[Fault] = (), *, shut: bool = False) -> None:
        self.inner = MemoryStore(OPTIONS)
        self.faults = list(faults)
        self.num_calls = 0
        self.shut = shut
        self._arrived = asyncio.Event()
        self._left = asyncio.Event()
        self._passes = asyncio.Semaphore(0)

    async def next_call(self) -> None:
        """Waits until an operation is at the gate."""
        await self._arrived.wait()

    async def release_one(self) -> None:
        """Lets the operation at the gate pass, or the next one; returns when it has been answered."""
        await self.next_call()
        self._arrived.clear()
        self._left.clear()
        self._passes.release()
        await self._left.wait()

    def open(self) -> None:
        self.shut = False
        self._passes.release()

    async def _call(self, call: Callable[[MemoryStore], Awaitable[T]]) -> T:
        self.num_calls += 1
        if self.shut:
            self._arrived.set()
            await self._passes.acquire()
        try:
            return await self._answer(call, self.faults.pop(0) if self.faults else Fault.NONE)
        finally:
            self._left.set()

    async def _answer(self, call: Callable[[MemoryStore], Awaitable[T]], fault: Fault) -> T:
        if fault is Fault.NOT_RECEIVED:
            raise StoreUnavailable("not received")
        if fault is Fault.RECORDS_LOST:
            self.inner = MemoryStore(OPTIONS)
        answer = await call(self.inner)
        if fault is Fault.ANSWER_LOST:
            raise StoreUnavailable("answer lost")
        return answer

    async def create(self, record: SequenceRecord) -> bool:
        return await self._call(lambda store: store.create(record))

    async def advance(self, id: AttemptId, *events: RequestEvent, **news: Any) -> RequestState:
        return await self._call(lambda store: store.advance(id, *events, **news))

    async def put_request(self, record: SequenceRecord) -> SequenceRecord:
        return await self._call(lambda store: store.put_request(record))

    async def get(self, id: RequestId) -> SequenceRecord | None:
        return await self._call(lambda store: store.get(id))

    async def ping(self) -> None:
        await self._call(lambda store: store.ping())

    async def durability(self) -> Durability:
        return await self._call(lambda store: store.durability())

    async def put_call(self, record: CallRecord) -> CallOwner:
        return await self._call(lambda store: store.put_call(record))

    async def end_call(
        self,
        id: RequestId,
        ballot: Ballot,
        status: CallStatus,
        trace: bytes = b"",
        ended_sequences: Sequence[RequestId] = (),
    ) -> bool:
        return await self._call(lambda store: store.end_call(id, ballot, status, trace, ended_sequences))

    async def get_call(self, id: RequestId) -> CallRecord | None:
        return await self._call(lambda store: store.get_call(id))

    async def write_chains(self, chains: Sequence[Sequence[ChainedWrite]]) -> list[list[WriteResult]]:
        return await self._call(lambda store: store.write_chains(chains))

    async def write_journal(self, entries: Sequence[JournalEntry]) -> list[WriteOutcome]:
        return await self._call(lambda store: store.write_journal(entries))
