"""Gives a client the rest of an answer that it lost: the ASGI response to `GET /v1/requests/{id}/stream`, and to a POST
with a `Last-Event-ID`.

It makes no difference which router the client was connected to: the call is read from the book and parsed again, its
text is made again from the journal, and what the client has by its cursor is left out. `Resumption` finds the call,
`ResumedAnswer` sends it.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.domain.errors import Cancelled, Draining, InvalidRequest, Refused
from baton.domain.ids import RequestId
from baton.state.base import CallRecord, CallStatus, StateUnavailable
from baton.telemetry.metrics import STREAMS_RESUMED_TOTAL
from services.router.api.calls import ValidCall
from services.router.api.carry import Carrier, CarryStore
from services.router.api.connection import unless_hung_up
from services.router.api.cursor import Cursor, Position
from services.router.api.delivery import HEADER_GRACE_S, call_headers, echoed
from services.router.api.fields import shown
from services.router.api.follower import Follower
from services.router.api.http_errors import RequestNotFound
from services.router.api.reader import CallReader, Reading, posting_of
from services.router.api.relay import DEADLINE_GRACE_S, latest_end_s
from services.router.api.status import RequestStatus, request_status
from services.router.api.stream import EventStream, num_tail_events
from services.router.text.model import TextModel

RETRY_AFTER_S = 1.0


class BookAway(Refused):
    """The reception book cannot be asked now."""

    code = StateUnavailable.code


@dataclass(frozen=True, slots=True)
class Resumption:
    """Finds calls in the book, and follows them."""

    store: CarryStore
    reader: CallReader
    text: TextModel
    carrier: Carrier
    ping_interval_s: float

    async def find(self, id: RequestId, tenant: str) -> CallRecord:
        """The call. Raises `RequestNotFound`, for another tenant's as for an unknown one, or `BookAway`."""
        try:
            record = await self.store.get_call(id)
        except StateUnavailable:
            raise _book_away() from None
        if record is None or record.tenant != tenant:
            raise RequestNotFound(f"the request {shown(id)} does not exist here, or is forgotten", param="id")
        return record

    async def answer(self, id: RequestId, last_event_id: str, tenant: str, endpoint: str | None = None) -> Response:
        """The rest of the answer to call `id` (`endpoint`: which must have been posted there).

        `last_event_id` "" means from the beginning. Raises as `find`, and `InvalidRequest` for a cursor that is none.
        """
        after = Cursor.parse(last_event_id) if last_event_id else None
        record = await self.find(id, tenant)
        if endpoint not in (None, record.endpoint):
            raise InvalidRequest(f"the request {shown(id)} was not posted to {endpoint}", param="last_event_id")
        reading = await self.reader.read(posting_of(record))
        after = _checked(after, reading.call)
        if after.num_tail >= num_tail_events(reading.call.streaming):
            return Response(status_code=204, headers=call_headers(id, durable=True))
        if self.carrier.draining and record.status is not CallStatus.ENDED:
            raise Draining("this router is shutting down", retry_after_s=RETRY_AFTER_S)
        return ResumedAnswer(self, reading, after)

    async def status(self, id: RequestId, tenant: str) -> RequestStatus:
        """What the book knows of the call. Raises as `find`."""
        record = await self.find(id, tenant)
        try:
            return await request_status(self.store, record)
        except StateUnavailable:
            raise _book_away() from None

    def follow(self, call: ValidCall) -> Follower:
        """The call's events, from the first one on."""
        return Follower(self.store, self.text, call, self.carrier)


class ResumedAnswer(Response):
    """The events of a call after a cursor, live, always with ids."""

    def __init__(self, resumption: Resumption, reading: Reading, after: Cursor) -> None:
        self._resumption = resumption
        self._reading = reading
        self._after = after
        self._call_headers = call_headers(reading.call.id, durable=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The root of a resumed answer: once it has begun, no error leaves here."""
        STREAMS_RESUMED_TOTAL.inc()
        call = self._reading.call
        stream = EventStream(send, call, self._reading.shape, with_ids=True, after=self._after)
        try:
            await unless_hung_up(receive, self._stream(stream), latest_end_s(call) + DEADLINE_GRACE_S)
        except Exception as error:
            if not stream.started:
                raise
            if not isinstance(error, Cancelled):
                await stream.fail(error)

    async def _stream(self, stream: EventStream) -> None:
        if self._reading.call.jobs:
            await self._follow(stream)
        else:
            await stream.start(self._call_headers)
            for event in echoed(self._reading.call):
                await stream.event(event)
        await stream.finish()

    async def _follow(self, stream: EventStream) -> None:
        silence_s = min(HEADER_GRACE_S, self._resumption.ping_interval_s)
        async with self._resumption.follow(self._reading.call) as source:
            while not source.finished:
                event = await source.next(silence_s)
                await stream.start(self._call_headers)
                if event is None:
                    await stream.ping()
                else:
                    await stream.event(event)
                silence_s = self._resumption.ping_interval_s


def _book_away() -> BookAway:
    return BookAway("requests cannot be looked up now", retry_after_s=RETRY_AFTER_S)


def _checked(after: Cursor | None, call: ValidCall) -> Cursor:
    """The cursor, if it is one of this call's. Raises `InvalidRequest`."""
    if after is None:
        return Position.start(call.id, len(call.choices)).cursor()
    if after.call != call.id or len(after.counts) != len(call.choices):
        raise InvalidRequest(f"{shown(str(after))} is no event id of request {call.id}", param="last_event_id")
    return after
