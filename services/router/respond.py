"""Sends one request's answer: whole, or as server-sent events. The ASGI response that `routes` returns.

Life of a streamed answer: the request is noted for the store, admitted are taken (a refusal is still a real status) ->
choices run -> headers go out with the first token, or after `HEADER_GRACE_S` without one -> an event a token, a ping in
silence -> usage -> [DONE]. A failure before the headers is raised and becomes a status in `routes`; after them it
becomes an error event and the end. A hang-up at any point cancels everything. If another router has taken the request
over meanwhile, the rest of the answer is followed in its journal: the client sees a pause.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.domain.errors import Cancelled, Superseded
from baton.domain.ids import RequestId
from baton.domain.request import FinishReason, OutputToken
from services.router.edge import sse
from services.router.edge.disconnect import cancel_on_disconnect
from services.router.generation import Dispatcher
from services.router.openai.request_parser import ParsedRequest, RawRequest
from services.router.openai.response_builder import FinishedChoice
from services.router.openai.usage import UsageMeter
from services.router.openai.valid_request import ValidRequest
from services.router.streaming.cursor import StreamPosition
from services.router.streaming.generation_stream import DEADLINE_GRACE_S, GenerationStream, admit_all, max_duration_s
from services.router.streaming.merged_stream import TokenEventSource
from services.router.streaming.request_timing import RequestTiming, TimingSink
from services.router.streaming.sse_stream import SseStream
from services.router.takeover.call_ownership import CallOwnership
from services.router.takeover.supersede_listener import SupersedeListener
from services.router.text.choice_text import TokenEvent
from services.router.text.text_model import TextModel

HEADER_GRACE_S = 1.0
"""How long headers wait for a first token: what fails that early gets its own status, upon which clients try again."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """What every answer is made with. `follow` gives the events of a request that somebody else answers now."""

    dispatcher: Dispatcher
    text: TextModel
    timing_sink: TimingSink
    call_ownership: CallOwnership
    supersede_listener: SupersedeListener
    follow: Callable[[ValidRequest], TokenEventSource]
    ping_interval_s: float
    always_ids: bool


@dataclass(slots=True)
class _ChoiceBuffer:
    """A choice of a whole answer, while it grows."""

    pieces: list[str] = field(default_factory=list)
    tokens: list[OutputToken] = field(default_factory=list)
    finish: FinishReason | None = None

    def add(self, event: TokenEvent) -> None:
        self.pieces.append(event.text)
        if event.token is not None:
            self.tokens.append(event.token)
        self.finish = event.finish

    def finished(self, index: int) -> FinishedChoice:
        return FinishedChoice(index, "".join(self.pieces), tuple(self.tokens), self.finish or FinishReason.STOP)


class GenerationResponse(Response):
    """One request's answer. Raises what fails before the first byte."""

    def __init__(self, context: ResponseContext, parsed: ParsedRequest, raw: RawRequest, arrived_s: float) -> None:
        """Takes the admitted, so that a refusal is raised here."""
        self._context = context
        self._request = parsed.request
        self._response_builder = parsed.response_builder
        self._position = StreamPosition.start(self._request.id, len(self._request.choices))
        self._timing = RequestTiming(
            context.timing_sink, [sequence.id for sequence in self._request.sequences], arrived_s
        )
        self._ownership = context.call_ownership.open(self._request, raw)
        try:
            self._admitted = admit_all(context.dispatcher, self._request)
        except BaseException as error:
            self._end(error)
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, unless the client hangs up first."""
        try:
            if self._request.stream_options is None:
                response = await cancel_on_disconnect(receive, self._full_response(), self._timeout_s)
                await response(scope, receive, send)
            else:
                await self._stream_guarded(receive, self._event_stream(scope, send))
        except BaseException as error:
            self._end(error)
            raise

    def _event_stream(self, scope: Scope, send: Send) -> SseStream:
        with_ids = self._context.always_ids or sse.accepts_event_ids(_headers(scope))
        return SseStream(send, self._request, self._response_builder, with_ids=with_ids)

    async def _stream_guarded(self, receive: Receive, stream: SseStream) -> None:
        """The root of a streamed answer: once it has begun, no error leaves here."""
        try:
            await cancel_on_disconnect(receive, self._stream(stream), self._timeout_s)
        except Exception as error:
            if not stream.started:
                raise
            self._end(error)
            if not isinstance(error, Cancelled):
                await stream.fail(error)

    async def _full_response(self) -> Response:
        buffers, meter = [_ChoiceBuffer() for _ in self._request.choices], UsageMeter(self._request)
        async with aclosing(self._events(self._context.ping_interval_s)) as events:
            async for event in events:
                if event is not None:
                    meter.count(event)
                    self._timing.on_event_sent(event)
                    buffers[event.choice].add(event)
        body = self._response_builder.response([buffer.finished(i) for i, buffer in enumerate(buffers)], meter.usage())
        headers = await self._response_headers()
        return Response(msgspec.json.encode(body), headers=headers, media_type="application/json")

    async def _stream(self, stream: SseStream) -> None:
        async with aclosing(self._events(min(HEADER_GRACE_S, self._context.ping_interval_s))) as events:
            async for event in events:
                if not stream.started:
                    await stream.start(await self._response_headers())
                if event is None:
                    await stream.ping()
                    continue
                await stream.event(event)
                self._timing.on_event_sent(event)
        await stream.finish()

    async def _events(self, first_timeout_s: float) -> AsyncGenerator[TokenEvent | None, None]:
        """Every choice's events; None for a silence. A request without sequences (an echo alone) ends at once."""
        if not self._request.sequences:
            for echo in echo_events(self._request):
                yield echo
            self._end(None)
            return
        try:
            async with aclosing(self._generate(first_timeout_s)) as events:
                async for event in events:
                    yield event
            self._end(None)
        except Superseded as error:
            self._ownership.end(error)
            log.warning("call_superseded", request_id=self._request.id, reason=str(error))
            async with aclosing(self._read_journal()) as events:
                async for event in events:
                    yield event

    async def _generate(self, first_timeout_s: float) -> AsyncGenerator[TokenEvent | None, None]:
        """What is computed here."""
        timeout_s = first_timeout_s
        generation = GenerationStream(self._context.dispatcher, self._context.text, self._request, self._admitted)
        with self._context.supersede_listener.listening(self._request.sequences, generation.abort):
            async with generation:
                while not generation.finished:
                    event = await generation.next(timeout_s)
                    if event is not None:
                        self._position.advance(event.choice)
                    yield event
                    timeout_s = self._context.ping_interval_s

    async def _read_journal(self) -> AsyncGenerator[TokenEvent | None, None]:
        """What another router computes, from where this answer has got to."""
        journal_position = StreamPosition.start(self._request.id, len(self._request.choices))
        async with self._context.follow(self._request) as source:
            while not source.finished:
                event = await source.next(self._context.ping_interval_s)
                if event is None or journal_position.advance(event.choice) > self._position.counts[event.choice]:
                    yield event

    async def _response_headers(self) -> dict[str, str]:
        return response_headers(self._request.id, durable=await self._ownership.durable())

    def _end(self, error: BaseException | None) -> None:
        """Tells timing_sink and store how the request ended; no effect after the first time."""
        if error is not None:
            self._timing.on_error(error)
        self._ownership.end(error)

    @property
    def _timeout_s(self) -> float:
        return max_duration_s(self._request) + DEADLINE_GRACE_S


def echo_events(request: ValidRequest) -> list[TokenEvent]:
    """The events of a request that asks no worker."""
    return [TokenEvent(choice, None, "", 0, FinishReason.LENGTH) for choice in request.choices]


def response_headers(id: RequestId, *, durable: bool) -> dict[str, str]:
    """What every answer says of its request: the id to ask for it again, and whether another router could carry it
    on."""
    return {"x-baton-request-id": id, "x-baton-durable": "true" if durable else "false"}


def _headers(scope: Scope) -> Mapping[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
