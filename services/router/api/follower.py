"""Follows a call that somebody else answers, or has answered: its tokens come from the journal, from the first on.

`resume` follows for a client that came back, `delivery` when another router has taken its call over. With nothing new
in a journal for a while the follower looks at the call itself: one that was abandoned is claimed, and carried on here.
(One whose router died is claimed by the next router that looks for orphans.) Outages of the book are waited out; the
call's deadline bounds all of it. Knows neither workers nor HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Protocol

import structlog

from baton.domain.errors import WorkerLost, from_code
from baton.domain.ids import RequestId
from baton.state.base import CallRecord, CallStatus, CallStore, JournalPart, StateUnavailable
from baton.state.bell import rang_within
from services.router.api.calls import ValidCall
from services.router.api.mixer import Mixer
from services.router.api.relay import choice_text, latest_end_s
from services.router.generation import GenerationChunk
from services.router.text.choice_text import TokenEvent
from services.router.text.model import TextModel

NEWS_WAIT_S = 0.5
"""How long a journal is waited for before the call is looked at."""

RETRY_S = 0.25
"""How long a book that is away is let be."""

MAX_LAST_READS = 4
"""How often a journal without an end is read again once its call has ended: the pen may lag behind."""

log = structlog.get_logger(__name__)


class Heir(Protocol):
    """Who carries calls on here: `carry.Carrier`."""

    async def look(self, record: CallRecord) -> None: ...

    def attend(self, id: RequestId) -> None: ...

    def leave(self, id: RequestId, *, satisfied: bool) -> None: ...


class Follower:
    """An `EventSource` over the journals of `call`'s jobs."""

    def __init__(self, store: CallStore, text: TextModel, call: ValidCall, heir: Heir) -> None:
        self._store = store
        self._text = text
        self._call = call
        self._heir = heir
        self._left = asyncio.Event()
        deadline = asyncio.get_running_loop().time() + latest_end_s(call)
        self._mixer = Mixer({choice: self._follow(choice) for choice in range(len(call.jobs))}, deadline)

    @property
    def finished(self) -> bool:
        """See `EventSource`."""
        return self._mixer.finished

    async def __aenter__(self) -> Follower:
        self._heir.attend(self._call.id)
        await self._mixer.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        try:
            await self._mixer.__aexit__(kind, error, trace)
        finally:
            self._heir.leave(self._call.id, satisfied=self.finished)

    async def next(self, silence_s: float) -> TokenEvent | None:
        """See `EventSource`. Raises the error that the journal ends with, or `DeadlineExceeded`."""
        return await self._mixer.next(silence_s)

    async def _follow(self, choice: int) -> AsyncGenerator[TokenEvent, None]:
        """One choice's events; the text ends where it ended before, whatever else its journal holds."""
        state, num_read = choice_text(self._text, self._call, choice), 0
        num_last_reads = int(await self._is_over())
        while num_last_reads <= MAX_LAST_READS:
            part = await self._read(choice, num_read)
            num_read += len(part.tokens)
            for event in state.events(GenerationChunk(part.tokens, part.num_cached_tokens, part.finish)):
                yield event
            if part.failure_code:
                raise from_code(part.failure_code, "the request failed where it was answered")
            if not part.tokens:
                num_last_reads += await self._is_over()
        raise WorkerLost("the answer was lost before it was complete")

    async def _read(self, choice: int, start: int) -> JournalPart:
        while True:
            try:
                return await self._store.read_journal(self._call.jobs[choice].id, start, NEWS_WAIT_S)
            except StateUnavailable as error:
                await self._let_be(error)

    async def _is_over(self) -> bool:
        """Whether nobody will write the journal any further. A call that nobody answers is claimed."""
        try:
            record = await self._store.get_call(self._call.id)
            if record is not None:
                await self._heir.look(record)
            return record is None or record.status is CallStatus.ENDED
        except StateUnavailable as error:
            await self._let_be(error)
            return False

    async def _let_be(self, error: StateUnavailable) -> None:
        log.info("follower_waits_for_the_book", request_id=self._call.id, reason=str(error))
        await rang_within(self._left, RETRY_S)
