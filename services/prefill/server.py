"""The Prefill service for routers. Translates messages; makes no decisions.

Runs in the asyncio loop. Commands go to the engine's mailbox, events come back through `AttemptStreams`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import asdict

import grpc

from baton.domain.errors import BatonError, DeadlineExceeded, Draining, InvalidRequest, Overloaded
from baton.domain.ids import AttemptId, Incarnation, WorkerId
from baton.domain.request import OutputToken
from baton.domain.trace_context import TraceContext
from baton.engine.handoff.export_events import Seal
from baton.engine.handoff.page_source import PageSource
from baton.engine.mailbox import Mailbox
from baton.engine.masks import MaskFiller
from baton.engine.messages import Abort, Fail, Scored
from baton.engine.step_metrics import monotonic_s
from baton.rpc import codec
from baton.rpc.gen import common_pb2, prefill_pb2, prefill_pb2_grpc
from baton.rpc.times_codec import encode_prefill_times
from baton.rpc.tokens.token_check import set_check
from baton.services.prefill.commands import AddPrompt, EndPromptCall, PrefillCommand
from baton.services.prefill.prompt import Progress
from baton.telemetry.logs import get_logger
from baton.worker.constraints import prepare_constraint
from baton.worker.handoff.links import PeerLinks
from baton.worker.media.media_receiver import MediaReceiver
from baton.worker.request_validator import MAX_NAME_CHARS, EngineRequestValidator, clamp_duration, validate_id
from baton.worker.streams import AttemptStreams

log = get_logger()

PrefillStreamEvent = Progress | Scored | Seal | Fail
GRACE_S = 5.0
"""Time after a request's deadline that its stream waits for the engine to report it."""


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Serves one stream per attempt. Closing it before the seal aborts the attempt."""

    def __init__(
        self,
        mailbox: Mailbox[PrefillCommand],
        streams: AttemptStreams[PrefillStreamEvent],
        is_draining: Callable[[], bool],
        validator: EngineRequestValidator,
        masks: MaskFiller | None = None,
        links: PeerLinks | None = None,
    ) -> None:
        """`masks`: of the engine; None: requests with a constraint are refused. `links`: to read cached pages over."""
        self._mailbox = mailbox
        self._streams = streams
        self._is_draining = is_draining
        self._validator = validator
        self._masks = masks
        self._links = links
        self.media: MediaReceiver | None = None

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        """See prefill.proto."""
        async with aclosing(self.prefill(request)) as events:
            async for event in events:
                yield event

    async def prefill(
        self, request: prefill_pb2.PrefillRequest, trace: TraceContext | None = None
    ) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        """The events of one attempt, to the seal or a failure. Closing it before aborts the attempt."""
        try:
            add = self._parse(request)
            id = add.request.id
            await prepare_constraint(self._masks, add.request)
            self._streams.open(id)
        except BatonError as error:
            yield _failed(error)
            return
        ended = False
        try:
            if not self._mailbox.try_put(add):
                ended = True
                yield _failed(Overloaded("this prefill worker's mailbox is full", retry_after_s=1.0))
                return
            yield prefill_pb2.PrefillEvent(accepted=prefill_pb2.Accepted())
            async for event in self._stream_events(id, add.deadline_s + GRACE_S):
                ended = event.WhichOneof("event") in ("sealed", "failed")
                yield event
        finally:
            self._streams.close(id)
            if not ended:
                self._mailbox.put(EndPromptCall(add, "the router closed the stream"))

    async def Abort(
        self, request: common_pb2.AbortRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> common_pb2.AbortReply:
        """See prefill.proto."""
        self.abort(request)
        return common_pb2.AbortReply()

    def abort(self, request: common_pb2.AbortRequest) -> None:
        """Ends an attempt in every state. Also for sessions. Raises `InvalidRequest` for an id that is none."""
        self._mailbox.put(Abort(validate_id(request.id), request.reason[:MAX_NAME_CHARS]))

    async def PutMedia(
        self,
        requests: AsyncIterator[prefill_pb2.PutMediaRequest],
        context: grpc.aio.ServicerContext[object, object],
    ) -> prefill_pb2.PutMediaResponse:
        """See prefill.proto."""
        if self.media is None:
            raise InvalidRequest("images are not served by this worker, only text is", param="media")
        if self._is_draining():
            raise Draining("this prefill worker is draining", retry_after_s=1.0)
        return await self.media.receive(requests, context)

    async def _stream_events(self, id: AttemptId, timeout_s: float) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        while True:
            try:
                event = await self._streams.next(id, timeout_s)
            except DeadlineExceeded as error:
                event = Fail(id, error)
            _log(event)
            if isinstance(event, Scored):
                for message in codec.encode_scores(event.scores):
                    yield prefill_pb2.PrefillEvent(scores=message)
                continue
            yield _encode(event)
            if not isinstance(event, Progress):
                return

    def _parse(self, request: prefill_pb2.PrefillRequest) -> AddPrompt:
        if self._is_draining():
            raise Draining("this prefill worker is draining", retry_after_s=1.0)
        deadline_s = clamp_duration(request.deadline_s, "deadline_s")
        prompt = self._validator.validate_prompt(request.request)
        source = self._find_source(request.page_source) if request.HasField("page_source") else None
        return AddPrompt(prompt, request.decode_prefix_len, deadline_s, monotonic_s(), source, request.num_coming)

    def _find_source(self, named: prefill_pb2.PageSource) -> PageSource | None:
        """The named worker, if there is a link to it."""
        id, incarnation = WorkerId(named.worker_id), Incarnation(named.incarnation)
        link = None if self._links is None else self._links.find(id, incarnation)
        if link is None:
            return None
        return PageSource(id, incarnation, link.role, named.num_pages, link.record.bandwidth_bytes_per_s)


def _failed(error: BatonError) -> prefill_pb2.PrefillEvent:
    return prefill_pb2.PrefillEvent(failed=codec.encode_failure(error))


def _log(event: PrefillStreamEvent) -> None:
    """Logs the seal of an attempt, or its end without one."""
    match event:
        case Seal(id):
            log.info("attempt_sealed", request_id=id.request_id, attempt=id.attempt, **asdict(event.times))
        case Fail(id, error):
            log.info("attempt_end", request_id=id.request_id, attempt=id.attempt, outcome=error.code)
        case _:
            pass


def _encode(event: Progress | Seal | Fail) -> prefill_pb2.PrefillEvent:
    match event:
        case Progress(_, num_tokens):
            return prefill_pb2.PrefillEvent(progress=prefill_pb2.Progress(num_computed_tokens=num_tokens))
        case Seal():
            sealed = prefill_pb2.Sealed(
                first_token=codec.encode_token(
                    OutputToken(event.index, event.first_token.token, event.first_token.logprobs)
                ),
                finish_reason=codec.encode_finish(event.finish),
                num_cached_tokens=event.times.cached_tokens,
                times=encode_prefill_times(event.times),
            )
            set_check(sealed)
            return prefill_pb2.PrefillEvent(sealed=sealed)
        case Fail(_, error):
            return _failed(error)
