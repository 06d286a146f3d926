"""Links of this worker to those whose pages it reads. Runs in the asyncio loop.

Follows the registry. A new worker of a role in `source_roles`, or a new incarnation of one, gets a `Hello`, is
connected to the puller and probed with real pages. Then the link is up and announced. A failed link is retried at every
change of the registry and every heartbeat; its reason is logged when it changes. The series of a worker go when it
leaves.

A source that NIXL reaches over TCP only is read over the next transport, if it has one: UCX may abort it when its
reader is killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.domain.errors import BatonError, LinkBroken
from baton.domain.fingerprint import Fingerprint
from baton.domain.ids import Incarnation, PageId, WorkerId
from baton.domain.liveness import Liveness
from baton.domain.timing.attempt_times import ImportTimes, to_us
from baton.domain.trust import RecordVerifier
from baton.domain.worker import BrokenLink, LinkRecord, WorkerRecord, WorkerRole, WorkerStatus
from baton.engine.handoff.import_commands import AllocateProbePages, FreeProbePages, LinkMailbox, SourceReplaced
from baton.engine.reply import Reply
from baton.rpc.gen import handoff_pb2
from baton.rpc.version import PROTOCOL_VERSION
from baton.store.store import WorkerRegistry
from baton.telemetry import metrics
from baton.telemetry.logs import get_logger
from baton.telemetry.peer_series import PeerSeries
from baton.transfer.base import PullEvent, PullOutcome, SourceInfo
from baton.transfer.nixl_mover import TCP_PATH
from baton.transfer.probe import probe_bandwidth
from baton.transfer.puller_set import PullerSet
from baton.worker.handoff.session_or_call import HELLO_TIMEOUT_S, HandoffPeer, PeerClients

log = get_logger()

PROBE_BYTES = 4 * 1024 * 1024

MAX_REASON_CHARS = 160
"""Of a broken link in this worker's record."""

LINK_GRACE_TTLS = 5
"""Registration lifetimes that a link outlives its worker's last announcement by."""


@dataclass(frozen=True, slots=True)
class LinkIdentity:
    """This worker as its sources see it. `grace_s`: longest silence of a linked worker in the registry.

    `source_roles`: of the workers to link to. Decode reads the prompts that prefill computes; prefill reads cached
    pages of all. `optional`: a source is skipped that gives no pages, or over no transport but TCP by NIXL.
    `num_leading_parts`: parts of a page before its window part; None: there is none. `has_window_slots`: those of the
    pages here have slots of their own.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    model: str
    fingerprint: Fingerprint
    page_bytes: int
    grace_s: float
    source_roles: frozenset[WorkerRole] = frozenset({WorkerRole.PREFILL})
    optional: bool = False
    num_leading_parts: int | None = None
    has_window_slots: bool = False

    def probe_parts(self, source: SourceInfo) -> int | None:
        """Leading parts of pages that a probe reads; None: all. Where there are slots, a page may be without one."""
        return self.num_leading_parts if self.has_window_slots or source.window_bytes else None


@dataclass(frozen=True, slots=True)
class PeerLink:
    """A worker that passed the probe. `path`: how its bytes move, as far as the transport can tell.

    `in_session`: it is asked in a session, and not by calls. `session_address`: see `WorkerRecord`.
    """

    record: LinkRecord
    address: str
    path: str
    role: WorkerRole = WorkerRole.PREFILL
    in_session: bool = False
    session_address: str = ""


class PeerLinks:
    """The links of one worker."""

    def __init__(
        self,
        identity: LinkIdentity,
        registry: WorkerRegistry,
        peers: PeerClients,
        puller: PullerSet,
        mailbox: LinkMailbox,
        on_change: Callable[[], None],
    ) -> None:
        self._identity = identity
        self._registry = registry
        self._peers = peers
        self._puller = puller
        self._mailbox = mailbox
        self._on_change = on_change
        self._liveness = Liveness(identity.grace_s)
        self._verifier = RecordVerifier(peers.trust)
        self._links: dict[WorkerId, PeerLink] = {}
        self._failures: dict[WorkerId, str] = {}
        self._draining: set[Incarnation] = set()
        self._skipped: set[Incarnation] = set()  # sources that are not of use
        self._series = PeerSeries()
        self._connected: dict[WorkerId, Incarnation] = {}  # last connected to the puller
        self._pulled: dict[WorkerId, tuple[int, int]] = {}  # bytes and microseconds since link-up

    def get(self, id: WorkerId, incarnation: Incarnation) -> PeerLink:
        """The link to exactly this process. Raises `LinkBroken` when there is none."""
        link = self._links.get(id)
        if link is None or link.record.prefill_incarnation != incarnation:
            raise LinkBroken(
                f"no link from {self._identity.worker_id} to {id}: {self._failures.get(id, 'not met yet')}"
            )
        return link

    def records(self) -> tuple[LinkRecord, ...]:
        """Links for this worker's record, with what they have moved so far."""
        return tuple(self._moved(id, link) for id, link in self._links.items())

    def broken(self) -> tuple[BrokenLink, ...]:
        """Prefill workers that could not be linked, for this worker's record."""
        failures = [(id, why) for id, why in self._failures.items() if id not in self._links]
        return tuple(BrokenLink(id, why[:MAX_REASON_CHARS]) for id, why in failures)

    def _moved(self, id: WorkerId, link: PeerLink) -> LinkRecord:
        num_bytes, pull_us = self._pulled[id]
        return replace(link.record, path=link.path, num_pulled_bytes=num_bytes, pull_us=pull_us)

    def up(self) -> tuple[PeerLink, ...]:
        """All links."""
        return tuple(self._links.values())

    def stub(self, link: PeerLink) -> HandoffPeer:
        """What asks the peer. Raises `LinkBroken` for one that was asked in a session, if its link is down."""
        record = link.record
        if link.in_session:
            self.get(record.prefill_id, record.prefill_incarnation)
        return self._peers.get(
            link.address, record.prefill_incarnation, in_session=link.in_session, session_address=link.session_address
        )

    async def run(self) -> None:
        """Follows the registry until cancelled."""
        async for _ in self._registry.changes():
            try:
                workers = await self._registry.workers()
            except BatonError:  # the store is unreachable: keep the links
                self._liveness.observe_outage(asyncio.get_running_loop().time())
                continue
            now = asyncio.get_running_loop().time()
            trusted = [worker for worker in workers if self._verifier.accept(worker)]
            incarnations = {worker.incarnation for worker in trusted}
            self._liveness.observe(incarnations, now)
            refused = [worker for worker in workers if worker.incarnation not in incarnations]
            await self._reconcile(self._sources(trusted), self._sources(refused), now)
            self._verifier.retain(incarnations)

    def close(self) -> None:
        """Drops every link."""
        for id in list(self._links):
            self._drop(id, "this worker leaves")

    async def _reconcile(self, workers: list[WorkerRecord], refused: list[WorkerRecord], now: float) -> None:
        """Links the announced `workers`. `refused`: records that are not trusted; they end no link."""
        announced = {worker.incarnation for worker in workers}
        self._draining |= {worker.incarnation for worker in workers if worker.status is WorkerStatus.DRAINING}
        for id, link in list(self._links.items()):
            incarnation = link.record.prefill_incarnation
            left = incarnation in self._draining and not self._liveness.is_present(incarnation, now)
            if left or self._liveness.is_gone(incarnation, now):
                self._drop(id, "it left" if left else "its announcement ended")
            else:
                self._set_state(id, incarnation in announced)
        self._skipped &= announced
        self._peers.retain(announced)
        new = [w for w in workers if not self._is_linked(w) and w.incarnation not in self._skipped]
        await asyncio.gather(*(self._connect(worker) for worker in new))
        self._draining &= announced | {link.record.prefill_incarnation for link in self._links.values()}
        for worker in refused:
            if worker.id not in self._links:
                self._fail(worker.id, self._verifier.reason(worker))
        for departed in self._series.peers() - self._links.keys() - {worker.id for worker in workers + refused}:
            self._series.remove(departed)
            self._puller.readmit(WorkerId(departed))
            self._failures.pop(WorkerId(departed), None)

    def observe_pull(self, source: WorkerId, event: PullEvent) -> None:
        """Records the metrics of a pull that ended, unless its source has left."""
        if source not in self._links:
            return
        num_bytes, pull_us = self._pulled[source]
        self._pulled[source] = num_bytes + event.num_bytes, pull_us + to_us(event.seconds)
        labels = (f"{source}->{self._identity.worker_id}", self._puller.transport(source))
        self._series.labels(source, metrics.TRANSFER_BYTES_TOTAL, *labels).inc(event.num_bytes)
        self._series.labels(source, metrics.TRANSFER_SECONDS, *labels).observe(event.seconds)
        self._series.labels(source, metrics.TRANSFER_DESCRIPTORS, *labels).observe(len(event.pull.local_pages))
        if event.outcome is PullOutcome.DONE and event.num_bytes:
            self._follow_path(source)

    def observe_import(self, source: WorkerId, times: ImportTimes) -> None:
        """Records the exposed transfer time of a committed import, unless its source has left."""
        if source in self._links:
            labels = (f"{source}->{self._identity.worker_id}", self._puller.transport(source))
            self._series.labels(source, metrics.TRANSFER_EXPOSED_SECONDS, *labels).observe(1e-6 * times.exposed_us)

    def transport(self, source: WorkerId) -> str:
        """Transport of the link to `source`."""
        return self._puller.transport(source)

    def path(self, source: WorkerId) -> str:
        """Path of bytes from `source`, as far as the transport knows."""
        return self._puller.path(source)

    def find(self, id: WorkerId, incarnation: Incarnation) -> PeerLink | None:
        """The link to exactly this process, if there is one."""
        link = self._links.get(id)
        return link if link is not None and link.record.prefill_incarnation == incarnation else None

    def _sources(self, workers: list[WorkerRecord]) -> list[WorkerRecord]:
        roles, me = self._identity.source_roles, self._identity.worker_id
        return [worker for worker in workers if worker.role in roles and worker.id != me]

    def _set_state(self, id: WorkerId, works: bool) -> None:
        self._series.labels(id, metrics.LINK_STATE, id, self._identity.worker_id).set(int(works))

    def _is_linked(self, worker: WorkerRecord) -> bool:
        link = self._links.get(worker.id)
        return link is not None and link.record.prefill_incarnation == worker.incarnation

    async def _connect(self, worker: WorkerRecord) -> None:
        if worker.id in self._links:
            self._drop(worker.id, "it restarted")
        try:
            source = await self._hello(worker)
            if source is None:
                return self._skip(worker, "it gives no pages")
            num_bytes, seconds = await self._reach(source)
            if self._puller.path(worker.id) == TCP_PATH:
                source, num_bytes, seconds = await self._avoid_tcp(worker, source) or (source, num_bytes, seconds)
        except BatonError as error:
            self._peers.end(worker.incarnation, "the link has failed")
            self._fail(worker.id, error.log_text)
            return
        if self._identity.optional and self._puller.path(worker.id) == TCP_PATH:
            return self._skip(worker, "its pages would come over TCP by NIXL: a killed reader may end its source")
        bandwidth = num_bytes / seconds if seconds else 0.0
        record = LinkRecord(worker.id, source.incarnation, source.transport, bandwidth, num_bytes)
        self._links[worker.id] = link = PeerLink(
            record, worker.address, self._puller.path(worker.id), worker.role, self._peers.in_session(worker),
            worker.session_address,
        )  # fmt: skip
        self._pulled[worker.id] = 0, 0
        self._failures.pop(worker.id, None)
        self._report_up(link)
        self._on_change()

    async def _reach(self, source: SourceInfo) -> tuple[int, float]:
        """Connects to a source and probes it; returns (bytes, seconds)."""
        self._report_replaced(source)
        await asyncio.to_thread(self._puller.connect, source)
        return await self._probe(source)

    async def _avoid_tcp(self, worker: WorkerRecord, source: SourceInfo) -> tuple[SourceInfo, int, float] | None:
        """Links over the next transport to a source that was reached over TCP by NIXL.

        Returns the source over the transport that it has now, with bytes and seconds of its probe: TCP again if the
        other fails. None, without effect, if there is no other here.
        """
        id, incarnation, avoided = worker.id, worker.incarnation, source.transport
        if not self._puller.rule_out(id, incarnation, avoided):
            return None
        self._puller.disconnect(id)
        try:
            other = await self._hello(worker)
            if other is not None:
                probed = await self._reach(other)
                log.info("link_avoids_tcp", source=id, transport=other.transport, avoided=avoided)
                return other, *probed
        except BatonError as error:
            log.info("link_needs_tcp", source=id, why=error.log_text)
        self._puller.readmit(id)
        self._puller.disconnect(id)
        return source, *await self._reach(source)

    def _skip(self, worker: WorkerRecord, why: str) -> None:
        """Leaves a worker alone for its life. This is no failure, so that no series shows it."""
        self._skipped.add(worker.incarnation)
        log.info("link_skipped", source=worker.id, why=why)
        self._peers.end(worker.incarnation, why)
        self._puller.disconnect(worker.id)

    def _report_replaced(self, source: SourceInfo) -> None:
        """Ends imports from the old process before the puller can read pages of the new one."""
        id = source.worker_id
        if self._connected.setdefault(id, source.incarnation) != source.incarnation:
            self._connected[id] = source.incarnation
            self._mailbox.put(SourceReplaced(id))

    async def _hello(self, worker: WorkerRecord) -> SourceInfo | None:
        mine = self._identity
        hello = handoff_pb2.HelloRequest(
            worker_id=mine.worker_id,
            incarnation=mine.incarnation,
            protocol_version=PROTOCOL_VERSION,
            fingerprint=mine.fingerprint.digest,
            model=mine.model,
            transports=self._puller.offered(worker.id, worker.incarnation),
            parts=[handoff_pb2.FingerprintPart(name=part.name, digest=part.digest) for part in mine.fingerprint.parts],
        )
        return await self._peers.hello(worker, hello, optional=mine.optional)

    async def _probe(self, source: SourceInfo) -> tuple[int, float]:
        """Pulls real pages into pages of the pool; returns (bytes, seconds)."""
        num_pages = max(1, min(source.num_pages, PROBE_BYTES // self._identity.page_bytes))
        pages = await self._allocate_probe_pages(num_pages)
        return await asyncio.to_thread(
            probe_bandwidth, self._puller, source, pages, len(pages), num_parts=self._identity.probe_parts(source),
            on_pages_free=lambda: self._free_probe_pages(pages),
        )  # fmt: skip

    async def _allocate_probe_pages(self, num_pages: int) -> list[PageId]:
        while num_pages:
            reply: Reply[list[PageId] | None] = Reply(on_late=self._free_probe_pages)
            self._mailbox.put(AllocateProbePages(num_pages, reply))
            pages = await reply.wait(HELLO_TIMEOUT_S)
            if pages is not None:
                return pages
            num_pages //= 2
        raise LinkBroken("no page is free for a probe")

    def _free_probe_pages(self, pages: list[PageId] | None) -> None:
        if pages is not None:
            self._mailbox.put(FreeProbePages(tuple(pages)))

    def _fail(self, id: WorkerId, reason: str) -> None:
        if self._failures.get(id) != reason:
            log.warning("link_failed", source=id, reason=reason)
        self._failures[id] = reason
        self._set_state(id, works=False)
        self._puller.disconnect(id)

    def _follow_path(self, source: WorkerId) -> None:
        """A link may go on by another way: a reader of the stream falls back to calls, and returns.

        Only pages that have come tell: a puller knows no path of a source that it has lost.
        """
        link, path = self._links[source], self._puller.path(source)
        if path != link.path:
            log.info("link_path_changed", source=source, before=link.path, path=path)
            self._links[source] = replace(link, path=path)
            self._report_path(source, path)

    def _report_path(self, source: WorkerId, path: str) -> None:
        self._series.drop(source, metrics.LINK_TRANSPORT_INFO)
        self._series.labels(source, metrics.LINK_TRANSPORT_INFO, source, self._identity.worker_id, path).set(1)

    def _drop(self, id: WorkerId, reason: str) -> None:
        link = self._links.pop(id)
        del self._pulled[id]
        self._peers.end(link.record.prefill_incarnation, reason)
        log.warning("link_down", source=id, reason=reason)
        self._series.remove(id)
        self._puller.disconnect(id)
        self._on_change()

    def _report_up(self, link: PeerLink) -> None:
        record = link.record
        me, peer = self._identity.worker_id, record.prefill_id
        self._set_state(peer, works=True)
        bandwidth = metrics.LINK_BANDWIDTH_BYTES_PER_SECOND
        self._series.labels(peer, bandwidth, peer, me).set(record.bandwidth_bytes_per_s)
        self._report_path(peer, link.path)
        log.info(
            "link_up",
            source=peer,
            transport=record.transport,
            path=link.path,
            bandwidth_gb_per_s=round(record.bandwidth_bytes_per_s / 1e9, 2),
            probe_bytes=record.num_probe_bytes,
        )
        if link.path == TCP_PATH:
            log.warning("link_over_tcp", source=peer, why="a killed reader may end the source; see --transport")
