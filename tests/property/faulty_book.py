"""Memory behind a bad line: what the writer's tests write into."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from baton.domain.ids import AttemptId, RequestId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.state.base import CallRecord, CallStatus, JournalEntry, RequestRecord, StateUnavailable, Written
from baton.state.memory import MemoryBook
from baton.state.options import BookOptions

OPTIONS = BookOptions()
T = TypeVar("T")


class Fault(enum.Enum):
    """What becomes of one call."""

    NONE = "none"
    NOT_HEARD = "not heard"
    ANSWER_LOST = "answer lost"
    RECORDS_LOST = "records lost"


class FaultyBook:
    """Memory behind a bad line: meets the scripted faults, one a call, and is well ever after.

    While its gate is shut, calls wait at it until `let_pass`; while it is open, they do not wait.
    """

    def __init__(self, faults: Sequence[Fault] = (), *, shut: bool = False) -> None:
        self.inner = MemoryBook(OPTIONS)
        self.faults = list(faults)
        self.num_calls = 0
        self.shut = shut
        self._arrived = asyncio.Event()
        self._left = asyncio.Event()
        self._passes = asyncio.Semaphore(0)

    async def next_call(self) -> None:
        """Waits until a call stands at the gate."""
        await self._arrived.wait()

    async def let_pass(self) -> None:
        """Lets the call pass that is at the gate, or the next one to get there; returns when it has been answered."""
        await self.next_call()
        self._arrived.clear()
        self._left.clear()
        self._passes.release()
        await self._left.wait()

    def open(self) -> None:
        self.shut = False
        self._passes.release()

    async def _meet(self, call: Callable[[MemoryBook], Awaitable[T]]) -> T:
        self.num_calls += 1
        if self.shut:
            self._arrived.set()
            await self._passes.acquire()
        try:
            return await self._answer(call, self.faults.pop(0) if self.faults else Fault.NONE)
        finally:
            self._left.set()

    async def _answer(self, call: Callable[[MemoryBook], Awaitable[T]], fault: Fault) -> T:
        if fault is Fault.NOT_HEARD:
            raise StateUnavailable("not heard")
        if fault is Fault.RECORDS_LOST:
            self.inner = MemoryBook(OPTIONS)
        answer = await call(self.inner)
        if fault is Fault.ANSWER_LOST:
            raise StateUnavailable("answer lost")
        return answer

    async def create(self, record: RequestRecord) -> bool:
        return await self._meet(lambda book: book.create(record))

    async def advance(self, id: AttemptId, *events: RequestEvent, **news: Any) -> RequestState:
        return await self._meet(lambda book: book.advance(id, *events, **news))

    async def get(self, id: RequestId) -> RequestRecord | None:
        return await self._meet(lambda book: book.get(id))

    async def ping(self) -> None:
        await self._meet(lambda book: book.ping())

    async def open_call(self, record: CallRecord) -> bool:
        return await self._meet(lambda book: book.open_call(record))

    async def end_call(self, id: RequestId, epoch: int, status: CallStatus) -> bool:
        return await self._meet(lambda book: book.end_call(id, epoch, status))

    async def get_call(self, id: RequestId) -> CallRecord | None:
        return await self._meet(lambda book: book.get_call(id))

    async def write_journal(self, entries: Sequence[JournalEntry]) -> list[Written]:
        return await self._meet(lambda book: book.write_journal(entries))
