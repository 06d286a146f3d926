"""The Decode service for routers: `Reserve`, `Generate` and `Abort`. Translates messages; makes no decisions.

Runs in the asyncio loop. Commands go to the engine's mailbox, events come back through `AttemptStreams`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass, replace

import grpc

from baton.domain.errors import BatonError, DeadlineExceeded, Draining, InvalidRequest, Overloaded
from baton.domain.ids import AttemptId, Incarnation, PageKey, ReservationId, WorkerId
from baton.domain.trace_context import TraceContext
from baton.engine.mailbox import Mailbox
from baton.engine.masks import MaskFiller
from baton.engine.messages import Abort, Fail, Scored
from baton.engine.reply import Reply
from baton.engine.step_metrics import monotonic_s
from baton.kv.keys import KEY_BYTES
from baton.rpc import codec
from baton.rpc.gen import common_pb2, decode_pb2, decode_pb2_grpc
from baton.rpc.request_metadata import received_trace_context
from baton.rpc.times_codec import encode_decode_times, encode_import_times
from baton.rpc.token_check import set_check
from baton.telemetry.logs import get_logger
from baton.worker.constraints import prepare_constraint
from baton.worker.handoff.links import PeerLinks
from baton.worker.request_validator import MAX_NAME_CHARS, EngineRequestValidator, clamp_duration, validate_id
from baton.worker.streams import AttemptStreams
from services.decode.commands import Claim, DecodeCommand, Reserve
from services.decode.effects import EmitTokens, ReportImported
from services.decode.handoff_client import HandoffClient
from services.decode.kv_import import Busy, Reserved

log = get_logger()

DecodeStreamEvent = ReportImported | Scored | EmitTokens | Fail
EVENT_TIMEOUT_S = 600.0
"""Longest silence of a row; bounds the wait of a preempted one."""
ENGINE_TIMEOUT_S = 30.0
BUSY_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class ServicerConfig:
    """Validation and limits of calls.

    `own_identity`: id and incarnation of this worker, which a router names as the source of a prompt to compute here.
    `masks`: of the engine; None: requests with a constraint are refused.
    """

    validator: EngineRequestValidator
    max_reservation_s: float
    is_draining: Callable[[], bool]
    own_identity: tuple[WorkerId, Incarnation] | None = None
    masks: MaskFiller | None = None


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """Serves one `Generate` stream per attempt. Closing the stream aborts the attempt."""

    def __init__(
        self,
        mailbox: Mailbox[DecodeCommand],
        streams: AttemptStreams[DecodeStreamEvent],
        links: PeerLinks,
        handoffs: HandoffClient,
        config: ServicerConfig,
    ) -> None:
        self._mailbox = mailbox
        self._streams = streams
        self._links = links
        self._handoffs = handoffs
        self._config = config

    async def Reserve(
        self, request: decode_pb2.ReserveRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> decode_pb2.ReserveReply:
        """See decode.proto."""
        try:
            return _encode_reservation(await self._reserve(request))
        except BatonError as error:
            return decode_pb2.ReserveReply(refused=codec.encode_failure(error))

    async def Generate(
        self, request: decode_pb2.GenerateRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncGenerator[decode_pb2.GenerateEvent, None]:
        """See decode.proto."""
        id = codec.decode_id(request.request.id)
        try:
            claim = self._parse(request)
            await prepare_constraint(self._config.masks, claim.request)
            self._streams.open(id)
        except BatonError as error:
            yield _encode(Fail(id, error))
            return
        ended = False
        watch: asyncio.Task[None] | None = None
        try:
            source = WorkerId(request.prefill_id), Incarnation(request.prefill_incarnation)
            watch = self._start_import(claim, *source, received_trace_context(context))
            async for event in self._stream_events(id):
                ended = event.HasField("failed") or event.tokens.finish_reason != 0
                yield event
        except BatonError as error:
            yield _encode(Fail(id, error))
        finally:
            if watch is not None:
                watch.cancel()
            self._streams.close(id)
            self._handoffs.abort(id)
            if not ended:
                self._mailbox.put(Abort(id, "the router closed the stream"))
                log.info("attempt_end", request_id=id.request_id, attempt=id.attempt, outcome="stream_closed")

    async def Abort(
        self, request: common_pb2.AbortRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> common_pb2.AbortReply:
        """See decode.proto."""
        self._mailbox.put(Abort(validate_id(request.id), request.reason[:MAX_NAME_CHARS]))
        return common_pb2.AbortReply()

    async def _reserve(self, request: decode_pb2.ReserveRequest) -> Reserved | Busy:
        if self._config.is_draining():
            raise Draining("this decode worker is draining", retry_after_s=1.0)
        if not request.num_tokens or any(len(key) != KEY_BYTES for key in request.page_keys):
            raise InvalidRequest("a reservation needs tokens, and page keys of 16 bytes")
        id = validate_id(request.id)
        reply: Reply[Reserved | Busy] = Reply()
        keys = tuple(PageKey(key) for key in request.page_keys)
        deadline_s = min(clamp_duration(request.deadline_s, "deadline_s"), self._config.max_reservation_s)
        command = Reserve(
            id, request.num_tokens, keys, deadline_s, reply, request.max_new_tokens, request.computes_prompt
        )
        if not self._mailbox.try_put(command):
            raise Overloaded("this decode worker's mailbox is full", retry_after_s=1.0)
        return await reply.wait(ENGINE_TIMEOUT_S)

    def _parse(self, request: decode_pb2.GenerateRequest) -> Claim:
        deadline_s = clamp_duration(request.deadline_s, "deadline_s")
        sequence = self._config.validator.validate_sequence(request.request)
        return Claim(ReservationId(request.reservation_id), sequence, None, deadline_s, monotonic_s())

    def _start_import(
        self, claim: Claim, source: WorkerId, incarnation: Incarnation, trace: TraceContext
    ) -> asyncio.Task[None] | None:
        """Claims the reservation and watches the handoff, unless the prompt is local. Raises `LinkBroken`."""
        if self._config.own_identity == (source, incarnation):
            self._mailbox.put(claim)
            return None
        link = self._links.get(source, incarnation)
        self._mailbox.put(replace(claim, source=source))
        return asyncio.create_task(self._handoffs.watch(claim.request.id, link, trace))

    async def _stream_events(self, id: AttemptId) -> AsyncGenerator[decode_pb2.GenerateEvent, None]:
        while True:
            try:
                event = await self._streams.next(id, EVENT_TIMEOUT_S)
            except DeadlineExceeded as error:
                self._mailbox.put(Abort(id, str(error)))
                event = Fail(id, error)
            if isinstance(event, Scored):
                for message in codec.encode_scores(event.scores):
                    yield decode_pb2.GenerateEvent(scores=message)
                continue
            _log(event)
            yield _encode(event)
            if isinstance(event, Fail) or (isinstance(event, EmitTokens) and event.finish is not None):
                return


def _log(event: DecodeStreamEvent) -> None:
    """Logs the import and the end of an attempt."""
    ids = {"request_id": event.id.request_id, "attempt": event.id.attempt}
    match event:
        case ReportImported(_, source, _, num_tokens, num_cached, times, _):
            log.info(
                "attempt_imported", **ids, prefill=source, prompt_tokens=num_tokens, cached_tokens=num_cached,
                **asdict(times),
            )  # fmt: skip
        case EmitTokens(_, tokens, finish, times) if finish is not None:
            fields = {} if times is None else asdict(times)
            log.info("attempt_end", **ids, outcome=finish.value, output_tokens=tokens[-1].index + 1, **fields)
        case Fail(_, error, times):
            log.info("attempt_end", **ids, outcome=error.code, **({} if times is None else asdict(times)))


def _encode_reservation(answer: Reserved | Busy) -> decode_pb2.ReserveReply:
    match answer:
        case Reserved(id, prefix_len):
            return decode_pb2.ReserveReply(
                reserved=decode_pb2.Reserved(reservation_id=id, decode_prefix_len=prefix_len)
            )
        case Busy(queued_pages, no_prompts):
            busy = decode_pb2.Busy(retry_after_s=BUSY_RETRY_S, queued_pages=max(0, queued_pages), no_prompts=no_prompts)
            return decode_pb2.ReserveReply(busy=busy)


def _encode(event: ReportImported | EmitTokens | Fail) -> decode_pb2.GenerateEvent:
    match event:
        case EmitTokens(_, tokens, finish, times):
            message = decode_pb2.Tokens(
                tokens=[codec.encode_token(token) for token in tokens],
                finish_reason=codec.encode_finish(finish),
                times=None if times is None else encode_decode_times(times),
            )
            set_check(message)
            return decode_pb2.GenerateEvent(tokens=message)
        case ReportImported():
            imported = decode_pb2.Imported(
                times=encode_import_times(event.times), first_token=codec.encode_token(event.first_token)
            )
            return decode_pb2.GenerateEvent(imported=imported)
        case Fail(_, error, times):
            failure = codec.encode_failure(error)
            if times is not None:
                failure.decode.CopyFrom(encode_decode_times(times))
            return decode_pb2.GenerateEvent(failed=failure)
