"""Dials listeners at a port of their own, and those that cannot be reached there by gRPC.

A gRPC message costs several times what a framed one does: its bytes pass threads and queues of gRPC on either side
(ADR 166). Nothing here is encrypted, so workers with certificates have no such port.
"""

from __future__ import annotations

import asyncio
import contextlib
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
AGAIN_S = 0.25
"""For a port that was not reached while gRPC was: the network may have come back in between."""
MAX_UNANSWERED = 2
"""Connections in a row that ended before the listener said anything: one may have been in a network that went away."""


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

    It counts for `AVOID_S` as one that cannot if gRPC can at the same moment. A network that is away says nothing of a
    port, and a session that went to gRPC meanwhile would stay there. A port where connections end before the listener
    says anything cannot be reached either: something else listens there, such as a proxy.
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
        self._num_unanswered = 0

    async def connect(self, address: str, incarnation: Incarnation) -> WireConnection:
        """See `Wire`. `address` is the gRPC one."""
        self._count_unanswered()
        if self._avoided_until is not None and self._clock() < self._avoided_until:
            return await self._grpc.connect(address, incarnation)
        if not self._num_unanswered:
            with contextlib.suppress(LinkBroken):
                return await self._by_socket(address, incarnation)
        found = await self._grpc.connect(address, incarnation)  # if this fails, too, the process is gone
        try:
            async with asyncio.timeout(AGAIN_S):
                connection = await self._again_by_socket(address, incarnation)
        except (LinkBroken, TimeoutError) as error:
            self._num_unanswered = 0
            self._avoid(str(error) or "it does not answer")
            return found
        except BaseException:
            found.close()
            raise
        found.close()
        return connection

    async def _again_by_socket(self, address: str, incarnation: Incarnation) -> WireConnection:
        """Raises `LinkBroken` if the port is still not reached, or says nothing again and again."""
        if self._num_unanswered >= MAX_UNANSWERED:
            raise LinkBroken("its connections end without an answer")
        return await self._by_socket(address, incarnation)

    async def _by_socket(self, address: str, incarnation: Incarnation) -> WireConnection:
        connection = await self._socket.connect(_port_of(self._session_address, address), incarnation)
        self._newest = connection if isinstance(connection, SocketConnection) else None
        return connection

    def _count_unanswered(self) -> None:
        newest, self._newest = self._newest, None
        if newest is not None:
            self._num_unanswered = 0 if newest.was_answered else self._num_unanswered + 1

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
