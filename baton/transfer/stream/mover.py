"""The reading side of the stream transport. Slower than NIXL (one more copy a side), but it can be cancelled.

Each link has two reader threads; pulls end in the transfer thread. A read that has ended writes nothing more, so a late
pull ends at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import grpc
import structlog

from baton.domain.errors import LinkBroken
from baton.domain.ids import PageId, WorkerId
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.kv.memory import PoolMemory, write_leading
from baton.kv.page_tags import TagVerifier
from baton.rpc.channel import may_be_damaged
from baton.rpc.gen import handoff_pb2
from baton.transfer.active_pull import ActivePull, pull_problem
from baton.transfer.base import OnPullEvent, SourceInfo
from baton.transfer.digest import wrong_positions
from baton.transfer.puller import ThreadedPuller
from baton.transfer.stream import CALLS_PATH, PAGES_PATH, TRANSPORT
from baton.transfer.stream.link import StreamLink
from baton.transfer.stream.page_connection import CannotConnect, PageConnection, PageConnections
from baton.transfer.stream.page_wire import part_pages

_log = structlog.get_logger(__name__)
GRACE_S = 0.02
"""Time that a read outlives its pull's deadline, so that the transfer thread reports it late first."""


class StreamPuller(ThreadedPuller):
    """Decode's side."""

    def __init__(self, memory: PoolMemory, on_event: OnPullEvent, trust: ClusterTrust = OPEN_CLUSTER) -> None:
        self._paths: dict[WorkerId, str] = {}

        def make_mover(wake: Callable[[], None]) -> StreamMover:
            return StreamMover(memory, wake, trust, self._paths)

        super().__init__(TRANSPORT, memory.part_ends, make_mover, on_event)

    def path(self, source: WorkerId) -> str:
        """`stream/tcp` or `stream/grpc`: how the last pages from `source` came; `stream` before the first ones."""
        return self._paths.get(source, TRANSPORT)


@dataclass(frozen=True, slots=True)
class _ReadResult:
    """Result of a read, by way of `path`. `failure` None: every page arrived."""

    path: str
    num_bytes: int
    corrupt: tuple[int, ...]
    failure: str | None


@dataclass(frozen=True, slots=True)
class _Transfer:
    active: ActivePull
    link: StreamLink
    outcome: Future[_ReadResult]


class StreamMover:
    """See `baton.transfer.puller.Mover`."""

    def __init__(
        self,
        memory: PoolMemory,
        wake: Callable[[], None],
        trust: ClusterTrust = OPEN_CLUSTER,
        paths: dict[WorkerId, str] | None = None,
    ) -> None:
        """`paths`: gets how the pages of each source came; other threads may read it."""
        self._memory = memory
        self._wake = wake
        self._paths = {} if paths is None else paths
        self._trust = trust
        self._verifier = TagVerifier(trust)
        self._links: dict[WorkerId, StreamLink] = {}
        self._retired: list[StreamLink] = []
        self._transfers: list[_Transfer] = []

    def link(self, source: SourceInfo) -> None:
        self.unlink(source.worker_id)
        self._links[source.worker_id] = StreamLink(source, self._trust)

    def unlink(self, source: WorkerId) -> None:
        link = self._links.pop(source, None)
        self._paths.pop(source, None)
        if link is not None:
            self._retired.append(link)
            self._drop_drained()

    def start(self, active: ActivePull) -> None:
        link = self._links.get(active.pull.source)
        if link is None:
            active.fail(f"no link to {active.pull.source}")
        elif reason := pull_problem(active.pull, self._memory.num_pages, link.info):
            active.fail(reason)
        else:
            link.num_active_pulls += 1
            outcome = link.executor.submit(_read, link, active, self._memory, self._verifier)
            self._transfers.append(_Transfer(active, link, outcome))
            outcome.add_done_callback(lambda _: self._wake())

    def progress(self) -> float | None:
        for transfer in self._transfers:
            if transfer.active.late:
                transfer.outcome.cancel()  # a queued one; a running call has the same deadline
        self._transfers = [transfer for transfer in self._transfers if not self._end_if_done(transfer)]
        self._drop_drained()
        return None

    def close(self) -> None:
        for link in [*self._links.values(), *self._retired]:
            link.close()
        self._links.clear()
        self._retired.clear()

    def _end_if_done(self, transfer: _Transfer) -> bool:
        if not transfer.outcome.done():
            return False
        transfer.link.num_active_pulls -= 1
        if transfer.outcome.cancelled():
            transfer.active.fail("past its deadline")
            return True
        if (error := transfer.outcome.exception()) is not None:  # unforeseen: it ends this pull, not the thread
            _log.error("read_failed", source=transfer.link.info.worker_id, exc_info=error)
            transfer.active.fail(repr(error))
            return True
        landed = transfer.outcome.result()
        transfer.active.num_bytes = landed.num_bytes
        source = transfer.link.info.worker_id
        if landed.num_bytes and self._links.get(source) is transfer.link:
            self._paths[source] = landed.path
        if landed.failure is None:
            transfer.active.complete(landed.corrupt)
        else:
            transfer.active.fail(landed.failure)
        return True

    def _drop_drained(self) -> None:
        for link in [link for link in self._retired if link.num_active_pulls == 0]:
            self._retired.remove(link)
            link.close()


def _read(link: StreamLink, active: ActivePull, memory: PoolMemory, verifier: TagVerifier) -> _ReadResult:
    """Reads the pages of a pull in a reader thread, until all have come, the deadline passes or the source fails."""
    read = _Read(active, memory, verifier)
    request = handoff_pb2.ReadPagesRequest(
        incarnation=link.info.incarnation,
        pages=active.pull.remote_pages,
        leading_bytes=0 if active.pull.num_parts is None else active.pull.page_bytes(memory),
    )
    pages = link.page_connections()
    if pages is not None:
        try:
            return read.by_pages(pages, request)
        except CannotConnect as error:
            link.use_calls(error)
    return read.by_call(link, request)


class _Read:
    """One read. `num_pages` have arrived, in order."""

    def __init__(self, active: ActivePull, memory: PoolMemory, verifier: TagVerifier) -> None:
        self._active = active
        self._pull = active.pull
        self._page_bytes = active.pull.page_bytes(memory)  # that are read of a page
        self._deadline = active.deadline
        self._memory = memory
        self._verifier = verifier
        self._num_pages = 0
        self._corrupt: list[int] = []

    def by_pages(self, connections: PageConnections, request: handoff_pb2.ReadPagesRequest) -> _ReadResult:
        """Reads on a page connection. Raises `CannotConnect` if there is none."""
        pages, page_bytes, until = self._pull.local_pages, self._page_bytes, self._deadline + GRACE_S
        step, failure = part_pages(page_bytes), None
        try:
            body = request.SerializeToString()
            with connections.request(body, len(pages) * page_bytes, until) as connection:
                for start in range(0, len(pages), step):
                    self._receive(connection, pages[start : start + step], until)
        except CannotConnect:
            raise
        except (LinkBroken, OSError) as error:
            failure = str(error) or type(error).__name__
        return self._result(PAGES_PATH, failure)

    def by_call(self, link: StreamLink, request: handoff_pb2.ReadPagesRequest) -> _ReadResult:
        """Reads by a call of the Handoff service."""
        call = None
        with link.connection() as connection:
            try:
                left_s = max(0.0, self._deadline + GRACE_S - time.monotonic())
                call = connection.stub.ReadPages(request, timeout=left_s)
                for message in call:
                    with memoryview(message.data) as data:
                        self._land(data)
                num_pages = len(self._pull.local_pages)
                ended = self._num_pages < num_pages
                failure = f"the stream ended after {self._num_pages} pages" if ended else None
            except grpc.RpcError as error:
                failure = _error_text(error)
                if _blames_connection(error, self._deadline):
                    link.replace(connection)
            except ValueError as error:  # bytes that fit no page, or a closed channel
                failure = str(error)
            finally:
                if call is not None:
                    call.cancel()
        return self._result(CALLS_PATH, failure)

    def _receive(self, connection: PageConnection, pages: Sequence[PageId], until: float) -> None:
        """Receives the next pages, where they belong if the host can reach it."""
        views = self._memory.host_views(pages, self._page_bytes)
        if views is None:
            part = memoryview(bytearray(len(pages) * self._page_bytes))
            connection.read_into([part], until)
            self._land(part)
        else:
            connection.read_into(views, until)
            self._check(len(pages))

    def _land(self, data: memoryview) -> None:
        """Writes the next pages and checks them. Raises `ValueError` for a misfit."""
        self._check(self._write(data))

    def _check(self, num_pages: int) -> None:
        """Compares the next pages with their digests and tags."""
        landed = slice(self._num_pages, self._num_pages + num_pages)
        self._num_pages = landed.stop
        found = self._active.found
        self._corrupt += wrong_positions(self._memory, self._pull, landed, self._verifier, found)

    def _write(self, data: memoryview) -> int:
        page_bytes, pages = self._page_bytes, self._pull.local_pages[self._num_pages :]
        num_pages, rest = divmod(len(data), page_bytes)
        if rest or num_pages > len(pages):
            raise ValueError(f"{len(data)} bytes are not at most {len(pages)} pages of {page_bytes}")
        edges = range(0, len(data), page_bytes)
        write_leading(self._memory, pages[:num_pages], [data[start : start + page_bytes] for start in edges])
        return num_pages

    def _result(self, path: str, failure: str | None) -> _ReadResult:
        return _ReadResult(path, self._num_pages * self._page_bytes, tuple(self._corrupt), failure)


def _blames_connection(error: object, deadline: float) -> bool:
    out_of_time = time.monotonic() >= deadline
    return isinstance(error, grpc.Call) and may_be_damaged(error, out_of_time=out_of_time)


def _error_text(error: object) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
