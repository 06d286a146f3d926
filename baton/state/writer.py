"""Writes the router's requests into the book behind its back: nothing in a token's path ever waits for Redis.

The router calls `create` and `advance`, which only note where a request has got to and return at once. One task brings
the book there, in the order in which requests changed. What is remembered of a request is its goal, not its history:
while the book is slow or away, intermediate steps melt into the latest one, so the backlog is bounded by the live
requests plus `max_finished`. When the book is back, each errand asks where its record stands and walks the table from
there; a record that was lost is entered again. Uses `RequestStore` and `ping` only; knows no Redis.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Self

import structlog

from baton.domain.errors import Broken
from baton.domain.ids import AttemptId, RequestId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.state import ledger
from baton.state.base import RequestRecord, StateBook, StateUnavailable
from baton.state.bell import rang_within
from baton.state.errand import Errand

_log = structlog.get_logger(__name__)


class BookWriter:
    """The router's pen. One event loop; `create` and `advance` never wait and never fail for the book's sake."""

    def __init__(
        self,
        book: StateBook,
        *,
        on_degraded: Callable[[bool], None] = lambda degraded: None,
        max_finished: int = 10_000,
        retry_s: float = 0.5,
        idle_ping_s: float = 1.0,
    ) -> None:
        """`on_degraded` hears True when the book stops answering or an ended request is lost to the backlog's bound,
        and False once everything is written again. `idle_ping_s`: with nothing to write, how often the book is asked
        whether it is there. The book stays the caller's to close."""
        self._book = book
        self._on_degraded = on_degraded
        self._max_finished = max_finished
        self._retry_s = retry_s
        self._idle_ping_s = idle_ping_s
        self._live: dict[RequestId, Errand] = {}
        self._unwritten: OrderedDict[RequestId, Errand] = OrderedDict()
        self._finished: OrderedDict[RequestId, None] = OrderedDict()  # the unwritten ones that have ended
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._hurry = asyncio.Event()
        self._settled.set()
        self._task: asyncio.Task[None] | None = None
        self._degraded = False
        self._num_lost = 0

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def degraded(self) -> bool:
        """Whether the book lags behind for want of an answer: new requests are then not durable."""
        return self._degraded

    @property
    def num_pending(self) -> int:
        """Requests whose last change is not in the book yet."""
        return len(self._unwritten)

    @property
    def num_lost(self) -> int:
        """Ended requests that were dropped because the backlog was full."""
        return self._num_lost

    def create(self, record: RequestRecord) -> None:
        """Notes a new request. Raises `Broken` unless it is in state RECEIVED and its id is not in use here."""
        ledger.check_new(record)
        if record.id in self._live or record.id in self._unwritten:
            raise Broken(f"request {record.id} is already being written")
        self._note(Errand(record))

    def advance(
        self, id: AttemptId, event: RequestEvent, *, num_emitted: int = 0, failure_code: str = ""
    ) -> RequestState:
        """Notes a step and returns the new state; the errors are those of `RequestStore.advance`."""
        errand = self._live.get(id.request_id)
        if errand is None:
            raise Broken(f"{event.value} of {id}: no such request here, or it has ended")
        errand.goal = ledger.moved(errand.goal, id.attempt, event, num_emitted=num_emitted, failure_code=failure_code)
        self._note(errand)
        return errand.goal.state

    def start(self) -> None:
        """Starts the task, inside a running loop; idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="state-writer")

    async def flush(self, timeout_s: float) -> int:
        """Waits until everything is written, for at most `timeout_s`; returns how many requests are not."""
        self._hurry.set()
        await rang_within(self._settled, timeout_s)
        return self.num_pending

    async def close(self, timeout_s: float = 2.0) -> int:
        """Flushes and stops; returns how many requests stay unwritten. Idempotent."""
        if self._task is not None:
            await self.flush(timeout_s)
            self._task.cancel()
            await asyncio.wait([self._task], timeout=timeout_s)
        return self.num_pending

    def _note(self, errand: Errand) -> None:
        """Puts an errand in line, unless it already waits there."""
        id, ended = errand.goal.id, errand.goal.state.terminal
        if ended:
            self._live.pop(id, None)
        else:
            self._live[id] = errand
        if errand.forsaken:
            return
        self._unwritten.setdefault(id, errand)
        self._settled.clear()
        self._wake.set()
        if ended:
            self._finished[id] = None
            if len(self._finished) > self._max_finished:
                self._lose_oldest()

    def _lose_oldest(self) -> None:
        del self._unwritten[next(iter(self._finished))]
        self._finished.popitem(last=False)
        self._num_lost += 1
        self._set_degraded(True, f"more than {self._max_finished} ended requests wait to be written")

    async def _run(self) -> None:
        """The task's root. An errand that fails in a way nobody foresaw must not silence the others."""
        while True:
            try:
                await (self._write_oldest() if self._unwritten else self._idle())
            except StateUnavailable as error:
                self._set_degraded(True, str(error))
                await self._pause()

    async def _write_oldest(self) -> None:
        """Runs the errand that has waited longest; it stays first in line until it is done."""
        id, errand = next(iter(self._unwritten.items()))
        try:
            await errand.run(self._book)
        except StateUnavailable:
            raise
        except Exception as error:  # the root of this errand: it ends here, forsaken
            errand.forsake(error)
        if errand.done and self._unwritten.get(id) is errand:
            del self._unwritten[id]
            self._finished.pop(id, None)
        if not self._unwritten:
            self._settled.set()
            self._set_degraded(False, "everything is written")

    async def _idle(self) -> None:
        """Waits for work; with none for a while, asks whether the book is there."""
        self._wake.clear()
        if not await rang_within(self._wake, self._idle_ping_s):
            await self._book.ping()
            if not self._unwritten:
                self._set_degraded(False, "the book answers")

    async def _pause(self) -> None:
        """Lets an absent book be for a while; a flush cuts it short once."""
        await rang_within(self._hurry, self._retry_s)
        self._hurry.clear()

    def _set_degraded(self, degraded: bool, reason: str) -> None:
        if degraded != self._degraded:
            self._degraded = degraded
            event = "state_degraded" if degraded else "state_restored"
            _log.warning(event, reason=reason, num_pending=self.num_pending)
            self._on_degraded(degraded)
