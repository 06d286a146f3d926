"""A worker's gRPC server: options, TLS, the authentication of callers, and a restart when grpc.aio stops serving.

One call whose method's name is not UTF-8 ends the loop of a grpc.aio server (1.85) and closes its port: one flipped bit
is enough. Its callers see broken connections and retry.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import structlog

from baton.domain.ids import Incarnation
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.rpc.auth_interceptor import AuthInterceptor, CallRules, RejectedCall
from baton.rpc.call_token import OPEN_CLUSTER_KEY
from baton.rpc.channel import server_credentials
from baton.rpc.channel_pool import MAX_MESSAGE_BYTES, PING_INTERVAL_S, PING_TIMEOUT_S
from baton.rpc.replies.reply_tags import reply_key
from baton.rpc.request_budget import MAX_PROMPT_BYTES

MAX_CALLS_PER_CONNECTION = 1024
"""Calls open at once; further ones wait in the caller."""
MAX_CONNECTIONS = 1024
MAX_METADATA_BYTES = 16 * 1024
HANDSHAKE_TIMEOUT_S = 5.0
STOP_MARGIN_S = 5.0
"""Longest wait for a stopped server, beyond the grace of its calls. The process ends all the same."""

REBIND_S = 0.1
"""Pause before a crashed server's port is bound again, if that failed."""

log = structlog.get_logger(__name__)

# Ports are not shared: a second process on the same port is a mistake and must fail. Without bdp_probe a connection
# buffers 64 KiB of a request that nobody reads, else megabytes.
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_PROMPT_BYTES),
    ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_TIMEOUT_S)),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.keepalive_time_ms", int(1000 * PING_INTERVAL_S)),
    ("grpc.keepalive_timeout_ms", int(1000 * PING_TIMEOUT_S)),
    ("grpc.http2.ping_timeout_ms", int(1000 * PING_TIMEOUT_S)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
)


@dataclass(frozen=True, slots=True)
class ServerAuth:
    """Accepts callers that hold the secrets of `trust` and address this `incarnation`.

    `on_rejected` gets every other call, in the event loop.
    """

    incarnation: Incarnation
    trust: ClusterTrust = OPEN_CLUSTER
    on_rejected: Callable[[RejectedCall], None] = lambda rejected: None

    def interceptor(self) -> AuthInterceptor:
        """The interceptor of one server."""
        keys = self.trust.keys("call-token")
        tags_replies = reply_key(self.trust) is not None
        rules = CallRules(self.incarnation, keys or (OPEN_CLUSTER_KEY,), open=not keys, tags_replies=tags_replies)
        return AuthInterceptor(rules, self.on_rejected)


class RunningServer:
    """A running server; `port` is the bound one. Made by `start_server`."""

    def __init__(self, server: grpc.aio.Server, port: int, build: Callable[[int], tuple[grpc.aio.Server, int]]) -> None:
        """`build` makes a server on a port: (server, bound port; 0 on failure)."""
        self.server = server
        self.port = port
        self._build = build
        self._stop_lock = asyncio.Lock()
        self._stopping: asyncio.Task[None] | None = None
        self._task = asyncio.get_running_loop().create_task(self._keep_serving(), name="grpc-server")

    async def stop(self, grace_s: float = 0.0) -> None:
        """Accepts no new calls, gives running ones `grace_s`, then cancels them. Bounded in time.

        Later calls wait for the first one, whose grace counts.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(grace_s))
        await asyncio.shield(self._stopping)

    async def _stop(self, grace_s: float) -> None:
        server = self.server
        # Before the task is cancelled: its wait is a part of the server.
        stop = asyncio.ensure_future(self._stop_server(server, grace_s))
        ended, _ = await asyncio.wait([stop], timeout=grace_s + STOP_MARGIN_S)
        self._task.cancel()
        _, waiting = await asyncio.wait([self._task], timeout=STOP_MARGIN_S)
        if waiting or not ended:
            log.warning("grpc_server_does_not_stop", port=self.port)
        if self.server is not server:
            stop = asyncio.ensure_future(self._stop_server(self.server, 0.0))  # it was replaced meanwhile
            await asyncio.wait([stop], timeout=STOP_MARGIN_S)

    async def _stop_server(self, server: grpc.aio.Server, grace_s: float | None) -> None:
        """One stop at a time: gRPC reads freed memory when two end together (grpcio 1.85, a segmentation fault)."""
        async with self._stop_lock:
            await server.stop(grace_s)

    async def _keep_serving(self) -> None:
        """Replaces a server that has crashed, on the same port."""
        while True:
            try:
                await self.server.wait_for_termination()
            except Exception as error:  # the root of the crashed server
                log.error("grpc_server_crashed", port=self.port, reason=f"{type(error).__name__}: {error}")
            else:
                return
            await self._stop_server(self.server, None)
            await self._start_again()

    async def _start_again(self) -> None:
        while True:
            self.server, bound = self._build(self.port)
            if bound:
                return await self.server.start()
            log.error("grpc_port_taken", port=self.port, retry_s=REBIND_S)
            await self._stop_server(self.server, None)
            await asyncio.sleep(REBIND_S)


async def start_server(
    host: str, port: int, register: Callable[[grpc.aio.Server], None], auth: ServerAuth
) -> RunningServer:
    """Binds host:port (0: a free one), calls `register` to add servicers, and serves callers that `auth` accepts.

    Calls `register` again for each server that replaces a crashed one. Raises `OSError` with the address if it cannot
    be bound.
    """
    interceptor = auth.interceptor()  # one for all: it knows which tokens were used

    def build(port: int) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=(interceptor,))
        register(server)
        return server, _bind(server, f"{host}:{port}", auth.trust)

    server, bound = build(port)
    if bound == 0:
        await server.stop(None)
        raise OSError(errno.EADDRINUSE, f"gRPC port {port} on {host} is in use or not an address of this machine")
    await server.start()
    return RunningServer(server, bound, build)


def _bind(server: grpc.aio.Server, address: str, trust: ClusterTrust) -> int:
    """The bound port; 0 on failure."""
    credentials = server_credentials(trust)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError:
        return 0
