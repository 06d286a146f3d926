"""Sends one call's answer: whole, or as server-sent events. The ASGI response that `routes` returns.

Life of a streamed answer: the call is noted for the book, tickets are taken (a refusal is still a real status) ->
choices run -> headers go out with the first token, or after `HEADER_GRACE_S` without one -> an event a token, a ping in
silence -> usage -> [DONE]. A failure before the headers is raised and becomes a status in `routes`; after them it
becomes an error event and the end. A hang-up at any point cancels everything. If another router has taken the call
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
from services.router.api import sse
from services.router.api.calls import ValidCall
from services.router.api.connection import unless_hung_up
from services.router.api.cursor import Position
from services.router.api.custody import Custody, Posting
from services.router.api.fence import Fence
from services.router.api.mixer import EventSource
from services.router.api.observer import CallReport, Observer
from services.router.api.reader import Reading
from services.router.api.relay import DEADLINE_GRACE_S, Relay, admit_all, latest_end_s
from services.router.api.shape import WholeChoice
from services.router.api.stream import EventStream
from services.router.api.usage import UsageMeter
from services.router.generation import Dispatcher
from services.router.text.choice_text import TokenEvent
from services.router.text.model import TextModel

HEADER_GRACE_S = 1.0
"""How long headers wait for a first token: what fails that early gets its own status, upon which clients try again."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """What every answer is made with. `follow` gives the events of a call that somebody else answers now."""

    dispatcher: Dispatcher
    text: TextModel
    observer: Observer
    custody: Custody
    fence: Fence
    follow: Callable[[ValidCall], EventSource]
    ping_interval_s: float
    always_ids: bool


@dataclass(slots=True)
class _Draft:
    """A choice of a whole answer, while it grows."""

    pieces: list[str] = field(default_factory=list)
    tokens: list[OutputToken] = field(default_factory=list)
    finish: FinishReason | None = None

    def add(self, event: TokenEvent) -> None:
        self.pieces.append(event.text)
        if event.token is not None:
            self.tokens.append(event.token)
        self.finish = event.finish

    def whole(self, index: int) -> WholeChoice:
        return WholeChoice(index, "".join(self.pieces), tuple(self.tokens), self.finish or FinishReason.STOP)


class Answer(Response):
    """One call's answer. Raises what fails before the first byte."""

    def __init__(self, context: AnswerContext, reading: Reading, posting: Posting, arrived_s: float) -> None:
        """Takes the tickets, so that a refusal is raised here."""
        self._context = context
        self._call = reading.call
        self._shape = reading.shape
        self._passed = Position.start(self._call.id, len(self._call.choices))
        self._report = CallReport(context.observer, [job.id for job in self._call.jobs], arrived_s)
        self._charge = context.custody.open(self._call, posting)
        try:
            self._tickets = admit_all(context.dispatcher, self._call)
        except BaseException as error:
            self._over(error)
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, unless the client hangs up first."""
        try:
            if self._call.streaming is None:
                response = await unless_hung_up(receive, self._whole(), self._timeout_s)
                await response(scope, receive, send)
            else:
                await self._stream_guarded(receive, self._event_stream(scope, send))
        except BaseException as error:
            self._over(error)
            raise

    def _event_stream(self, scope: Scope, send: Send) -> EventStream:
        with_ids = self._context.always_ids or sse.wants_ids(_headers(scope))
        return EventStream(send, self._call, self._shape, with_ids=with_ids)

    async def _stream_guarded(self, receive: Receive, stream: EventStream) -> None:
        """The root of a streamed answer: once it has begun, no error leaves here."""
        try:
            await unless_hung_up(receive, self._stream(stream), self._timeout_s)
        except Exception as error:
            if not stream.started:
                raise
            self._over(error)
            if not isinstance(error, Cancelled):
                await stream.fail(error)

    async def _whole(self) -> Response:
        drafts, meter = [_Draft() for _ in self._call.choices], UsageMeter(self._call)
        async with aclosing(self._events(self._context.ping_interval_s)) as events:
            async for event in events:
                if event is not None:
                    meter.count(event)
                    self._report.sent(event)
                    drafts[event.choice].add(event)
        whole = self._shape.whole([draft.whole(i) for i, draft in enumerate(drafts)], meter.usage())
        headers = await self._call_headers()
        return Response(msgspec.json.encode(whole), headers=headers, media_type="application/json")

    async def _stream(self, stream: EventStream) -> None:
        async with aclosing(self._events(min(HEADER_GRACE_S, self._context.ping_interval_s))) as events:
            async for event in events:
                if not stream.started:
                    await stream.start(await self._call_headers())
                if event is None:
                    await stream.ping()
                    continue
                await stream.event(event)
                self._report.sent(event)
        await stream.finish()

    async def _events(self, first_silence_s: float) -> AsyncGenerator[TokenEvent | None, None]:
        """Every choice's events; None for a silence. A call without jobs (an echo alone) ends at once."""
        if not self._call.jobs:
            for echo in echoed(self._call):
                yield echo
            self._over(None)
            return
        try:
            async with aclosing(self._relayed(first_silence_s)) as events:
                async for event in events:
                    yield event
            self._over(None)
        except Superseded as error:
            self._charge.over(error)
            log.warning("answer_taken_over", request_id=self._call.id, reason=str(error))
            async with aclosing(self._followed()) as events:
                async for event in events:
                    yield event

    async def _relayed(self, first_silence_s: float) -> AsyncGenerator[TokenEvent | None, None]:
        """What is computed here."""
        silence_s = first_silence_s
        relay = Relay(self._context.dispatcher, self._context.text, self._call, self._tickets)
        with self._context.fence.watching(self._call.jobs, relay.break_off):
            async with relay:
                while not relay.finished:
                    event = await relay.next(silence_s)
                    if event is not None:
                        self._passed.pass_event(event.choice)
                    yield event
                    silence_s = self._context.ping_interval_s

    async def _followed(self) -> AsyncGenerator[TokenEvent | None, None]:
        """What another router computes, from where this answer has got to."""
        behind = Position.start(self._call.id, len(self._call.choices))
        async with self._context.follow(self._call) as source:
            while not source.finished:
                event = await source.next(self._context.ping_interval_s)
                if event is None or behind.pass_event(event.choice) > self._passed.counts[event.choice]:
                    yield event

    async def _call_headers(self) -> dict[str, str]:
        return call_headers(self._call.id, durable=await self._charge.durable())

    def _over(self, error: BaseException | None) -> None:
        """Tells observer and book how the call ended; no effect after the first time."""
        if error is not None:
            self._report.ended(error)
        self._charge.over(error)

    @property
    def _timeout_s(self) -> float:
        return latest_end_s(self._call) + DEADLINE_GRACE_S


def echoed(call: ValidCall) -> list[TokenEvent]:
    """The events of a call that asks no worker."""
    return [TokenEvent(choice, None, "", 0, FinishReason.LENGTH) for choice in call.choices]


def call_headers(id: RequestId, *, durable: bool) -> dict[str, str]:
    """What every answer says of its call: the id to ask for it again, and whether another router could carry it on."""
    return {"x-baton-request-id": id, "x-baton-durable": "true" if durable else "false"}


def _headers(scope: Scope) -> Mapping[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
