"""A gRPC server with Baton's options, behind a door that checks who calls. Workers start one each; knows no service."""

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
"""A prompt of a million tokens takes a third of it. A larger request is refused before it is read into memory."""
MAX_CALLS_PER_CONNECTION = 4096
"""Calls open at once; more wait at their caller's side."""

# Ports are not shared: a second process on the same port is a mistake and must hear of it.
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
    """A server that takes calls; `port` is the bound one."""

    server: grpc.aio.Server
    port: int

    async def stop(self, grace_s: float = 0.0) -> None:
        """Takes no new calls, gives running ones `grace_s`, then cancels them; idempotent."""
        await self.server.stop(grace_s)


@dataclass(frozen=True, slots=True)
class ServerAuth:
    """Who is let in: callers that hold what `trust` names and mean this `incarnation`.

    `on_rejected` hears, in the event loop, of every call that is not.
    """

    incarnation: Incarnation
    trust: ClusterTrust = OPEN_CLUSTER
    on_rejected: Callable[[RejectedCall], None] = lambda rejected: None

    def interceptor(self) -> AuthInterceptor:
        """What stands before the servicers."""
        key = self.trust.key("call-token")
        return AuthInterceptor(None if key is None else CallTokenVerifier(key, self.incarnation), self.on_rejected)


async def start_server(
    host: str, port: int, register: Callable[[grpc.aio.Server], None], auth: ServerAuth
) -> RunningServer:
    """Binds host:port (0: a free one), lets `register` add its servicers, and serves those whom `auth` lets in.

    Raises `OSError` that names the address when it cannot be bound.
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
    """The bound port; 0 when there is none."""
    credentials = server_credentials(trust)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError:
        return 0
