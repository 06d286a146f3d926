"""Transfer over gRPC streams, for machines without NIXL. Slower (two copies per side), but it can be cancelled.

`StreamSource.read_pages` serves `ReadPages` of the Handoff service; `StreamPuller` is decode's side. Each link has a
channel and two reader threads; pulls end in the transfer thread. A cancelled call writes nothing more, so a late pull
ends at once. A connection that may be damaged is replaced.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

import grpc
import grpc.aio

from baton.domain.ids import Incarnation, PageId, WorkerId
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.kv.memory import PoolMemory
from baton.kv.page_tags import TagVerifier
from baton.rpc.channel import may_be_damaged, open_sync_channel, with_call_tokens
from baton.rpc.gen import handoff_pb2, handoff_pb2_grpc
from baton.transfer.active_pull import ActivePull, pull_problem
from baton.transfer.base import OnPullEvent, SourceInfo
from baton.transfer.digest import wrong_positions
from baton.transfer.puller import ThreadedPuller

TRANSPORT = "stream"
MAX_MESSAGE_BYTES = 1024 * 1024
"""Most page bytes in one message, or one page if that is more."""
THREADS_PER_LINK = 2
GRACE_S = 0.02
"""Time that a call outlives its pull's deadline, so that the transfer thread reports it late first."""
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # a page may be larger than the 4 MiB default
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # otherwise a restarted source inherits the back-off of the old one
)


class StreamSource:
    """Prefill's side: answers `ReadPages` from the pool."""

    transport = TRANSPORT

    def __init__(self, incarnation: Incarnation, memory: PoolMemory) -> None:
        self._incarnation = incarnation
        self._memory = memory
        self._closed = False

    def metadata(self) -> bytes:
        """Empty: the gRPC address is enough."""
        return b""

    def close(self) -> None:
        """Stops serving reads; idempotent."""
        self._closed = True

    async def read_pages(
        self,
        request: handoff_pb2.ReadPagesRequest,
        context: grpc.aio.ServicerContext[handoff_pb2.ReadPagesRequest, handoff_pb2.PageBytes],
    ) -> AsyncIterator[handoff_pb2.PageBytes]:
        """Yields `PageBytes`: the requested pages, whole and in order, up to 1 MiB per message.

        Aborts with FAILED_PRECONDITION for another incarnation, OUT_OF_RANGE for a page that
        does not exist, UNAVAILABLE when closed.
        """
        if request.incarnation != self._incarnation:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another incarnation of this worker is meant")
        if any(page >= self._memory.num_pages for page in request.pages):
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, f"a page is outside the pool of {self._memory.num_pages}")
        step = max(1, MAX_MESSAGE_BYTES // self._memory.page_bytes)
        for start in range(0, len(request.pages), step):
            if self._closed:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the source is closed")
            pages = request.pages[start : start + step]
            yield handoff_pb2.PageBytes(data=b"".join(self._memory.read(pages)))


class StreamPuller(ThreadedPuller):
    """Decode's side."""

    def __init__(self, memory: PoolMemory, on_event: OnPullEvent, trust: ClusterTrust = OPEN_CLUSTER) -> None:
        def make_mover(wake: Callable[[], None]) -> StreamMover:
            return StreamMover(memory, wake, trust)

        super().__init__(TRANSPORT, memory.page_bytes, make_mover, on_event)


@dataclass(slots=True, eq=False)
class _Connection:
    """A channel, which has one connection of its own. `num_calls`: those under way."""

    channel: grpc.Channel
    stub: handoff_pb2_grpc.HandoffStub
    num_calls: int = 0


class _Link:
    """One incarnation of one source. Both reader threads use its newest connection."""

    def __init__(self, info: SourceInfo, trust: ClusterTrust) -> None:
        self.info = info
        self.num_active_pulls = 0
        self._trust = trust
        self._lock = Lock()
        self._newest = self._connect()
        self._replaced: set[_Connection] = set()
        self.executor = ThreadPoolExecutor(THREADS_PER_LINK, thread_name_prefix=f"baton-read-{info.worker_id}")

    @contextmanager
    def connection(self) -> Iterator[_Connection]:
        """The connection for one call. A replaced one closes after the last of its calls."""
        with self._lock:
            connection = self._newest
            connection.num_calls += 1
        try:
            yield connection
        finally:
            with self._lock:
                connection.num_calls -= 1
                unused = connection.num_calls == 0 and connection in self._replaced
                if unused:
                    self._replaced.remove(connection)
            if unused:
                connection.channel.close()

    def replace(self, connection: _Connection) -> None:
        """Gives later calls a new connection, if they would still get this one."""
        with self._lock:
            if connection is self._newest:
                self._replaced.add(connection)
                self._newest = self._connect()

    def close(self) -> None:
        """Cancels calls in progress; returns when none of them can write any more."""
        with self._lock:
            connections = [self._newest, *self._replaced]
        for connection in connections:
            connection.channel.close()
        self.executor.shutdown(cancel_futures=True)
        self._newest.channel.close()  # a reader may have replaced it meanwhile

    def _connect(self) -> _Connection:
        channel = open_sync_channel(self.info.address, self._trust, _CHANNEL_OPTIONS)
        stub = handoff_pb2_grpc.HandoffStub(with_call_tokens(channel, self._trust, self.info.incarnation))
        return _Connection(channel, stub)


@dataclass(frozen=True, slots=True)
class _ReadResult:
    """Result of a read. `failure` None: every page arrived."""

    num_bytes: int
    corrupt: tuple[int, ...]
    failure: str | None


@dataclass(frozen=True, slots=True)
class _Transfer:
    active: ActivePull
    link: _Link
    outcome: Future[_ReadResult]


class StreamMover:
    """See `baton.transfer.puller.Mover`."""

    def __init__(self, memory: PoolMemory, wake: Callable[[], None], trust: ClusterTrust = OPEN_CLUSTER) -> None:
        self._memory = memory
        self._wake = wake
        self._trust = trust
        self._verifier = TagVerifier(trust)
        self._links: dict[WorkerId, _Link] = {}
        self._retired: list[_Link] = []
        self._transfers: list[_Transfer] = []

    def link(self, source: SourceInfo) -> None:
        self.unlink(source.worker_id)
        self._links[source.worker_id] = _Link(source, self._trust)

    def unlink(self, source: WorkerId) -> None:
        link = self._links.pop(source, None)
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
        landed = transfer.outcome.result()
        transfer.active.num_bytes = landed.num_bytes
        if landed.failure is None:
            transfer.active.complete(landed.corrupt)
        else:
            transfer.active.fail(landed.failure)
        return True

    def _drop_drained(self) -> None:
        for link in [link for link in self._retired if link.num_active_pulls == 0]:
            self._retired.remove(link)
            link.close()


def _read(link: _Link, active: ActivePull, memory: PoolMemory, verifier: TagVerifier) -> _ReadResult:
    """Reads the pages of a pull in a reader thread, until all have come, the deadline passes or the source fails."""
    pull, num_pages = active.pull, 0
    corrupt: list[int] = []
    request = handoff_pb2.ReadPagesRequest(incarnation=link.info.incarnation, pages=pull.remote_pages)
    call = None
    with link.connection() as connection:
        try:
            call = connection.stub.ReadPages(request, timeout=max(0.0, active.deadline + GRACE_S - time.monotonic()))
            for message in call:
                landed = slice(num_pages, num_pages + _write_pages(message.data, pull.local_pages[num_pages:], memory))
                num_pages = landed.stop
                corrupt += wrong_positions(memory, pull, landed, verifier)
            failure = None if num_pages == len(pull.local_pages) else f"the stream ended after {num_pages} pages"
        except grpc.RpcError as error:
            failure = _error_text(error)
            if _blames_connection(error, active.deadline):
                link.replace(connection)
        except ValueError as error:  # bytes that fit no page, or a closed channel
            failure = str(error)
        finally:
            if call is not None:
                call.cancel()
    return _ReadResult(num_pages * memory.page_bytes, tuple(corrupt), failure)


def _write_pages(data: bytes, pages: Sequence[PageId], memory: PoolMemory) -> int:
    """Copies whole pages of `data` to the first of `pages`; returns their number. Raises `ValueError` for a misfit."""
    num_pages, rest = divmod(len(data), memory.page_bytes)
    if rest or num_pages > len(pages):
        raise ValueError(f"{len(data)} bytes are not at most {len(pages)} pages of {memory.page_bytes}")
    with memoryview(data) as view:
        edges = range(0, len(data), memory.page_bytes)
        memory.write(pages[:num_pages], [view[start : start + memory.page_bytes] for start in edges])
    return num_pages


def _blames_connection(error: object, deadline: float) -> bool:
    out_of_time = time.monotonic() >= deadline
    return isinstance(error, grpc.Call) and may_be_damaged(error, out_of_time=out_of_time)


def _error_text(error: object) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
