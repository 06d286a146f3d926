"""Reads the tokens of a request from the journal, while another router runs it or after it has ended.

Used by `resume`, for a client that came back, and by `respond` after a takeover by another router. After
`JOURNAL_WAIT_S` without new tokens the reader checks the call: one that is abandoned, or that the store has lost, is
claimed and taken over here (`Takeovers.attend`). A call whose router died is claimed by the next router that looks for
orphans. Store outages are waited out; the deadline
of the request bounds every wait. Knows neither workers nor HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import structlog

from baton.domain.errors import AnswerLost, Superseded, WorkerLost, from_code
from baton.domain.ids import RequestId
from baton.services.router.generation import TakeChunk, TokenChunk
from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.takeover.journal_position import JournalPosition
from baton.services.router.takeover.takeover import Takeovers
from baton.store.notifier import wait_for_event
from baton.store.store import CallRecord, JournalPart, StateStore, StoreUnavailable

JOURNAL_WAIT_S = 0.5
"""Longest wait for new tokens before the call is checked."""

RETRY_S = 0.25
"""Pause before a store that is unavailable is read again."""

MAX_FINAL_READS = 4
"""Reads of a journal without an end after its call has ended: the last writes may lag behind."""

log = structlog.get_logger(__name__)


class JournalReader:
    """A `ChunkSource`. Counts as a reader of the call from its creation until `close`."""

    holds_workers = False

    def __init__(
        self,
        store: StateStore,
        request: ValidRequest,
        takeovers: Takeovers,
        seed: CallRecord | None,
        superseded: Superseded | None = None,
    ) -> None:
        """`seed`: a copy of the call. `superseded`: how its run on this router ended."""
        self.choices = range(len(request.sequences))
        self._store = store
        self._request = request
        self._takeovers = takeovers
        self._closed = asyncio.Event()
        takeovers.add_reader(request.id, seed, superseded)

    async def open(self, choice: int, take: TakeChunk | None = None) -> AsyncGenerator[TokenChunk, None]:
        """The journal of one choice; all of it is yielded. Raises the error that it ends with.

        Raises `ModelReplaced` when the store has another journal of it by now, with other tokens than those given.
        """
        return self._chunks(self._request.sequences[choice].id)

    def on_first_chunk(self, choice: int) -> None:
        """No effect: choices do not wait for each other here."""

    def complete(self, choice: int) -> None:
        """No effect: the router that runs the request finds the end by itself."""

    def close(self, *, finished: bool) -> None:
        """Ends the waits. The last reader of an unfinished call aborts its takeover."""
        self._closed.set()
        self._takeovers.remove_reader(self._request.id, finished=finished)

    async def _chunks(self, id: RequestId) -> AsyncGenerator[TokenChunk, None]:
        position, num_final_reads = JournalPosition(), int(await self._is_over())
        while num_final_reads <= MAX_FINAL_READS:
            part = await self._read(id, position.num_read, JOURNAL_WAIT_S)
            if not position.continues(part):
                part = position.rest_of(await self._read(id, 0, 0.0))
            position.advance(part)
            yield TokenChunk(part.tokens, part.num_cached_tokens, part.finish)
            if part.failure_code:
                raise from_code(part.failure_code, "the request failed on the router that ran it")
            if not part.tokens:
                num_final_reads += await self._is_over()
        position.rest_of(await self._read(id, 0, 0.0))
        if await self._is_given_up(id):
            raise AnswerLost(f"no router was left that could continue request {id}: send the request again")
        raise WorkerLost("the response was lost before it was complete")

    async def _is_given_up(self, id: RequestId) -> bool:
        """True if a router that could not continue the call has ended it. Its journal is of the routers before."""
        try:
            record = await self._store.get(id)
        except StoreUnavailable:
            return False
        return record is not None and record.failure_code == AnswerLost.code

    async def _read(self, id: RequestId, start: int, wait_s: float) -> JournalPart:
        while True:
            try:
                return await self._store.read_journal(id, start, wait_s)
            except StoreUnavailable as error:
                await self._wait_for_store(error)

    async def _is_over(self) -> bool:
        """True if the journal cannot grow any more. Claims a call that no router runs. Raises `AnswerLost`."""
        try:
            return await self._takeovers.attend(self._request.id, await self._store.get_call(self._request.id))
        except StoreUnavailable as error:
            await self._wait_for_store(error)
            return False

    async def _wait_for_store(self, error: StoreUnavailable) -> None:
        self._takeovers.on_outage(self._request.id)
        log.info("journal_reader_waits_for_store", request_id=self._request.id, reason=str(error))
        await wait_for_event(self._closed, RETRY_S)
