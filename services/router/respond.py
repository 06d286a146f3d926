"""The ASGI response to one generation request: whole, or as server-sent events.

Life of a request here: its call is opened in the store, its choices are admitted (a refusal still is a status) ->
tokens come -> headers are sent with the first token, or after `HEADER_GRACE_S` -> an event a token, pings in between ->
usage -> [DONE]. An error before the headers is raised and becomes a status in `routes`; later it becomes an error
event. A disconnect cancels everything. When another router takes the call over, the rest comes from its journal: the
client sees a pause.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.domain.errors import Cancelled, Superseded
from baton.domain.request import FinishReason
from baton.services.router.edge import sse
from baton.services.router.edge.disconnect import cancel_on_disconnect
from baton.services.router.edge.headers import unknown_fields_header
from baton.services.router.edge.http_errors import error_response
from baton.services.router.edge.sink import body_sink
from baton.services.router.generation import Dispatcher
from baton.services.router.openai.request_parser import ParsedRequest, RawRequest
from baton.services.router.openai.response_builder import FinishedChoice
from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.streaming.generation_source import GenerationSource
from baton.services.router.streaming.prompt_scoring import PromptScoring
from baton.services.router.streaming.sse_stream import SseStream
from baton.services.router.streaming.token_stream import DISCONNECT_GRACE_S, ChunkSource, TokenStream
from baton.services.router.streaming.unread_buffer import UnreadBudget
from baton.services.router.takeover.call_ownership import CallOwnership
from baton.services.router.takeover.supersede_listener import SupersedeListener
from baton.services.router.text.choice_text import TokenEvent
from baton.services.router.text.parsers.base import joined_calls
from baton.services.router.text.text_model import TextModel
from baton.store.store import CallRecord, Durability
from baton.telemetry.request_timer import RequestTimer
from baton.telemetry.request_trace import Outcome

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """The parts that every response needs. `follow`: the tokens of a request that another router runs.

    `scoring`: of the prompts of a request that asks for it.
    """

    dispatcher: Dispatcher
    text: TextModel
    call_ownership: CallOwnership
    supersede_listener: SupersedeListener
    follow: Callable[[ValidRequest, CallRecord | None, Superseded], ChunkSource]
    ping_interval_s: float
    always_ids: bool
    unread: UnreadBudget
    scoring: Callable[[ValidRequest], PromptScoring | None]


class GenerationResponse(Response):
    """The response to one request. Raises the errors before the first byte."""

    def __init__(self, context: ResponseContext, parsed: ParsedRequest, raw: RawRequest, timer: RequestTimer) -> None:
        """Opens the call and admits its choices; a refusal is raised here. `timer` has begun."""
        self._context = context
        self._parsed = parsed
        self._timer = timer
        self._stream: TokenStream | None = None
        self._ownership = context.call_ownership.open(parsed.request, raw)
        try:
            self._source = GenerationSource(context.dispatcher, parsed.request, timer.sequences)
        except BaseException as error:
            self._end(error)
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Responds, unless the client disconnects first."""
        request = self._parsed.request
        context = self._context
        stream = self._stream = TokenStream(
            context.text, request, self._source, self._follow, context.unread, context.scoring(request)
        )
        try:
            with self._context.supersede_listener.listening(request.sequences, stream.abort):
                if request.stream_options is None:
                    timeout_s = stream.timeout_s + DISCONNECT_GRACE_S
                    working = self._full_response(stream)
                    response = await cancel_on_disconnect(scope, receive, working, timeout_s, stream.too_slow)
                    body_sink(scope, send).hold()  # head and body are one write
                    await response(scope, receive, send)
                else:
                    await self._send_events(scope, receive, send, stream)
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)

    async def _send_events(self, scope: Scope, receive: Receive, send: Send, stream: TokenStream) -> None:
        """Sends the events. Raises no error after the first byte."""
        with_ids = self._context.always_ids or sse.accepts_event_ids(scope)
        events = SseStream(send, self._parsed, stream, with_ids=with_ids, sink=body_sink(scope, send))
        running = events.run(self._call_headers, self._context.ping_interval_s, self._timer.sequences)
        try:
            timeout_s = stream.timeout_s + DISCONNECT_GRACE_S
            await cancel_on_disconnect(scope, receive, running, timeout_s, stream.too_slow)
        except Exception as error:
            if not events.started:
                raise
            self._end(error, status=200)
            if not isinstance(error, Cancelled):
                await events.fail(scope, error)

    async def _full_response(self, stream: TokenStream) -> Response:
        choices: dict[int, list[TokenEvent]] = {choice: [] for choice in self._parsed.request.choices}
        async with stream:
            while stream.num_running:
                event = await stream.next(self._context.ping_interval_s)
                if event is not None:
                    choices[event.choice].append(event)
                    if self._timer.sequences and event.token is not None:
                        self._timer.sequences[event.choice].token(time.monotonic())
                    if self._timer.sequences and event.finish is not None:
                        self._timer.sequences[event.choice].finish(event.finish.value)
        finished = [_finished_choice(choice, events) for choice, events in choices.items()]
        builder, scores = self._parsed.response_builder, stream.prompt_scores
        builder.use_scores(scores)
        if scores:  # of long prompts they take seconds
            body = await asyncio.to_thread(builder.response, finished, stream.usage())
        else:
            body = builder.response(finished, stream.usage())
        return Response(body, headers=await self._call_headers(), media_type="application/json")

    def _follow(self, error: Superseded) -> ChunkSource:
        """The second source of the stream, after another router has taken the call over."""
        request = self._parsed.request
        self._ownership.end(error)
        log.warning("call_superseded", request_id=request.id, reason=str(error))
        return self._context.follow(request, self._ownership.seed, error)

    async def _call_headers(self) -> dict[str, str]:
        durability = await self._ownership.durability()
        self._timer.durable = durability.survives_restart
        return response_headers(self._parsed.request, durability)

    def _end(self, error: BaseException | None, status: int | None = None) -> None:
        """Ends the timer and the ownership. Later calls have no effect."""
        if error is None:
            sequences = self._timer.sequences
            reason = sequences[0].finish_reason if sequences else FinishReason.LENGTH.value  # none: an echo alone
            self._timer.end(Outcome.FINISHED, reason)
        else:
            status = error_response(error).status if status is None else status
            self._timer.fail(error, status, client_gone=isinstance(error, Cancelled))
        if self._stream is not None and self._stream.generated:
            error = None  # the journal is complete: nothing is left to take over
        self._ownership.end(error, self._timer.encoded)


def response_headers(request: ValidRequest, durability: Durability) -> dict[str, str]:
    """The id to ask for the request again, what the stored request survives, and its unknown fields.

    No scope: only this router has it.
    """
    headers = {
        "x-baton-request-id": request.id,
        "x-baton-durable": "true" if durability.survives_restart else "false",
        **(unknown_fields_header(request.unknown_fields) if request.unknown_fields else {}),
    }
    return headers if durability is Durability.NONE else headers | {"x-baton-durable-scope": durability._value_}


def _finished_choice(index: int, events: list[TokenEvent]) -> FinishedChoice:
    tokens = tuple(event.token for event in events if event.token is not None)
    finish, stop = (events[-1].finish, events[-1].stop) if events else (None, None)
    text, calls = (
        "".join(event.text for event in events),
        joined_calls(call for event in events for call in event.calls),
    )
    reasoning = "".join(event.reasoning for event in events)
    return FinishedChoice(index, text, tokens, finish or FinishReason.STOP, stop, calls, reasoning)
