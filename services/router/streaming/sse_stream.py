"""One streamed answer on its way to a client: events with their ids, pings, the tail, or an error.

`respond` and `resume` drive it with all events of the answer, from the first one on; what the client has already by
its cursor is counted and not sent. It knows the wire and the response builder, and not where events come from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
import structlog
from msgspec import UNSET, UnsetType
from starlette.types import Send

from services.router.edge import sse
from services.router.edge.disconnect import CLOSE_TIMEOUT_S
from services.router.edge.http_errors import error_response, is_internal_error
from services.router.openai.response_builder import ResponseBuilder
from services.router.openai.schemas import Usage
from services.router.openai.usage import UsageMeter
from services.router.openai.valid_request import StreamOptions, ValidRequest
from services.router.streaming.cursor import Cursor, StreamPosition
from services.router.text.choice_text import TokenEvent

log = structlog.get_logger(__name__)


class SseStream:
    """The SSE answer to `request`, from the event after `after` on."""

    def __init__(
        self,
        send: Send,
        request: ValidRequest,
        response_builder: ResponseBuilder,
        *,
        with_ids: bool,
        after: Cursor | None = None,
    ) -> None:
        self._send = send
        self._request = request
        self._response_builder = response_builder
        self._stream_options = request.stream_options or StreamOptions()
        self._with_ids = with_ids
        self._after = after or StreamPosition.start(request.id, len(request.choices)).cursor()
        self._position = StreamPosition.start(request.id, len(request.choices))
        self._meter = UsageMeter(request)
        self._started = False

    @property
    def started(self) -> bool:
        """Whether the status has gone out: what fails from now on becomes an event."""
        return self._started

    async def start(self, headers: Mapping[str, str]) -> None:
        """Sends the status and these headers, besides those that SSE needs; idempotent."""
        if not self._started:
            self._started = True
            pairs = [(name.encode(), value.encode()) for name, value in {**sse.HEADERS, **headers}.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": pairs})

    async def ping(self) -> None:
        """Keeps the connection alive in silence."""
        await self._send_body(sse.PING)

    async def event(self, event: TokenEvent) -> None:
        """One event of a choice: sent, unless the client has it."""
        self._meter.count(event)
        chunk = self._response_builder.chunk(event, self._usage_with_event())
        if self._position.advance(event.choice) > self._after.counts[event.choice]:
            await self._event(msgspec.json.encode(chunk))

    async def finish(self) -> None:
        """The events after all choices, and the end."""
        if self._stream_options.include_usage:
            await self._tail(msgspec.json.encode(self._response_builder.usage_chunk(self._meter.usage())))
        await self._tail(sse.DONE)
        await self._send_body(b"", more=False)

    async def fail(self, error: Exception) -> None:
        """The error event and the end; a client that does not read does not hold us up.

        The event has no id: a client that resumes does so from the last event of the answer.
        """
        if is_internal_error(error):
            log.error("response_failed", request_id=self._request.id, exc_info=error)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._send_body(sse.event(error_response(error).json(), None), more=False)
        except TimeoutError:
            log.warning("client_too_slow", request_id=self._request.id)

    async def _tail(self, data: bytes) -> None:
        if self._position.advance_tail() > self._after.num_tail:
            await self._event(data)

    async def _event(self, data: bytes) -> None:
        await self._send_body(sse.event(data, str(self._cursor()) if self._with_ids else None))

    def _cursor(self) -> Cursor:
        """What the client has, this event included: also of choices that are here still behind what it had before."""
        here = self._position.cursor()
        counts = tuple(max(passed, had) for passed, had in zip(here.counts, self._after.counts, strict=True))
        return Cursor(here.request_id, counts, here.num_tail)

    async def _send_body(self, part: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": part, "more_body": more})

    def _usage_with_event(self) -> Usage | UnsetType | None:
        if self._stream_options.continuous_usage:
            return self._meter.usage()
        return None if self._stream_options.include_usage else UNSET


def num_tail_events(stream_options: StreamOptions | None) -> int:
    """How many events come after all choices."""
    return 2 if stream_options is not None and stream_options.include_usage else 1
