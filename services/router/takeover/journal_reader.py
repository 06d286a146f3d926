"""Follows a request that somebody else answers, or has answered: its tokens come from the journal, from the first on.

`resume` follows for a client that came back, `respond` when another router has taken its request over. With nothing new
in a journal for a while the follower looks at the request itself: one that was abandoned is claimed, and carried on
here. (One whose router died is claimed by the next router that looks for orphans.) Outages of the store are waited out;
the request's deadline bounds all of it. Knows neither workers nor HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Protocol

import structlog

from baton.domain.errors import WorkerLost, from_code
from baton.domain.ids import RequestId
from baton.store.notifier import wait_for_event
from baton.store.store import CallRecord, CallStatus, CallStore, JournalPart, StoreUnavailable
from services.router.generation import TokenChunk
from services.router.openai.valid_request import ValidRequest
from services.router.streaming.generation_stream import choice_text, max_duration_s
from services.router.streaming.merged_stream import MergedStream
from services.router.text.choice_text import TokenEvent
from services.router.text.text_model import TextModel

JOURNAL_WAIT_S = 0.5
"""How long a journal is waited for before the request is looked at."""

RETRY_S = 0.25
"""How long a store that is away is let be."""

MAX_FINAL_READS = 4
"""How often a journal without an end is read again once its request has ended: the sink may lag behind."""

log = structlog.get_logger(__name__)


class Successor(Protocol):
    """Who carries calls on here: `takeover.Takeovers`."""

    async def claim_if_unattended(self, record: CallRecord) -> None: ...

    def add_reader(self, id: RequestId) -> None: ...

    def remove_reader(self, id: RequestId, *, finished: bool) -> None: ...


class JournalReader:
    """An `TokenEventSource` over the journals of `request`'s sequences."""

    def __init__(self, store: CallStore, text: TextModel, request: ValidRequest, successor: Successor) -> None:
        self._store = store
        self._text = text
        self._request = request
        self._successor = successor
        self._closed = asyncio.Event()
        deadline = asyncio.get_running_loop().time() + max_duration_s(request)
        self._stream = MergedStream(
            {choice: self._choice_events(choice) for choice in range(len(request.sequences))}, deadline
        )

    @property
    def finished(self) -> bool:
        """See `TokenEventSource`."""
        return self._stream.finished

    async def __aenter__(self) -> JournalReader:
        self._successor.add_reader(self._request.id)
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        try:
            await self._stream.__aexit__(kind, error, trace)
        finally:
            self._successor.remove_reader(self._request.id, finished=self.finished)

    async def next(self, timeout_s: float) -> TokenEvent | None:
        """See `TokenEventSource`. Raises the error that the journal ends with, or `DeadlineExceeded`."""
        return await self._stream.next(timeout_s)

    async def _choice_events(self, choice: int) -> AsyncGenerator[TokenEvent, None]:
        """One choice's events; the text ends where it ended before, whatever else its journal holds."""
        state, num_read = choice_text(self._text, self._request, choice), 0
        num_final_reads = int(await self._is_over())
        while num_final_reads <= MAX_FINAL_READS:
            part = await self._read(choice, num_read)
            num_read += len(part.tokens)
            for event in state.events(TokenChunk(part.tokens, part.num_cached_tokens, part.finish)):
                yield event
            if part.failure_code:
                raise from_code(part.failure_code, "the request failed where it was answered")
            if not part.tokens:
                num_final_reads += await self._is_over()
        raise WorkerLost("the answer was lost before it was complete")

    async def _read(self, choice: int, start: int) -> JournalPart:
        while True:
            try:
                return await self._store.read_journal(self._request.sequences[choice].id, start, JOURNAL_WAIT_S)
            except StoreUnavailable as error:
                await self._wait_for_store(error)

    async def _is_over(self) -> bool:
        """Whether nobody will write the journal any further. A request that nobody answers is claimed."""
        try:
            record = await self._store.get_call(self._request.id)
            if record is not None:
                await self._successor.claim_if_unattended(record)
            return record is None or record.status is CallStatus.ENDED
        except StoreUnavailable as error:
            await self._wait_for_store(error)
            return False

    async def _wait_for_store(self, error: StoreUnavailable) -> None:
        log.info("journal_reader_waits_for_store", request_id=self._request.id, reason=str(error))
        await wait_for_event(self._closed, RETRY_S)
