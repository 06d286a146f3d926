"""Client of the prefill workers' Handoff service: watches handoffs, renews leases, commits and aborts.

Runs in the asyncio loop and posts what it receives to the engine's mailbox. Makes no decisions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass

import grpc

from baton.domain.errors import BatonError, LinkBroken, WorkerLost
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, PageId
from baton.domain.request import SampledToken
from baton.domain.trace_context import NO_TRACE_CONTEXT, TraceContext
from baton.engine.mailbox import Mailbox
from baton.engine.step_metrics import monotonic_s
from baton.rpc import codec
from baton.rpc.gen import common_pb2, handoff_pb2
from baton.rpc.request_metadata import Metadata, request_metadata
from baton.rpc.token_check import verify_check
from baton.telemetry import metrics
from baton.telemetry.logs import get_logger
from baton.worker.request_validator import EngineRequestValidator
from services.decode.commands import (
    CommitReplied,
    DecodeCommand,
    LeasesRenewed,
    SealArrived,
    SourceLost,
)
from services.decode.kv_import import SealInfo
from services.decode.links import PrefillLink, PrefillLinks

log = get_logger()

CALL_TIMEOUT_S = 5.0
COMMIT_TIMEOUT_S = 30.0
"""A commit waits for the running prefill step."""


@dataclass(slots=True)
class _OpenHandoff:
    """A handoff in progress. `leased`: its first chunk was published, so its lease runs and can be renewed."""

    link: PrefillLink
    metadata: Metadata
    leased: bool = False


class HandoffClient:
    """Runs one task per watched handoff, one for all renewals, and one per commit or abort in flight."""

    def __init__(
        self,
        links: PrefillLinks,
        mailbox: Mailbox[DecodeCommand],
        renew_interval_s: float,
        validator: EngineRequestValidator,
    ) -> None:
        self._validator = validator
        self._links = links
        self._mailbox = mailbox
        self._renew_interval_s = renew_interval_s
        self._open: dict[AttemptId, _OpenHandoff] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._open)

    async def watch(self, id: AttemptId, link: PrefillLink, trace: TraceContext = NO_TRACE_CONTEXT) -> None:
        """Posts every event of `id` to the engine until the seal or the end of the stream. Never raises."""
        self._open[id] = _OpenHandoff(link, request_metadata(id, trace))
        request = handoff_pb2.WatchRequest(id=codec.encode_id(id), incarnation=link.record.prefill_incarnation)
        try:
            async for event in self._links.stub(link).Watch(request, metadata=self._open[id].metadata):
                self._post_event(id, event)
                if not event.HasField("chunk"):
                    return
            self._report_lost(id, WorkerLost(f"{link.record.prefill_id} ended the handoff's stream without a seal"))
        except grpc.aio.AioRpcError as error:
            self._report_lost(id, codec.error_from_rpc(error))

    def commit(self, id: AttemptId, wants_reply: bool) -> None:
        """Commits at the source: all pages were read. `wants_reply`: post the source's answer (V1) to the engine."""
        handoff = self._open.pop(id, None)
        if handoff is not None:
            self._spawn(self._commit(id, handoff, wants_reply))
        elif wants_reply:
            self._mailbox.put(CommitReplied(id, False))

    def abort(self, id: AttemptId) -> None:
        """Aborts at the source, which unpins at once: nothing more will be read. Idempotent."""
        handoff = self._open.pop(id, None)
        if handoff is not None:
            self._spawn(self._abort(id, handoff))

    async def renew_forever(self) -> None:
        """Renews all leases with one message per link, until cancelled."""
        while True:
            await asyncio.sleep(self._renew_interval_s)
            by_link: dict[PrefillLink, list[AttemptId]] = {}
            for id, handoff in self._open.items():
                if handoff.leased:
                    by_link.setdefault(handoff.link, []).append(id)
            await asyncio.gather(*(self._renew(link, ids) for link, ids in by_link.items()))

    async def close(self) -> None:
        """Waits up to `CALL_TIMEOUT_S` for commits and aborts in flight."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CALL_TIMEOUT_S)

    def _post_event(self, id: AttemptId, event: handoff_pb2.HandoffEvent) -> None:
        match event.WhichOneof("event"):
            case "chunk":
                if id in self._open:
                    self._open[id].leased = True
                pages = tuple(PageId(page) for page in event.chunk.pages)
                digests = tuple(event.chunk.digests) or None
                self._mailbox.put(PublishedChunk(id, event.chunk.first_page, pages, digests))
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

    def _spawn(self, call: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _commit(self, id: AttemptId, handoff: _OpenHandoff, wants_reply: bool) -> None:
        link = handoff.link
        request = handoff_pb2.CommitRequest(id=codec.encode_id(id), incarnation=link.record.prefill_incarnation)
        valid: bool | None = None
        try:
            reply = await self._links.stub(link).Commit(request, timeout=COMMIT_TIMEOUT_S, metadata=handoff.metadata)
            valid = reply.valid
        except grpc.aio.AioRpcError as error:
            log.warning("commit_failed", id=str(id), why=str(codec.error_from_rpc(error)))
        if wants_reply:
            self._mailbox.put(CommitReplied(id, valid))

    async def _abort(self, id: AttemptId, handoff: _OpenHandoff) -> None:
        request = common_pb2.AbortRequest(id=codec.encode_id(id), reason="decode aborted the import")
        try:
            await self._links.stub(handoff.link).Abort(request, timeout=CALL_TIMEOUT_S, metadata=handoff.metadata)
        except grpc.aio.AioRpcError as error:
            log.info("abort_undelivered", id=str(id), why=str(codec.error_from_rpc(error)))

    async def _renew(self, link: PrefillLink, ids: list[AttemptId]) -> None:
        request = handoff_pb2.RenewRequest(
            worker_id=link.record.prefill_id,
            incarnation=link.record.prefill_incarnation,
            ids=[codec.encode_id(id) for id in ids],
        )
        sent_at = monotonic_s()
        try:
            reply = await self._links.stub(link).Renew(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.warning("lease_renewal_failed", prefill=link.record.prefill_id, why=str(codec.error_from_rpc(error)))
            return
        ended = {codec.decode_id(id) for id in reply.ended}
        for id in ended:
            if self._open.pop(id, None) is not None:
                metrics.STALE_MESSAGES_TOTAL.labels("renew").inc()
        renewed = tuple(id for id in ids if id not in ended)
        if renewed and reply.HasField("lease_s"):
            self._mailbox.put(LeasesRenewed(renewed, sent_at + reply.lease_s))
