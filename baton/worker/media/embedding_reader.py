"""Reads embeddings out of encode workers' registered memory: a prefill worker's side of NIXL. Owned by the event loop.

The first embedding of a process comes over the stream, and with it the place of its memory. A link is made
and probed meanwhile, so no image waits for it. A source that cannot be linked or read is left to the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation, PageId, WorkerId
from baton.domain.trust import ClusterTrust
from baton.domain.worker import WorkerRecord
from baton.kv.page_tags import PageTag
from baton.rpc.gen import handoff_pb2
from baton.telemetry import metrics
from baton.telemetry.logs import get_logger
from baton.transfer.base import Pull, PullEvent, PullOutcome, SourceInfo
from baton.transfer.nixl import TRANSPORT, NixlPuller
from baton.transfer.nixl_mover import TCP_PATH
from baton.worker.media.embedding_pages import EmbeddingPages

MAX_READ_S = 5.0
"""Longest read, so that there is time for the stream behind it."""

log = get_logger()


class ReadFailed(Exception):
    """The pages of an embedding were not read as they are at their source. The message says why."""


class EmbeddingReader:
    """`worker_id`: of this worker. Makes its puller with the first source."""

    def __init__(self, worker_id: WorkerId, incarnation: Incarnation, trust: ClusterTrust) -> None:
        self._name = WorkerId(f"{worker_id}/images")  # another agent of this process reads KV pages
        self._incarnation = incarnation
        self._trust = trust
        self._pages = EmbeddingPages()
        self._puller: NixlPuller | None = None
        self._linking = asyncio.Lock()
        self._linked: dict[WorkerId, Incarnation] = {}
        self._seen: dict[Incarnation, None] = {}  # linked, being linked, or left to the stream
        self._num_pulls = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def transport(self) -> str:
        """Transport of what is read; "" before the first link."""
        return "" if self._puller is None else self._puller.transport

    @property
    def num_free_pages(self) -> int:
        """Pages of registered memory that no read may write to."""
        return self._pages.num_free

    def is_linked(self, record: WorkerRecord) -> bool:
        """True if exactly this process's memory can be read."""
        return self._linked.get(record.id) == record.incarnation

    def wants_source(self, record: WorkerRecord) -> bool:
        """True if this process's memory is to be named with the next embedding."""
        return not self._is_closed and record.incarnation not in self._seen

    def link_soon(
        self, record: WorkerRecord, source: handoff_pb2.SourceInfo, announced: Collection[Incarnation]
    ) -> None:
        """Links to a source that an embedding came with, and drops the links to those not `announced`. Returns at
        once."""
        if not self.wants_source(record):
            return
        self._seen[record.incarnation] = None
        task = asyncio.create_task(self._link(record, source, frozenset(announced)), name="link-embeddings")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def read(
        self,
        record: WorkerRecord,
        pages: Sequence[int],
        tags: Sequence[PageTag] | None,
        num_bytes: int,
        timeout_s: float,
    ) -> bytearray:
        """`num_bytes` from these pages of a linked source. Raises `ReadFailed`.

        A read that is late or cancelled keeps its pages here until nothing of it can arrive any more.
        """
        local = self._pages.take(num_bytes)
        if local is None:
            raise ReadFailed("there is no room for it in registered memory")
        if self._puller is None or not self.is_linked(record) or len(local) != len(pages):
            self._pages.release(local)
            raise ReadFailed("its pages are not those of a link")
        return await self._submit(self._puller, record, self._pull(record, pages, local, tags, timeout_s), num_bytes)

    async def close(self) -> None:
        """Ends the transfer thread. Idempotent."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        async with self._linking:
            puller, self._puller = self._puller, None
            self._linked.clear()
        if puller is not None:
            await asyncio.to_thread(puller.close)

    def _pull(
        self,
        record: WorkerRecord,
        pages: Sequence[int],
        local: list[PageId],
        tags: Sequence[PageTag] | None,
        timeout_s: float,
    ) -> Pull:
        self._num_pulls += 1
        deadline_s = min(timeout_s, MAX_READ_S)
        return Pull(self._num_pulls, record.id, [PageId(page) for page in pages], local, None, deadline_s, tags)

    async def _submit(self, puller: NixlPuller, record: WorkerRecord, pull: Pull, num_bytes: int) -> bytearray:
        """The bytes of a read. Raises `ReadFailed`."""
        loop = asyncio.get_running_loop()
        data: asyncio.Future[bytearray] = loop.create_future()

        def on_event(event: PullEvent) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(self._on_event, event, record, num_bytes, data)

        puller.submit_to(pull, on_event)
        return await data

    def _on_event(
        self, event: PullEvent, record: WorkerRecord, num_bytes: int, data: asyncio.Future[bytearray]
    ) -> None:
        local = list(event.pull.local_pages)
        if event.outcome is PullOutcome.DONE and not data.done():
            data.set_result(self._pages.read(local, num_bytes))
        elif not data.done():
            data.set_exception(ReadFailed(event.reason or event.outcome.value))
        if event.outcome is PullOutcome.CORRUPT:
            metrics.INTEGRITY_FAILURES_TOTAL.labels("embedding").inc()
        if event.outcome is not PullOutcome.LATE:
            self._pages.release(local)
        if event.outcome in (PullOutcome.LATE, PullOutcome.FAILED) and self.is_linked(record):
            self._drop(record.id)
            log.warning("embedding_link_down", source=record.id, why=event.reason)
        if event.outcome is PullOutcome.FAILED:
            self._seen.pop(record.incarnation, None)  # it is linked anew with the next embedding from the stream

    async def _link(
        self, record: WorkerRecord, source: handoff_pb2.SourceInfo, announced: frozenset[Incarnation]
    ) -> None:
        for gone in [id for id, one in self._linked.items() if one not in announced]:
            self._drop(gone)
        self._seen = {one: None for one in self._seen if one in announced}
        try:
            async with self._linking:
                puller = await self._open()
                await asyncio.to_thread(puller.connect, _checked_source(source, record))
                await self._probe(puller, record)
                self._linked[record.id] = record.incarnation
        except (LinkBroken, ImportError, ReadFailed) as error:
            log.warning("embedding_link_failed", source=record.id, why=str(error)[:200])
            self._seen[record.incarnation] = None  # a probe that failed has taken it out: it is left to the stream
            if self._puller is not None:
                self._puller.disconnect(record.id)
            return
        log.info("embedding_link_up", source=record.id, transport=puller.transport, path=puller.path(record.id))

    async def _probe(self, puller: NixlPuller, record: WorkerRecord) -> None:
        """Reads a page, behind which UCX tells by which way. Raises `ReadFailed`, or `LinkBroken` for TCP."""
        local = self._pages.take(1)
        if local is None:
            raise LinkBroken("there is no room for a probe in registered memory")
        await self._submit(puller, record, self._pull(record, [0], local, None, MAX_READ_S), 1)
        if puller.path(record.id) == TCP_PATH:
            raise LinkBroken("its bytes would come over TCP: a killed reader may end a source that others read")

    async def _open(self) -> NixlPuller:
        """The puller. Raises `ImportError` or `LinkBroken`."""
        if self._is_closed:
            raise LinkBroken("this worker leaves")
        if self._puller is None:
            made = (self._name, self._incarnation, self._pages.memory, lambda event: None, self._trust)
            self._puller = await asyncio.to_thread(NixlPuller, *made)
        return self._puller

    def _drop(self, id: WorkerId) -> None:
        del self._linked[id]
        if self._puller is not None:
            self._puller.disconnect(id)


def _checked_source(source: handoff_pb2.SourceInfo, record: WorkerRecord) -> SourceInfo:
    """The memory of the process of `record`. Raises `LinkBroken` if it is another one's."""
    if (source.worker_id, source.incarnation, source.transport) != (record.id, record.incarnation, TRANSPORT):
        raise LinkBroken(f"{record.id} names memory of another worker, {source.worker_id[:120]!r}")
    return SourceInfo(
        record.id, record.incarnation, record.address, source.transport,
        source.metadata, source.base_address, source.num_pages, source.page_bytes,
    )  # fmt: skip
