"""Sends the rest of a response that a client lost: `GET /v1/requests/{id}/stream`, or a POST with a `Last-Event-ID`.

Any router can do it. The request is read from the store and parsed again, its text is rebuilt from the journal, and the
events before the cursor of the client are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.domain.errors import BatonError, Cancelled, Draining, InvalidRequest, Refused, Superseded
from baton.domain.ids import OwnerId, RequestId
from baton.services.router.edge.disconnect import cancel_on_disconnect
from baton.services.router.edge.http_errors import RequestNotFound
from baton.services.router.edge.sink import body_sink
from baton.services.router.generation import Dispatcher
from baton.services.router.openai.fields import short_repr
from baton.services.router.openai.request_parser import ParsedRequest, RequestParser
from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.respond import response_headers
from baton.services.router.streaming.cursor import Cursor
from baton.services.router.streaming.prompt_scoring import PromptScoring
from baton.services.router.streaming.sse_stream import SseStream, num_tail_events
from baton.services.router.streaming.token_stream import DISCONNECT_GRACE_S, TokenStream
from baton.services.router.streaming.unread_buffer import UnreadBudget
from baton.services.router.takeover.call_media import CallMedia
from baton.services.router.takeover.call_ownership import STORE_WAIT_S
from baton.services.router.takeover.journal_reader import JournalReader
from baton.services.router.takeover.prompt_digest import PromptReplaced
from baton.services.router.takeover.status import RequestStatus, request_status
from baton.services.router.takeover.stored_call import parse_stored
from baton.services.router.takeover.takeover import Takeovers
from baton.services.router.text.text_model import TextModel
from baton.store.store import CallRecord, CallStatus, Durability, StateStore, StoreUnavailable
from baton.telemetry.metrics import STREAMS_RESUMED_TOTAL
from baton.telemetry.request_trace import RequestTrace, decode_trace
from baton.telemetry.request_traces import RequestTraces

RETRY_AFTER_S = 1.0


class LookupUnavailable(Refused):
    """The state store is unavailable."""

    code = StoreUnavailable.code


@dataclass(frozen=True, slots=True)
class Resumer:
    """Finds calls in the store and follows them. `owner`: this router; `numbers`: of its runs for scores."""

    store: StateStore
    parser: RequestParser
    text: TextModel
    takeovers: Takeovers
    traces: RequestTraces
    ping_interval_s: float
    durability: Callable[[], Durability]
    unread: UnreadBudget
    may_return: Callable[[RequestId], Awaitable[bool]]
    dispatcher: Dispatcher
    owner: OwnerId
    media: CallMedia
    numbers: Iterator[int] = field(default_factory=itertools.count)

    async def find(self, id: RequestId, tenant: str) -> CallRecord:
        """The call. Raises `RequestNotFound`, also for a call of another tenant, or `LookupUnavailable`.

        A missing call that `may_return`, because the store has just lost data or this router runs it, is unavailable.
        """
        try:
            record = await self.store.get_call(id)
        except StoreUnavailable:
            raise _lookup_unavailable() from None
        if record is None and await self.may_return(id):
            raise _lookup_unavailable()
        if record is None or record.tenant != tenant:
            raise RequestNotFound(f"the request {short_repr(id)} does not exist here, or is forgotten", param="id")
        return record

    async def respond(self, id: RequestId, last_event_id: str, tenant: str, endpoint: str | None = None) -> Response:
        """The rest of the response to request `id`. `endpoint`: the path that it must have been posted to.

        `last_event_id` "": from the beginning. Raises as `find`, `InvalidRequest` for an invalid cursor, and
        `PromptReplaced`, or in the end `AnswerLost`: its text is read from its prompt on.
        """
        after = Cursor.parse(last_event_id) if last_event_id else None
        record = await self.find(id, tenant)
        if endpoint not in (None, record.endpoint):
            raise InvalidRequest(f"the request {short_repr(id)} was not posted to {endpoint}", param="last_event_id")
        try:
            parsed = await parse_stored(self.parser, record)
        except PromptReplaced as error:
            raise await self._error_for(record, error) from None
        kept = not record.private and await self._has_files(parsed.request)
        durability = self.durability() if kept else Durability.NONE
        after = _checked(after, parsed.request)
        if after.num_tail >= num_tail_events(parsed.request.stream_options):
            return Response(status_code=204, headers=response_headers(parsed.request, durability))
        if self.takeovers.draining and record.status is not CallStatus.ENDED:
            raise Draining("this router is shutting down", retry_after_s=RETRY_AFTER_S)
        return ResumedResponse(self, parsed, after, record, durability)

    async def _error_for(self, record: CallRecord, error: PromptReplaced) -> BatonError:
        try:
            return await self.takeovers.error_for(record, error)
        except StoreUnavailable:
            return error

    async def _has_files(self, request: ValidRequest) -> bool:
        """True if the store says in time that it has all images of the request, or there are none."""
        return not request.files or await self.media.holds(request, STORE_WAIT_S)

    async def status(self, id: RequestId, tenant: str) -> RequestStatus:
        """The status of the request. Raises as `find`."""
        record = await self.find(id, tenant)
        try:
            return await request_status(self.store, record, self.traces.find(id))
        except StoreUnavailable:
            raise _lookup_unavailable() from None

    async def stored_trace(self, id: str, tenant: str | None) -> RequestTrace | None:
        """The trace that the router of an ended call stored. None without one, and for a call of another tenant than
        `tenant`, if that is not None. Raises `LookupUnavailable`."""
        try:
            record = await self.store.get_call(RequestId(id))
        except StoreUnavailable:
            raise _lookup_unavailable() from None
        if record is None or not record.trace or tenant not in (None, record.tenant):
            return None
        return decode_trace(record.trace)

    def scoring(self, request: ValidRequest, seen: Sequence[int] = ()) -> PromptScoring | None:
        """Scores the prompts of a request that asks for it. `seen`: events of each choice that the client has."""
        if request.scores is None:
            return None
        name = f"{request.id}-scores-{self.owner.rpartition('/')[2]}-{next(self.numbers)}"
        return PromptScoring(request, self.dispatcher, self._fingerprint_of, name, seen)

    async def _fingerprint_of(self, id: RequestId) -> str:
        """Raises `LookupUnavailable`."""
        try:
            record = await self.store.get(id)
        except StoreUnavailable:
            raise _lookup_unavailable() from None
        return "" if record is None else record.fingerprint

    def follow(
        self, request: ValidRequest, seed: CallRecord | None, superseded: Superseded | None = None
    ) -> JournalReader:
        """The tokens of the request, from the first one on. `superseded`: how its run on this router ended."""
        return JournalReader(self.store, request, self.takeovers, seed, superseded)


class ResumedResponse(Response):
    """The events of a request after a cursor, live, always with ids."""

    def __init__(
        self, resumer: Resumer, parsed: ParsedRequest, after: Cursor, record: CallRecord, durability: Durability
    ) -> None:
        self._record = record
        self._resumer = resumer
        self._durability = durability
        self._parsed = parsed
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events. Raises no error after the first byte."""
        STREAMS_RESUMED_TOTAL.inc()
        request = self._parsed.request
        source = self._resumer.follow(request, self._record)
        scoring = self._resumer.scoring(request, self._after.counts)
        stream = TokenStream(self._resumer.text, request, source, unread=self._resumer.unread, scoring=scoring)
        sink = body_sink(scope, send)
        events = SseStream(send, self._parsed, stream, with_ids=True, after=self._after, sink=sink)
        try:
            running = events.run(self._call_headers, self._resumer.ping_interval_s)
            timeout_s = stream.timeout_s + DISCONNECT_GRACE_S
            await cancel_on_disconnect(scope, receive, running, timeout_s, stream.too_slow)
        except Exception as error:
            if not events.started:
                raise
            if not isinstance(error, Cancelled):
                await events.fail(scope, error)

    async def _call_headers(self) -> dict[str, str]:
        return response_headers(self._parsed.request, self._durability)


def _lookup_unavailable() -> LookupUnavailable:
    return LookupUnavailable("requests cannot be looked up now", retry_after_s=RETRY_AFTER_S)


def _checked(after: Cursor | None, request: ValidRequest) -> Cursor:
    """The cursor, if it belongs to this request. Raises `InvalidRequest`."""
    if after is None:
        return Cursor(request.id, (0,) * len(request.choices))
    if after.request_id != request.id or len(after.counts) != len(request.choices):
        raise InvalidRequest(
            f"{short_repr(str(after))} is not an event id of request {request.id}", param="last_event_id"
        )
    return after
