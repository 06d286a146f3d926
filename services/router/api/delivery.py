"""Sends one call's answer: whole, or as server-sent events. The ASGI response that `routes` returns.

Life of a streamed answer: tickets are taken (a refusal is still a real status) -> choices run -> headers go out with
the first token, or after `HEADER_GRACE_S` without one -> an event a token, a ping in silence -> usage -> [DONE]. A
failure before the headers is raised and becomes a status in `routes`; after them it becomes an error event and the end.
A hang-up at any point cancels everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import structlog
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.domain.errors import Cancelled
from baton.domain.request import FinishReason, OutputToken
from services.router.api import sse
from services.router.api.calls import Streaming, ValidCall
from services.router.api.connection import CLOSE_TIMEOUT_S, unless_hung_up
from services.router.api.http_errors import is_bug, reply_to
from services.router.api.observer import CallReport, Observer
from services.router.api.relay import DEADLINE_GRACE_S, Relay, admit_all
from services.router.api.schemas import Usage
from services.router.api.usage import UsageMeter
from services.router.generation import Dispatcher
from services.router.text.choice_text import TokenEvent
from services.router.text.model import TextModel

HEADER_GRACE_S = 1.0
"""How long headers wait for a first token: what fails that early gets its own status, upon which clients try again."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WholeChoice:
    """A choice that has ended."""

    index: int
    text: str
    tokens: tuple[OutputToken, ...]
    finish: FinishReason


class Shape(Protocol):
    """Puts tokens and text into the JSON of one endpoint."""

    def chunk(self, event: TokenEvent, usage: Usage | UnsetType | None) -> Struct:
        """One event of a streamed answer."""
        ...

    def usage_chunk(self, usage: Usage) -> Struct:
        """The extra event with `usage` and no choices."""
        ...

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Struct:
        """An answer that is not streamed."""
        ...


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """What every answer is made with."""

    dispatcher: Dispatcher
    text: TextModel
    observer: Observer
    ping_interval_s: float


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

    def __init__(self, context: AnswerContext, call: ValidCall, shape: Shape, arrived_s: float) -> None:
        """Takes the tickets, so that a refusal is raised here."""
        self._context = context
        self._call = call
        self._shape = shape
        self._meter = UsageMeter(call)
        self._report = CallReport(context.observer, [job.id for job in call.jobs], arrived_s)
        self._started = False
        try:
            self._tickets = admit_all(context.dispatcher, call)
        except BaseException as error:
            self._report.ended(error)
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, unless the client hangs up first."""
        timeout_s = max((job.deadline_s for job in self._call.jobs), default=0.0) + 2 * DEADLINE_GRACE_S
        try:
            if self._call.streaming is None:
                response = await unless_hung_up(receive, self._whole(), timeout_s)
                await response(scope, receive, send)
            else:
                writer = sse.EventWriter(self._call.id, with_ids=sse.wants_ids(_headers(scope)))
                await self._stream_guarded(receive, send, writer, self._call.streaming, timeout_s)
        except BaseException as error:
            self._report.ended(error)
            raise

    async def _stream_guarded(
        self, receive: Receive, send: Send, writer: sse.EventWriter, streaming: Streaming, timeout_s: float
    ) -> None:
        """The root of a streamed answer: once it has begun, no error leaves here."""
        try:
            await unless_hung_up(receive, self._stream(send, writer, streaming), timeout_s)
        except Exception as error:
            if not self._started:
                raise
            self._report.ended(error)
            if not isinstance(error, Cancelled):
                await self._fail(send, writer, error)

    async def _whole(self) -> Response:
        drafts = [_Draft() for _ in self._call.choices]
        async with aclosing(self._events(self._context.ping_interval_s)) as events:
            async for event in events:
                if event is not None:
                    self._meter.count(event)
                    self._report.sent(event)
                    drafts[event.choice].add(event)
        whole = self._shape.whole([draft.whole(i) for i, draft in enumerate(drafts)], self._meter.usage())
        return Response(msgspec.json.encode(whole), media_type="application/json")

    async def _stream(self, send: Send, writer: sse.EventWriter, streaming: Streaming) -> None:
        async with aclosing(self._events(min(HEADER_GRACE_S, self._context.ping_interval_s))) as events:
            async for event in events:
                if not self._started:
                    await self._start(send)
                if event is None:
                    await _send_part(send, sse.PING)
                    continue
                self._meter.count(event)
                await _send_part(send, writer.event(self._encode(event, streaming)))
                self._report.sent(event)
            if streaming.include_usage:
                usage_chunk = self._shape.usage_chunk(self._meter.usage())
                await _send_part(send, writer.event(msgspec.json.encode(usage_chunk)))
            await _send_part(send, writer.event(sse.DONE))
        await _send_part(send, b"", more=False)

    async def _events(self, first_silence_s: float) -> AsyncGenerator[TokenEvent | None, None]:
        """Every choice's events; None for a silence. A call without jobs (an echo alone) ends at once."""
        if not self._call.jobs:
            for choice in self._call.choices:
                yield TokenEvent(choice, None, "", 0, FinishReason.LENGTH)
            return
        silence_s = first_silence_s
        async with Relay(self._context.dispatcher, self._context.text, self._call, self._tickets) as relay:
            while not relay.finished:
                yield await relay.next(silence_s)
                silence_s = self._context.ping_interval_s

    async def _start(self, send: Send) -> None:
        self._started = True
        headers = [(name.encode(), value.encode()) for name, value in sse.HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _fail(self, send: Send, writer: sse.EventWriter, error: Exception) -> None:
        """The error event and the end; a client that does not read does not hold us up."""
        if is_bug(error):
            log.error("answer_failed", request_id=self._call.id, exc_info=error)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await _send_part(send, writer.event(reply_to(error).json()), more=False)
        except TimeoutError:
            log.warning("client_does_not_read", request_id=self._call.id)

    def _encode(self, event: TokenEvent, streaming: Streaming) -> bytes:
        usage: Usage | UnsetType | None = UNSET
        if streaming.continuous_usage:
            usage = self._meter.usage()
        elif streaming.include_usage:
            usage = None
        return msgspec.json.encode(self._shape.chunk(event, usage))


async def _send_part(send: Send, part: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": more})


def _headers(scope: Scope) -> Mapping[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
