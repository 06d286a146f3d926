"""Handoffs: follows prefill's announcements for every landing, renews the leases, and says commit or abort.

Lives in the asyncio loop, between the engine's mailbox and the prefill workers' Handoff service. Decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass

import grpc

from baton.domain.errors import BatonError, LinkBroken, WorkerLost
from baton.domain.ids import AttemptId, PageId
from baton.domain.request import SampledToken
from baton.engine.intake import Intake
from baton.engine.mailbox import Mailbox
from baton.engine.observe import Clock
from baton.rpc import codec
from baton.rpc.gen import common_pb2, handoff_pb2
from baton.telemetry import metrics
from baton.telemetry.logs import get_logger
from services.decode.boarding import SealInfo
from services.decode.commands import (
    ChunkArrived,
    CommitAnswered,
    DecodeCommand,
    LeasesRenewed,
    SealArrived,
    SourceLost,
)
from services.decode.links import Link, Links

log = get_logger()

CALL_TIMEOUT_S = 5.0
COMMIT_TIMEOUT_S = 30.0
"""A commit waits for prefill's step to end."""


@dataclass(slots=True)
class _Held:
    """A handoff in progress. Its lease runs, and can be renewed, from the first announced chunk on."""

    link: Link
    leased: bool = False


class Handoffs:
    """One task a followed handoff, one for all renewals, one a message that ends a handoff."""

    def __init__(self, links: Links, mailbox: Mailbox[DecodeCommand], renew_interval_s: float, intake: Intake) -> None:
        self._intake = intake
        self._links = links
        self._mailbox = mailbox
        self._renew_interval_s = renew_interval_s
        self._held: dict[AttemptId, _Held] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._held)

    async def follow(self, id: AttemptId, link: Link) -> None:
        """Posts every announcement of `id` to the engine, until the seal or the stream's end. Never raises."""
        self._held[id] = _Held(link)
        request = handoff_pb2.WatchRequest(id=codec.encode_id(id), incarnation=link.record.prefill_incarnation)
        try:
            async for event in self._links.stub(link).Watch(request):
                self._post(id, event)
                if not event.HasField("chunk"):
                    return
            self._lost(id, WorkerLost(f"{link.record.prefill_id} ended the handoff's stream without a seal"))
        except grpc.aio.AioRpcError as error:
            self._lost(id, codec.error_of(error))

    def commit(self, id: AttemptId, answer: bool) -> None:
        """Tells the source that everything was read; with `answer` the engine hears what it said (V1), if anything."""
        held = self._held.pop(id, None)
        if held is not None:
            self._start(self._commit(id, held.link, answer))
        elif answer:
            self._mailbox.post(CommitAnswered(id, False))

    def abort(self, id: AttemptId) -> None:
        """Tells the source that nothing more will be read, so that it unpins at once. Idempotent."""
        held = self._held.pop(id, None)
        if held is not None:
            self._start(self._abort(id, held.link))

    async def renew_forever(self) -> None:
        """Renews all leases, one message a link, until cancelled."""
        while True:
            await asyncio.sleep(self._renew_interval_s)
            by_link: dict[Link, list[AttemptId]] = {}
            for id, held in self._held.items():
                if held.leased:
                    by_link.setdefault(held.link, []).append(id)
            await asyncio.gather(*(self._renew(link, ids) for link, ids in by_link.items()))

    async def close(self) -> None:
        """Waits, bounded, for the last words to be delivered."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CALL_TIMEOUT_S)

    def _post(self, id: AttemptId, event: handoff_pb2.HandoffEvent) -> None:
        match event.WhichOneof("event"):
            case "chunk":
                if id in self._held:
                    self._held[id].leased = True
                pages = tuple(PageId(page) for page in event.chunk.pages)
                digests = tuple(event.chunk.digests) or None
                self._mailbox.post(ChunkArrived(id, event.chunk.first_page, pages, digests))
            case "seal":
                first = codec.decode_token(event.seal.first_token)
                if not self._intake.is_token(first.token):
                    return self._lost(id, LinkBroken(f"{id}: sealed with token {first.token}, which does not exist"))
                token = SampledToken(first.token, first.logprobs)
                finish = codec.decode_finish(event.seal.finish_reason)
                self._mailbox.post(SealArrived(id, SealInfo(token, finish, event.seal.num_pages)))
            case _:
                self._lost(id, codec.decode_failure(event.failed))

    def _lost(self, id: AttemptId, error: BatonError) -> None:
        self._mailbox.post(SourceLost(id, error))

    def _start(self, call: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _commit(self, id: AttemptId, link: Link, answer: bool) -> None:
        request = handoff_pb2.CommitRequest(id=codec.encode_id(id), incarnation=link.record.prefill_incarnation)
        valid: bool | None = None
        try:
            reply = await self._links.stub(link).Commit(request, timeout=COMMIT_TIMEOUT_S)
            valid = reply.valid
        except grpc.aio.AioRpcError as error:
            log.warning("commit_unanswered", id=str(id), why=str(codec.error_of(error)))
        if answer:
            self._mailbox.post(CommitAnswered(id, valid))

    async def _abort(self, id: AttemptId, link: Link) -> None:
        request = common_pb2.AbortRequest(id=codec.encode_id(id), reason="decode gave the landing up")
        try:
            await self._links.stub(link).Abort(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.info("abort_undelivered", id=str(id), why=str(codec.error_of(error)))

    async def _renew(self, link: Link, ids: list[AttemptId]) -> None:
        request = handoff_pb2.RenewRequest(
            worker_id=link.record.prefill_id,
            incarnation=link.record.prefill_incarnation,
            ids=[codec.encode_id(id) for id in ids],
        )
        sent_at = Clock()
        try:
            reply = await self._links.stub(link).Renew(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.warning("renew_failed", prefill=link.record.prefill_id, why=str(codec.error_of(error)))
            return
        ended = {codec.decode_id(id) for id in reply.ended}
        for id in ended:
            if self._held.pop(id, None) is not None:
                metrics.STALE_MESSAGES_TOTAL.labels("renew").inc()
        held = tuple(id for id in ids if id not in ended)
        if held and reply.HasField("lease_s"):
            self._mailbox.post(LeasesRenewed(held, sent_at + reply.lease_s))
