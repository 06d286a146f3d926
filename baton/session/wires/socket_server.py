"""Serves connections of `SocketWire`: nothing is read from a dialler before its call token, which is used once.

A connection has 5 s for its token, and there are 64 at most that have shown none: the oldest makes room, since a
dialler sends it at once. Owned by one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation
from baton.domain.trust import ClusterTrust
from baton.rpc.auth_interceptor import Fault, Malformed, RejectedCall
from baton.rpc.call_token import OPEN_CLUSTER_KEY, TOKEN_BYTES, CallTokenFault, CallTokenVerifier
from baton.rpc.sockets.listen import listen, stop_accepting
from baton.session.wires.socket_connection import MAGIC, METHOD, SocketConnection, refusal
from baton.session.wires.wire import Serve

MAX_CONNECTIONS = 512
MAX_STRANGERS = 64
TOKEN_S = 5.0
_PREAMBLE_BYTES = len(MAGIC) + TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class SessionEndpoint:
    """Where a worker listens for session connections. `port` 0 takes a free one.

    `advertised`: host:port for routers; "": the host of the worker's gRPC address, and the bound port. `on_rejected`
    gets every refused connection.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertised: str = ""
    on_rejected: Callable[[RejectedCall], None] = lambda rejected: None


class SocketServer:
    """Has its port from its construction on, and serves from `start` to `close`."""

    def __init__(self, serve: Serve, trust: ClusterTrust, incarnation: Incarnation, endpoint: SessionEndpoint) -> None:
        """Raises `LinkBroken` if the port is taken."""
        self._serve = serve
        self._on_rejected = endpoint.on_rejected
        self.verifier = CallTokenVerifier(trust.keys("call-token") or (OPEN_CLUSTER_KEY,), incarnation)
        try:
            self._socket = listen(endpoint.host, endpoint.port)
        except OSError as error:
            raise LinkBroken(f"cannot listen for sessions at {endpoint.host}:{endpoint.port}: {error}") from error
        self.port: int = self._socket.getsockname()[1]
        self.address = endpoint.advertised or str(self.port)
        """As announced: host:port, or a port of the host of the gRPC address."""
        self._server: asyncio.Server | None = None
        self._closed = False
        self._strangers: dict[_ServedConnection, None] = {}  # the oldest first
        self._serving: dict[asyncio.Task[None], _ServedConnection] = {}

    @property
    def num_connections(self) -> int:
        """Open ones, strangers included."""
        return len(self._strangers) + len(self._serving)

    async def start(self) -> None:
        """Begins to serve. Idempotent."""
        if self._server is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(lambda: _ServedConnection(self), sock=self._socket)

    async def close(self) -> None:
        """Serves no more, and ends all connections."""
        self._closed = True
        try:
            if self._server is None:
                self._socket.close()
            else:
                await stop_accepting(self._server)
        finally:
            for stranger in list(self._strangers):
                stranger.close()
            serving = list(self._serving)
            for task in serving:
                task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    def admit(self, connection: _ServedConnection) -> bool:
        """Enters a connection without a token yet. False: there is no room, or the server is closed."""
        if self._closed or self.num_connections >= MAX_CONNECTIONS:
            return False
        if len(self._strangers) >= MAX_STRANGERS:
            next(iter(self._strangers)).close()
        self._strangers[connection] = None
        return True

    def leave(self, connection: _ServedConnection) -> None:
        """A stranger has left."""
        self._strangers.pop(connection, None)

    def check(self, preamble: bytes, connection: _ServedConnection) -> str | None:
        """Serves a connection whose preamble is valid. Returns why another one is refused."""
        del self._strangers[connection]
        if not preamble.startswith(MAGIC):
            return self._refuse(Malformed.MALFORMED, connection)
        token = self.verifier.accept(METHOD, preamble[len(MAGIC) :])
        if isinstance(token, CallTokenFault):
            return self._refuse(token, connection)
        task = asyncio.get_running_loop().create_task(self._run(connection), name="session-socket")
        self._serving[task] = connection
        task.add_done_callback(self._ended)
        return None

    async def _run(self, connection: _ServedConnection) -> None:
        await self._serve(connection)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Also of a task that was cancelled before it began."""
        self._serving.pop(task).close()

    def _refuse(self, fault: Fault, connection: _ServedConnection) -> str:
        rejected = RejectedCall(fault, METHOD, connection.peer)
        self._on_rejected(rejected)
        return rejected.why


class _ServedConnection(SocketConnection):
    """The listener's end. Its first bytes are the preamble."""

    def __init__(self, server: SocketServer) -> None:
        super().__init__()
        self._server = server
        self._preamble: bytearray | None = bytearray()  # None: it was valid
        self._deadline: asyncio.TimerHandle | None = None
        self.peer = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        super().connection_made(transport)
        host, port, *_ = transport.get_extra_info("peername") or ("", 0)
        self.peer = f"{host}:{port}"
        if self._server.admit(self):
            self._deadline = self._loop.call_later(TOKEN_S, self.close)
        else:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        self._leave()
        super().connection_lost(error)

    def close(self) -> None:
        """See `WireConnection`."""
        self._leave()
        super().close()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if self._preamble is None:
            super().data_received(data)
        elif not self._ended:
            self._preamble += data
            if len(self._preamble) >= _PREAMBLE_BYTES:
                self._check(bytes(self._preamble))

    def _check(self, received: bytes) -> None:
        why = self._server.check(received[:_PREAMBLE_BYTES], self)
        if why is not None:
            self._write(refusal(why))
            self.close()
            return
        self._preamble = None
        self._leave()
        if len(received) > _PREAMBLE_BYTES:
            super().data_received(received[_PREAMBLE_BYTES:])

    def _leave(self) -> None:
        """It is no stranger any more."""
        self._server.leave(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
