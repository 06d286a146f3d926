"""Answers the workers that read pages of this one: they ask by calls (`handoff_server`) or in sessions (`served_link`).

Translates messages. Decisions are those of `ExportTable`, in the engine thread.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from baton.domain.errors import BatonError, InvalidRequest, LinkBroken, PageVerdict
from baton.domain.fingerprint import Fingerprint, FingerprintPart
from baton.domain.handoff import PublishedChunk, Suspect
from baton.domain.ids import AttemptId, Incarnation, PageId, PageKey, WorkerId
from baton.domain.request import OutputToken
from baton.engine.handoff.export_commands import (
    CommitExport,
    ExportMailbox,
    OpenExport,
    ReleaseExport,
    RenewalAnswer,
    RenewLeases,
)
from baton.engine.handoff.export_events import Seal
from baton.engine.reply import Reply
from baton.kv.keys import KEY_BYTES
from baton.kv.page_digests import join_parts, split_parts
from baton.kv.page_tags import split_tags
from baton.rpc import codec
from baton.rpc.gen import common_pb2, handoff_pb2
from baton.rpc.tokens.token_check import set_check
from baton.rpc.version import PROTOCOL_VERSION
from baton.telemetry.logs import get_logger
from baton.transfer.base import MemoryRegion
from baton.transfer.factory import choose_transport
from baton.worker.handoff.handoff_log import HandoffEvent, HandoffLog
from baton.worker.request_validator import MAX_NAME_CHARS, validate_id

log = get_logger()

ENGINE_TIMEOUT_S = 30.0
"""Longest wait for the engine's answer; longer than any step."""
OPEN_TIMEOUT_S = 5.0
"""Longest wait for an export of cached pages: whoever asks has computed them by then."""
MAX_EXPORT_PAGES = 8192
"""Most pages that one export of cached pages is asked for."""

_VERDICTS = {
    None: common_pb2.PAGE_VERDICT_UNSPECIFIED,
    PageVerdict.SOURCE: common_pb2.PAGE_VERDICT_SOURCE,
    PageVerdict.LINK: common_pb2.PAGE_VERDICT_LINK,
}


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """This worker as those see it that read its pages. `transports`: name -> metadata for a puller, best first.

    `granted_lease_s`: a renewed lease holds that long even if the attempt ends; None: it ends with the attempt.
    `num_page_parts`: parts of a page, each with a digest and a tag. `gives_cached`: cached pages may be read, too.
    `window_region`: of window parts that are no part of these pages.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    model: str
    fingerprint: Fingerprint
    transports: Mapping[str, bytes]
    base_address: int
    num_pages: int
    page_bytes: int
    watch_timeout_s: float
    granted_lease_s: float | None = None
    num_page_parts: int = 1
    gives_cached: bool = False
    window_region: MemoryRegion | None = None


class HandoffHandlers:
    """What other workers may ask of this one. Errors that are no answer are raised as `BatonError`."""

    def __init__(self, terms: LinkConfig, mailbox: ExportMailbox, handoffs: HandoffLog) -> None:
        self._terms = terms
        self._mailbox = mailbox
        self._handoffs = handoffs

    async def hello(self, request: handoff_pb2.HelloRequest) -> handoff_pb2.HelloReply:
        """The memory of this worker, or a refusal that names what differs."""
        terms, windows = self._terms, self._terms.window_region
        try:
            self._check_peer(request)
            transport = choose_transport(tuple(terms.transports), request.transports)
        except LinkBroken as error:
            log.warning("link_refused", peer=request.worker_id[:MAX_NAME_CHARS], why=str(error))
            return handoff_pb2.HelloReply(refused=codec.encode_failure(error))
        return handoff_pb2.HelloReply(
            source=handoff_pb2.SourceInfo(
                worker_id=terms.worker_id,
                incarnation=terms.incarnation,
                transport=transport,
                metadata=terms.transports[transport],
                base_address=terms.base_address,
                num_pages=terms.num_pages,
                page_bytes=terms.page_bytes,
                window_base_address=0 if windows is None else windows.address,
                num_window_slots=0 if windows is None else windows.num_pages,
                window_bytes=0 if windows is None else windows.page_bytes,
            )
        )

    async def watch(self, request: handoff_pb2.WatchRequest) -> AsyncGenerator[handoff_pb2.HandoffEvent, None]:
        """Yields all events of a handoff, from the first; ends after `seal` or `failed`. Closing it ends the watch."""
        events = self._handoffs.watch(validate_id(request.id), self._terms.watch_timeout_s)
        async with aclosing(events):
            async for event in events:
                yield _encode(event, self._terms.num_page_parts)

    async def open_export(self, request: handoff_pb2.OpenExportRequest) -> handoff_pb2.OpenExportReply:
        """Pins cached pages and announces them, or refuses."""
        try:
            id, keys = self._read_open(request)
            reply: Reply[PublishedChunk] = Reply(on_late=lambda chunk: self._mailbox.put(ReleaseExport(id, "late")))
            self._mailbox.put(OpenExport(id, keys, request.first_page, reply))
            chunk = await reply.wait(OPEN_TIMEOUT_S)
        except BatonError as error:
            return handoff_pb2.OpenExportReply(refused=codec.encode_failure(error))
        return handoff_pb2.OpenExportReply(chunk=_encode_chunk(chunk, self._terms.num_page_parts))

    def _read_open(self, request: handoff_pb2.OpenExportRequest) -> tuple[AttemptId, tuple[PageKey, ...]]:
        """Raises `LinkBroken` if this worker gives no cached pages, `InvalidRequest` for anything malformed."""
        if not self._terms.gives_cached:
            raise LinkBroken("this worker gives no cached pages")
        if len(request.page_keys) > MAX_EXPORT_PAGES or any(len(key) != KEY_BYTES for key in request.page_keys):
            raise InvalidRequest(f"an export has at most {MAX_EXPORT_PAGES} page keys of {KEY_BYTES} bytes")
        return validate_id(request.id), tuple(PageKey(key) for key in request.page_keys)

    async def commit(self, request: handoff_pb2.CommitRequest) -> handoff_pb2.CommitReply:
        """Ends a handoff after the last read. Valid if every pin was held without a gap."""
        reply: Reply[bool] = Reply()
        self._mailbox.put(CommitExport(codec.decode_id(request.id), reply))
        valid = await reply.wait(ENGINE_TIMEOUT_S)
        return handoff_pb2.CommitReply(valid=valid, reason="" if valid else "lease_ended")

    async def renew(self, request: handoff_pb2.RenewRequest) -> handoff_pb2.RenewReply:
        """Renews leases."""
        reply: Reply[RenewalAnswer] = Reply()
        ids = tuple(codec.decode_id(id) for id in request.ids)
        self._mailbox.put(RenewLeases(ids, reply, request.quarantine_seen))
        answer = await reply.wait(ENGINE_TIMEOUT_S)
        return handoff_pb2.RenewReply(
            ended=[codec.encode_id(id) for id in answer.ended],
            lease_s=self._terms.granted_lease_s,
            quarantined=answer.quarantined,
            quarantine_number=answer.quarantine_number,
        )

    async def abort(self, request: common_pb2.AbortRequest) -> common_pb2.AbortReply:
        """Releases an export; with suspects it judges them first."""
        id, reason = validate_id(request.id), request.reason[:MAX_NAME_CHARS]
        if not request.suspects:
            self._mailbox.put(ReleaseExport(id, reason))
            return common_pb2.AbortReply()
        listed = request.suspects[: self._terms.num_pages]
        num_parts = self._terms.num_page_parts
        whole = (one for one in listed if len(one.digests) == num_parts)
        suspects = tuple(Suspect(one.index, PageId(one.page), join_parts(one.digests, num_parts)[0]) for one in whole)
        reply: Reply[PageVerdict | None] = Reply()
        self._mailbox.put(ReleaseExport(id, reason, suspects, reply))
        return common_pb2.AbortReply(verdict=_VERDICTS[await reply.wait(ENGINE_TIMEOUT_S)])

    def _check_peer(self, request: handoff_pb2.HelloRequest) -> None:
        """Raises `LinkBroken` for an incompatible peer; the message names the first field that differs."""
        if request.protocol_version != PROTOCOL_VERSION:
            raise LinkBroken(f"protocol_version: {PROTOCOL_VERSION} here, {request.protocol_version} there")
        if request.model != self._terms.model:
            raise LinkBroken(f"model: {self._terms.model!r} here, {request.model[:120]!r} there")
        parts = tuple(FingerprintPart(part.name, part.digest) for part in request.parts)
        difference = self._terms.fingerprint.difference(request.fingerprint, parts)
        if difference is not None:
            raise LinkBroken(difference)


def _encode_chunk(chunk: PublishedChunk, num_parts: int) -> handoff_pb2.ChunkReady:
    return handoff_pb2.ChunkReady(
        first_page=chunk.first_page,
        pages=chunk.pages,
        digests=None if chunk.digests is None else split_parts(chunk.digests, num_parts),
        tags=None if chunk.tags is None else split_tags(chunk.tags),
        window_slots=chunk.window_slots,
    )


def _encode(event: HandoffEvent, num_parts: int) -> handoff_pb2.HandoffEvent:
    match event:
        case PublishedChunk():
            return handoff_pb2.HandoffEvent(chunk=_encode_chunk(event, num_parts))
        case Seal():
            token = OutputToken(event.index, event.first_token.token, event.first_token.logprobs)
            seal = handoff_pb2.Seal(
                first_token=codec.encode_token(token),
                finish_reason=codec.encode_finish(event.finish),
                num_cached_tokens=event.times.cached_tokens,
                num_pages=event.num_pages,
            )
            set_check(seal)
            return handoff_pb2.HandoffEvent(seal=seal)
        case _:
            return handoff_pb2.HandoffEvent(failed=codec.encode_failure(event))
