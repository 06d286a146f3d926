"""A worker's gRPC server: options, TLS and the authentication of callers."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from baton.domain.ids import Incarnation
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.rpc.auth_interceptor import AuthInterceptor, RejectedCall
from baton.rpc.call_token import CallTokenVerifier
from baton.rpc.channel import server_credentials
from baton.rpc.channel_pool import MAX_MESSAGE_BYTES, PING_INTERVAL_S, PING_TIMEOUT_S

MAX_REQUEST_BYTES = 16 * 1024 * 1024
"""Three times a prompt of a million tokens. A larger request is refused before it is read into memory."""
MAX_CALLS_PER_CONNECTION = 4096
"""Calls open at once; further ones wait in the caller."""

# Ports are not shared: a second process on the same port is a mistake and must fail.
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
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
        key = self.trust.key("call-token")
        return AuthInterceptor(None if key is None else CallTokenVerifier(key, self.incarnation), self.on_rejected)


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
