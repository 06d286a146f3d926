"""Watches handoffs at prefill workers, in sessions or by calls.

Runs in the asyncio loop and posts what it receives to the engine's mailbox. Makes no decisions.
"""

from __future__ import annotations

from baton.domain.errors import BatonError, LinkBroken, WorkerLost
from baton.domain.ids import AttemptId
from baton.domain.request import SampledToken
from baton.domain.trace_context import NO_TRACE_CONTEXT, TraceContext
from baton.engine.mailbox import Mailbox
from baton.rpc import codec
from baton.rpc.gen import handoff_pb2
from baton.rpc.request_metadata import request_metadata
from baton.rpc.tokens.token_check import verify_check
from baton.services.decode.commands import DecodeCommand, SealArrived, SourceLost
from baton.services.decode.kv_import import SealInfo
from baton.telemetry.logs import get_logger
from baton.worker.handoff.handoff_calls import HandoffCalls, OpenHandoff, decode_chunk
from baton.worker.handoff.links import PeerLink, PeerLinks
from baton.worker.handoff.session_or_call import ASK_ERRORS, error_of
from baton.worker.request_validator import EngineRequestValidator

log = get_logger()


class HandoffClient(HandoffCalls):
    """Runs one task per watched handoff."""

    def __init__(
        self,
        links: PeerLinks,
        mailbox: Mailbox[DecodeCommand],
        renew_interval_s: float,
        validator: EngineRequestValidator,
        num_page_parts: int = 1,
    ) -> None:
        """See `HandoffCalls`."""
        super().__init__(links, mailbox, renew_interval_s, num_page_parts)
        self._validator = validator
        self._mailbox = mailbox

    async def watch(self, id: AttemptId, link: PeerLink, trace: TraceContext = NO_TRACE_CONTEXT) -> None:
        """Posts every event of `id` to the engine until the seal or the end of the stream. Never raises."""
        self._open[id] = OpenHandoff(link, request_metadata(id, trace))
        request = handoff_pb2.WatchRequest(id=codec.encode_id(id), incarnation=link.record.prefill_incarnation)
        try:
            async for event in self._links.stub(link).Watch(request, metadata=self._open[id].metadata):
                self._post_event(id, event)
                if not event.HasField("chunk"):
                    return
            self._report_lost(id, WorkerLost(f"{link.record.prefill_id} ended the handoff's stream without a seal"))
        except ASK_ERRORS as error:
            lost = error_of(error)
            log.info("handoff_stream_lost", id=str(id), prefill=link.record.prefill_id, why=lost.log_text)
            self._report_lost(id, lost)

    def _post_event(self, id: AttemptId, event: handoff_pb2.HandoffEvent) -> None:
        match event.WhichOneof("event"):
            case "chunk":
                if id in self._open:
                    self._open[id].leased = True
                try:
                    chunk = decode_chunk(id, event.chunk, self._num_page_parts)
                except LinkBroken as error:
                    return self._report_lost(id, error)
                self._mailbox.put(chunk)
            case "seal":
                try:
                    verify_check(event.seal)
                except LinkBroken as error:
                    return self._report_lost(id, error)
                first = codec.decode_token(event.seal.first_token)
                if not self._validator.is_token(first.token):
                    return self._report_lost(
                        id, LinkBroken(f"{id}: sealed with token {first.token}, which does not exist")
                    )
                token = SampledToken(first.token, first.logprobs)
                finish = codec.decode_finish(event.seal.finish_reason)
                self._mailbox.put(SealArrived(id, SealInfo(token, finish, event.seal.num_pages)))
            case _:
                self._report_lost(id, codec.decode_failure(event.failed))

    def _report_lost(self, id: AttemptId, error: BatonError) -> None:
        self._mailbox.put(SourceLost(id, error))
