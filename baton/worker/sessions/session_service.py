"""Where a worker's sessions are opened: at a port of their own, and by `Session.Connect` of its gRPC server."""

from __future__ import annotations

import grpc

from baton.domain.ids import Incarnation
from baton.domain.trust import ClusterTrust
from baton.session.listener import SessionListener
from baton.session.wires.grpc_wire import SessionServicer, add_session_servicer
from baton.session.wires.socket_server import SessionEndpoint, SocketServer


class SessionService:
    """Owned by one event loop. With certificates there is no port, since nothing is encrypted there."""

    def __init__(
        self, listener: SessionListener, trust: ClusterTrust, incarnation: Incarnation, endpoint: SessionEndpoint
    ) -> None:
        """Raises `LinkBroken` if the port is taken."""
        self._listener = listener
        self._port = None if trust.tls else SocketServer(listener.serve, trust, incarnation, endpoint)

    @property
    def address(self) -> str:
        """As announced, see `WorkerRecord.session_address`."""
        return "" if self._port is None else self._port.address

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the call to a server that does not serve yet."""
        add_session_servicer(SessionServicer(self._listener.serve), server)

    async def start(self) -> None:
        """Begins to serve at the port."""
        if self._port is not None:
            await self._port.start()

    async def leave(self, reason: str) -> None:
        """Ends all sessions as planned."""
        await self._listener.leave(reason)

    async def close(self) -> None:
        """Closes the port and its connections."""
        if self._port is not None:
            await self._port.close()
