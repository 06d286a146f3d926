"""Asks the workers whose pages this one reads, in sessions or by calls: renew leases, commit, abort.

Runs in the asyncio loop and posts the answers to the engine's mailbox. Makes no decisions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial

from baton.domain.errors import LinkBroken, PageVerdict
from baton.domain.handoff import PublishedChunk, Suspect
from baton.domain.ids import AttemptId, Incarnation, PageId, PageKey
from baton.engine.handoff.import_commands import (
    CommitReplied,
    ImportMailbox,
    LeasesRenewed,
    QuarantineArrived,
    VerdictArrived,
)
from baton.engine.step_metrics import monotonic_s
from baton.kv.keys import KEY_BYTES
from baton.kv.page_digests import join_parts, split_parts
from baton.kv.page_tags import TAG_BYTES, join_tags
from baton.rpc import codec
from baton.rpc.gen import common_pb2, handoff_pb2
from baton.rpc.request_metadata import Metadata
from baton.telemetry import metrics
from baton.telemetry.logs import get_logger
from baton.worker.handoff.links import PeerLink, PeerLinks
from baton.worker.handoff.session_or_call import ASK_ERRORS, error_of

log = get_logger()

CALL_TIMEOUT_S = 5.0
COMMIT_TIMEOUT_S = 30.0
"""A commit waits for the source's running step."""


@dataclass(slots=True)
class OpenHandoff:
    """A handoff or export in progress. `leased`: its first pages were announced, so that its lease runs."""

    link: PeerLink
    metadata: Metadata
    leased: bool = False


class HandoffCalls:
    """Runs one task for all renewals of a link, and one per commit or abort in flight."""

    def __init__(
        self, links: PeerLinks, mailbox: ImportMailbox, renew_interval_s: float, num_page_parts: int = 1
    ) -> None:
        """`num_page_parts`: parts of a page of this worker, and so of every linked one; each has a digest and a tag."""
        self._num_page_parts = num_page_parts
        self._links = links
        self._answers = mailbox
        self._renew_interval_s = renew_interval_s
        self._open: dict[AttemptId, OpenHandoff] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._renewals: dict[PeerLink, asyncio.Task[None]] = {}
        self._quarantine_seen: dict[Incarnation, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    def commit(self, id: AttemptId, wants_reply: bool) -> None:
        """Commits at the source: all pages were read. `wants_reply`: post the source's answer (V1) to the engine."""
        handoff = self._open.pop(id, None)
        if handoff is not None:
            self._spawn(self._commit(id, handoff, wants_reply))
        elif wants_reply:
            self._answers.put(CommitReplied(id, False))

    def abort(self, id: AttemptId) -> None:
        """Aborts at the source, which unpins at once: nothing more will be read. Idempotent."""
        handoff = self._open.pop(id, None)
        if handoff is not None:
            self._spawn(self._abort(id, handoff))

    def ask_verdict(self, id: AttemptId, suspects: Sequence[Suspect], message: str) -> None:
        """Aborts at the source like `abort`, and posts its answer about `suspects` to the engine."""
        handoff = self._open.pop(id, None)
        if handoff is None:
            self._answers.put(VerdictArrived(id, None, message))
        else:
            self._spawn(self._ask_verdict(id, handoff, suspects, message))

    async def renew_forever(self) -> None:
        """Renews all leases with one message per link, until cancelled. Links without leases get one as well.

        Each reply brings the keys that the source has quarantined. A source that is slow to answer delays only its own.
        """
        try:
            while True:
                await asyncio.sleep(self._renew_interval_s)
                self._start_renewals()
        finally:
            for task in self._renewals.values():
                task.cancel()

    def _start_renewals(self) -> None:
        by_link: dict[PeerLink, list[AttemptId]] = {link: [] for link in self._links.up()}
        incarnations = {link.record.prefill_incarnation for link in by_link}
        self._quarantine_seen = {one: seen for one, seen in self._quarantine_seen.items() if one in incarnations}
        for id, handoff in self._open.items():
            if handoff.leased:
                by_link.setdefault(handoff.link, []).append(id)
        for link, ids in by_link.items():
            if link not in self._renewals:
                task = self._renewals[link] = asyncio.create_task(self._renew(link, ids))
                task.add_done_callback(partial(self._end_renewal, link))

    def _end_renewal(self, link: PeerLink, task: asyncio.Task[None]) -> None:
        del self._renewals[link]

    async def close(self) -> None:
        """Waits up to `CALL_TIMEOUT_S` for commits and aborts in flight."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CALL_TIMEOUT_S)

    def _spawn(self, call: Coroutine[None, None, object]) -> None:
        task: asyncio.Task[object] = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _commit(self, id: AttemptId, handoff: OpenHandoff, wants_reply: bool) -> None:
        link = handoff.link
        request = handoff_pb2.CommitRequest(id=codec.encode_id(id), incarnation=link.record.prefill_incarnation)
        valid: bool | None = None
        try:
            reply = await self._links.stub(link).Commit(request, timeout=COMMIT_TIMEOUT_S, metadata=handoff.metadata)
            valid = reply.valid
        except ASK_ERRORS as error:
            log.warning("commit_failed", id=str(id), why=error_of(error).log_text)
        if wants_reply:
            self._answers.put(CommitReplied(id, valid))

    async def _abort(self, id: AttemptId, handoff: OpenHandoff, suspects: Sequence[Suspect] = ()) -> PageVerdict | None:
        request = common_pb2.AbortRequest(
            id=codec.encode_id(id),
            reason="decode aborted the import",
            suspects=[
                common_pb2.SuspectPage(
                    index=one.index, page=one.page, digests=split_parts([one.digest], self._num_page_parts)
                )
                for one in suspects
            ],
        )
        try:
            stub = self._links.stub(handoff.link)
            reply = await stub.Abort(request, timeout=CALL_TIMEOUT_S, metadata=handoff.metadata)
        except ASK_ERRORS as error:
            log.info("abort_undelivered", id=str(id), why=error_of(error).log_text)
            return None
        return codec.decode_verdict(reply.verdict)

    async def _ask_verdict(
        self, id: AttemptId, handoff: OpenHandoff, suspects: Sequence[Suspect], message: str
    ) -> None:
        verdict = await self._abort(id, handoff, suspects)
        log.error(
            "pages_damaged", id=str(id), source=handoff.link.record.prefill_id, pages=len(suspects),
            verdict="unknown" if verdict is None else verdict.value,
        )  # fmt: skip
        self._answers.put(VerdictArrived(id, verdict, message))

    async def _renew(self, link: PeerLink, ids: list[AttemptId]) -> None:
        incarnation = link.record.prefill_incarnation
        request = handoff_pb2.RenewRequest(
            worker_id=link.record.prefill_id,
            incarnation=incarnation,
            ids=[codec.encode_id(id) for id in ids],
            quarantine_seen=self._quarantine_seen.get(incarnation, 0),
        )
        sent_at = monotonic_s()
        try:
            reply = await self._links.stub(link).Renew(request, timeout=CALL_TIMEOUT_S)
        except ASK_ERRORS as error:
            log.warning("lease_renewal_failed", source=link.record.prefill_id, why=error_of(error).log_text)
            return
        ended = {codec.decode_id(id) for id in reply.ended}
        for id in ended:
            if self._open.pop(id, None) is not None:
                metrics.STALE_MESSAGES_TOTAL.labels("renew").inc()
        renewed = tuple(id for id in ids if id not in ended)
        if renewed and reply.HasField("lease_s"):
            self._answers.put(LeasesRenewed(renewed, sent_at + reply.lease_s))
        if keys := tuple(PageKey(key) for key in reply.quarantined if len(key) == KEY_BYTES):
            log.warning("pages_quarantined", source=link.record.prefill_id, keys=len(keys))
            self._answers.put(QuarantineArrived(link.record.prefill_id, keys))
        self._quarantine_seen[incarnation] = reply.quarantine_number


def decode_chunk(id: AttemptId, chunk: handoff_pb2.ChunkReady, num_parts: int) -> PublishedChunk:
    """Raises `LinkBroken` unless every part of every page has a digest, and a tag, or none has."""
    pages = tuple(PageId(page) for page in chunk.pages)
    wanted = len(pages) * num_parts
    if len(chunk.digests) not in (0, wanted):
        raise LinkBroken(f"{id}: {len(chunk.digests)} digests came with {len(pages)} pages of {num_parts} parts")
    if len(chunk.tags) not in (0, wanted) or any(len(tag) != TAG_BYTES for tag in chunk.tags):
        raise LinkBroken(f"{id}: {len(pages)} pages of {num_parts} parts need {wanted} tags of {TAG_BYTES} bytes")
    if len(chunk.window_slots) not in (0, len(pages)):
        raise LinkBroken(f"{id}: {len(chunk.window_slots)} window slots came with {len(pages)} pages")
    digests, tags = join_parts(chunk.digests, num_parts) or None, join_tags(chunk.tags, num_parts) or None
    return PublishedChunk(id, chunk.first_page, pages, digests, tags, tuple(chunk.window_slots))
