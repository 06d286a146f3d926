"""A worker's gRPC server: options, TLS and the authentication of callers."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from baton.domain.ids import Incarnation
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.rpc.auth_interceptor import AuthInterceptor, CallRules, RejectedCall
from baton.rpc.call_token import OPEN_CLUSTER_KEY
from baton.rpc.channel import server_credentials
from baton.rpc.channel_pool import MAX_MESSAGE_BYTES, PING_INTERVAL_S, PING_TIMEOUT_S
from baton.rpc.request_budget import MAX_PROMPT_BYTES

MAX_CALLS_PER_CONNECTION = 1024
"""Calls open at once; further ones wait in the caller."""
MAX_CONNECTIONS = 1024
MAX_METADATA_BYTES = 16 * 1024
HANDSHAKE_TIMEOUT_S = 5.0

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
class RunningServer:
    """A running server; `port` is the bound one."""

    server: grpc.aio.Server
    port: int

    async def stop(self, grace_s: float = 0.0) -> None:
        """Accepts no new calls, gives running ones `grace_s`, then cancels them. Idempotent."""
        await self.server.stop(grace_s)


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
        rules = CallRules(self.incarnation, keys or (OPEN_CLUSTER_KEY,), open=not keys)
        return AuthInterceptor(rules, self.on_rejected)


async def start_server(
    host: str, port: int, register: Callable[[grpc.aio.Server], None], auth: ServerAuth
) -> RunningServer:
    """Binds host:port (0: a free one), calls `register` to add servicers, and serves callers that `auth` accepts.

    Raises `OSError` with the address if it cannot be bound.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=(auth.interceptor(),))
    register(server)
    bound = _bind(server, f"{host}:{port}", auth.trust)
    if bound == 0:
        await server.stop(None)
        raise OSError(errno.EADDRINUSE, f"gRPC port {port} on {host} is in use or not an address of this machine")
    await server.start()
    return RunningServer(server, bound)


def _bind(server: grpc.aio.Server, address: str, trust: ClusterTrust) -> int:
    """The bound port; 0 on failure."""
    credentials = server_credentials(trust)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError:
        return 0
