"""The source of the stream transport: serves reads on page connections, and as calls of the Handoff service.

Calls serve peers that cannot reach the port of page connections, and clusters with certificates, where page bytes are
encrypted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from baton.domain.ids import Incarnation
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.kv.memory import PoolMemory
from baton.rpc.auth_interceptor import RejectedCall
from baton.rpc.gen import handoff_pb2
from baton.transfer.stream import TRANSPORT
from baton.transfer.stream.page_server import PageServer

MAX_MESSAGE_BYTES = 1024 * 1024
"""Most page bytes in one message, or one page if that is more."""


@dataclass(frozen=True, slots=True)
class PageEndpoint:
    """Where a source listens for page connections. `port` 0 takes a free one.

    `advertised`: host:port for peers; "": the host of the worker's gRPC address, and the bound port. `on_rejected` gets
    every rejected request, in any thread.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertised: str = ""
    on_rejected: Callable[[RejectedCall], None] = lambda rejected: None


class StreamSource:
    """Answers reads from the pool."""

    transport = TRANSPORT

    def __init__(
        self,
        incarnation: Incarnation,
        memory: PoolMemory,
        trust: ClusterTrust = OPEN_CLUSTER,
        endpoint: PageEndpoint = PageEndpoint(),
    ) -> None:
        """Listens at once. Raises `LinkBroken` if the port is taken."""
        self._incarnation = incarnation
        self._memory = memory
        self._advertised = endpoint.advertised
        self._pages = None
        if trust.tls is None:
            self._pages = PageServer(incarnation, memory, trust, (endpoint.host, endpoint.port), endpoint.on_rejected)
        self._closed = False

    def metadata(self) -> bytes:
        """Where to open page connections: host:port, or a port of the host of the gRPC address. Empty: nowhere."""
        if self._pages is None:
            return b""
        return (self._advertised or str(self._pages.port)).encode()

    @property
    def num_connections(self) -> int:
        """Open page connections."""
        return 0 if self._pages is None else self._pages.num_connections

    def close(self) -> None:
        """Stops serving reads; idempotent."""
        self._closed = True
        if self._pages is not None:
            self._pages.close()

    async def read_pages(
        self,
        request: handoff_pb2.ReadPagesRequest,
        context: grpc.aio.ServicerContext[handoff_pb2.ReadPagesRequest, handoff_pb2.PageBytes],
    ) -> AsyncIterator[handoff_pb2.PageBytes]:
        """Yields `PageBytes`: the requested pages or their leading bytes, in order, up to 1 MiB per message.

        Aborts with FAILED_PRECONDITION for another incarnation, OUT_OF_RANGE for a page that
        does not exist or has fewer bytes, UNAVAILABLE when closed.
        """
        if request.incarnation != self._incarnation:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another incarnation of this worker is meant")
        if any(page >= self._memory.num_pages for page in request.pages):
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, f"a page is outside the pool of {self._memory.num_pages}")
        if request.leading_bytes > self._memory.page_bytes:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, f"a page has {self._memory.page_bytes} bytes")
        num_bytes = request.leading_bytes or self._memory.page_bytes
        step = max(1, MAX_MESSAGE_BYTES // num_bytes)
        for start in range(0, len(request.pages), step):
            if self._closed:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the source is closed")
            pages = request.pages[start : start + step]
            yield handoff_pb2.PageBytes(data=b"".join(self._memory.read(pages, num_bytes)))
