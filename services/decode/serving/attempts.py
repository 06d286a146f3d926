"""Serves attempts: claims a reservation, watches the handoff, gives what the engine emits. Runs in the asyncio loop.

`Generate` and sessions differ only in how an attempt comes and how its events are encoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass, replace

from baton.domain.errors import BatonError, DeadlineExceeded, InvalidRequest
from baton.domain.ids import AttemptId, Incarnation, ReservationId, WorkerId
from baton.domain.trace_context import TraceContext
from baton.engine.mailbox import Mailbox
from baton.engine.masks import MaskFiller
from baton.engine.messages import Abort, Fail, Scored
from baton.engine.step_metrics import monotonic_s
from baton.rpc import codec
from baton.rpc.gen import decode_pb2
from baton.services.decode.commands import Claim, DecodeCommand
from baton.services.decode.effects import EmitTokens, ReportImported
from baton.services.decode.handoff_client import HandoffClient
from baton.telemetry.logs import get_logger
from baton.worker.constraints import prepare_constraint
from baton.worker.handoff.links import PeerLinks
from baton.worker.request_validator import EngineRequestValidator, clamp_duration
from baton.worker.streams import AttemptStreams, Take

log = get_logger()

DecodeStreamEvent = ReportImported | Scored | EmitTokens | Fail
EVENT_TIMEOUT_S = 600.0
"""Longest silence of a row; bounds the wait of a preempted one."""


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


class AttemptServer:
    """Starts attempts and ends them when their router does not want them any more."""

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

    async def events(
        self, request: decode_pb2.GenerateRequest, trace: TraceContext, take: Take[DecodeStreamEvent] | None = None
    ) -> AsyncGenerator[DecodeStreamEvent, None]:
        """The events of one attempt. The last one has a finish or is a `Fail`. Closing it before aborts the attempt.

        `take` may handle an event before it is given: see `AttemptStreams.open`. It leaves the last one.
        """
        id = codec.decode_id(request.request.id)
        try:
            claim = self._parse(request)
            await prepare_constraint(self._config.masks, claim.request)
            self._streams.open(id, take)
        except BatonError as error:
            yield Fail(id, error)
            return
        ended = False
        watch: asyncio.Task[None] | None = None
        try:
            source = WorkerId(request.prefill_id), Incarnation(request.prefill_incarnation)
            watch = self._start_import(claim, *source, trace)
            while not ended:
                event = await self._next_event(id)
                ended = isinstance(event, Fail) or (isinstance(event, EmitTokens) and event.finish is not None)
                yield event
        except BatonError as error:
            yield Fail(id, error)
        finally:
            if watch is not None:
                watch.cancel()
            self._streams.close(id)
            self._handoffs.abort(id)
            if not ended:
                self._mailbox.put(Abort(id, "the router closed the stream"))
                log.info("attempt_end", request_id=id.request_id, attempt=id.attempt, outcome="stream_closed")

    def _parse(self, request: decode_pb2.GenerateRequest) -> Claim:
        deadline_s = clamp_duration(request.deadline_s, "deadline_s")
        sequence = self._config.validator.validate_sequence(request.request)
        return Claim(ReservationId(request.reservation_id), sequence, None, deadline_s, monotonic_s())

    def _start_import(
        self, claim: Claim, source: WorkerId, incarnation: Incarnation, trace: TraceContext
    ) -> asyncio.Task[None] | None:
        """Claims the reservation and watches the handoff, unless the prompt is local. Raises `LinkBroken`."""
        if self._config.own_identity == (source, incarnation):
            if claim.request.media:
                raise InvalidRequest("media is not computed by this worker, only by one that encodes", param="media")
            self._mailbox.put(claim)
            return None
        link = self._links.get(source, incarnation)
        self._mailbox.put(replace(claim, source=source))
        return asyncio.create_task(self._handoffs.watch(claim.request.id, link, trace))

    async def _next_event(self, id: AttemptId) -> DecodeStreamEvent:
        try:
            event = await self._streams.next(id, EVENT_TIMEOUT_S)
        except DeadlineExceeded as error:
            self._mailbox.put(Abort(id, str(error)))
            event = Fail(id, error)
        _log(event)
        return event


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
