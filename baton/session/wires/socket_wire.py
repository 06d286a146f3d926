"""Dials listeners at a port of their own, and those that cannot be reached there by gRPC.

A gRPC message costs several times what a framed one does: its bytes pass threads and queues of gRPC on either side
(ADR 166). Nothing here is encrypted, so workers with certificates have no such port.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.rpc.channel import call_token_issuer
from baton.session.wires.socket_connection import MAGIC, METHOD, SocketConnection
from baton.session.wires.wire import Wire, WireConnection

REACH_TIMEOUT_S = 1.0
AVOID_S = 120.0
"""How long a port that could not be reached is not tried again."""


class SocketWire:
    """Connects to `address`, host:port. `trust` gives the key of the call token."""

    def __init__(self, trust: ClusterTrust = OPEN_CLUSTER) -> None:
        self._trust = trust

    async def connect(self, address: str, incarnation: Incarnation) -> SocketConnection:
        """See `Wire`."""
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(REACH_TIMEOUT_S):
                _, connection = await loop.create_connection(SocketConnection, host.strip("[]"), int(port))
        except TimeoutError:
            raise LinkBroken(f"{address} does not answer") from None
        except (OSError, ValueError) as error:
            raise LinkBroken(f"{address} cannot be reached: {error}") from None
        connection.begin(MAGIC + call_token_issuer(self._trust, incarnation).issue(METHOD, b""))
        return connection


class ReachingWire:
    """Connects to one listener: by `socket`, or by `grpc` while its port of sessions cannot be reached.

    A port counts as unreachable for `AVOID_S`, too, if a connection to it ended before the listener said anything:
    something else listens there, such as a proxy.
    """

    def __init__(
        self,
        socket: Wire,
        grpc: Wire,
        session_address: str,
        on_fallback: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`session_address`: as announced. `on_fallback` gets the reason when gRPC begins to be used instead."""
        self._socket = socket
        self._grpc = grpc
        self._session_address = session_address
        self._clock = clock
        self._on_fallback = on_fallback
        self._avoided_until: float | None = None
        self._newest: SocketConnection | None = None

    async def connect(self, address: str, incarnation: Incarnation) -> WireConnection:
        """See `Wire`. `address` is the gRPC one."""
        newest, self._newest = self._newest, None
        if newest is not None and not newest.was_answered:
            self._avoid("it ended without an answer")
        if self._avoided_until is None or self._clock() >= self._avoided_until:
            try:
                connection = await self._socket.connect(_port_of(self._session_address, address), incarnation)
            except LinkBroken as error:
                found = await self._grpc.connect(address, incarnation)  # if this fails, too, the process is gone
                self._avoid(str(error))
                return found
            self._newest = connection if isinstance(connection, SocketConnection) else None
            return connection
        return await self._grpc.connect(address, incarnation)

    def _avoid(self, why: str) -> None:
        self._avoided_until = self._clock() + AVOID_S
        self._on_fallback(why)


def _port_of(session_address: str, grpc_address: str) -> str:
    """host:port of a worker's session port. `session_address`: as announced, host:port or a port of the same host.

    Raises `LinkBroken` for what is no address.
    """
    host, _, port = session_address.rpartition(":")
    if not (port.isascii() and port.isdecimal() and 0 < int(port[:9]) < 1 << 16):
        raise LinkBroken(f"{session_address[:64]!r} is no address of sessions")
    return f"{host or grpc_address.rpartition(':')[0]}:{int(port)}"
