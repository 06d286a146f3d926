"""The link of a stream puller to one source: page connections, a channel for calls, and the threads that read.

A channel that may be damaged is replaced. Owned by `StreamMover`; its reader threads use it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

import grpc
import structlog

from baton.domain.trust import ClusterTrust
from baton.rpc.channel import call_token_issuer, open_sync_channel, with_call_tokens
from baton.rpc.gen import handoff_pb2_grpc
from baton.transfer.base import SourceInfo
from baton.transfer.stream.page_connection import PageConnections, page_address

THREADS_PER_LINK = 2
CALLS_S = 120.0
"""Time without another try after page connections could not be opened."""
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # a page may be larger than the 4 MiB default
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # otherwise a restarted source inherits the back-off of the old one
)
_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class CallConnection:
    """A channel, which has one connection of its own. `num_calls`: those under way."""

    channel: grpc.Channel
    stub: handoff_pb2_grpc.HandoffStub
    num_calls: int = 0


class StreamLink:
    """One incarnation of one source, with its reader threads.

    Calls use the newest channel.
    """

    def __init__(self, info: SourceInfo, trust: ClusterTrust) -> None:
        """Raises `LinkBroken` for metadata that is no address."""
        self.info = info
        address = None if trust.tls is not None else page_address(info.address, info.metadata)
        issuer = call_token_issuer(trust, info.incarnation)
        self._pages = None if address is None else PageConnections(address, issuer)
        self._calls_until = 0.0
        self._closed = False
        self.num_active_pulls = 0
        self._trust = trust
        self._lock = Lock()
        self._newest = self._connect()
        self._replaced: set[CallConnection] = set()
        self.executor = ThreadPoolExecutor(THREADS_PER_LINK, thread_name_prefix=f"baton-read-{info.worker_id}")

    @contextmanager
    def connection(self) -> Iterator[CallConnection]:
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

    def page_connections(self) -> PageConnections | None:
        """None if the source has none, or if they could not be opened lately."""
        return None if time.monotonic() < self._calls_until else self._pages

    def use_calls(self, why: Exception) -> None:
        """Reads by calls for `CALLS_S`, unless the link is closed."""
        if self._closed:
            return
        self._calls_until = time.monotonic() + CALLS_S
        _log.warning("pages_read_by_calls", source=self.info.worker_id, reason=str(why))

    def replace(self, connection: CallConnection) -> None:
        """Gives later calls a new connection, if they would still get this one."""
        with self._lock:
            if connection is self._newest:
                self._replaced.add(connection)
                self._newest = self._connect()

    def close(self) -> None:
        """Cancels calls in progress; returns when none of them can write any more."""
        self._closed = True
        with self._lock:
            connections = [self._newest, *self._replaced]
        if self._pages is not None:
            self._pages.close()
        for connection in connections:
            connection.channel.close()
        self.executor.shutdown(cancel_futures=True)
        self._newest.channel.close()  # a reader may have replaced it meanwhile

    def _connect(self) -> CallConnection:
        channel = open_sync_channel(self.info.address, self._trust, _CHANNEL_OPTIONS)
        stub = handoff_pb2_grpc.HandoffStub(with_call_tokens(channel, self._trust, self.info.incarnation))
        return CallConnection(channel, stub)
