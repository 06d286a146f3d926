"""A gRPC server with Baton's options. Workers start one each; knows no service."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from baton.rpc.client import MAX_MESSAGE_BYTES

# Ports are not shared: a second process on the same port is a mistake and must hear of it.
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
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


async def start_server(host: str, port: int, register: Callable[[grpc.aio.Server], None]) -> RunningServer:
    """Binds host:port (0: a free one), lets `register` add its servicers, and serves.

    Raises `OSError` that names the address when it cannot be bound.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    register(server)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError:
        bound = 0
    if bound == 0:
        await server.stop(None)
        raise OSError(errno.EADDRINUSE, f"gRPC port {port} on {host} is in use or not an address of this machine")
    await server.start()
    return RunningServer(server, bound)
