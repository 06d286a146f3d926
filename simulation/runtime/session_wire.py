"""The wire of sessions over the simulated network: dialler, listener and sessions above it are the product's.

A connection behaves like a gRPC call without end: messages arrive in order after the link's delay, a lost one breaks
it at both ends, and so do keepalive and the end of a process.
"""

from __future__ import annotations

import asyncio
from collections import deque

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation
from baton.rpc.gen import session_pb2 as pb
from baton.session.wires.wire import CONNECT_TIMEOUT_S, ConnectionRefused, Serve
from simulation.runtime.network import Endpoint, SimLink, SimNetwork
from simulation.runtime.process import SimProcess
from simulation.runtime.trace import BROKE

TICK_S = 1e-6


class SimWire:
    """`Wire` of one process. `listen` offers sessions at an endpoint."""

    def __init__(self, network: SimNetwork, process: SimProcess) -> None:
        self._network = network
        self._process = process

    @staticmethod
    def listen(endpoint: Endpoint, serve: Serve) -> None:
        """Serves the connections to `endpoint` from now on."""
        endpoint.sessions = serve

    async def connect(self, address: str, incarnation: Incarnation) -> SimConnection:
        """See `Wire`."""
        loop, link = asyncio.get_running_loop(), self._network.link(self._process.name, address)
        arrives_at = link.arrival(self._process.name, loop.time())
        if arrives_at is None or arrives_at > loop.time() + CONNECT_TIMEOUT_S:
            await asyncio.sleep(link.delay_s(loop.time()) if arrives_at is None else CONNECT_TIMEOUT_S)
            raise LinkBroken(BROKE)
        await asyncio.sleep(arrives_at - loop.time())
        host = self._network.hosts.get(address)
        if host is None or not host.listens:
            await asyncio.sleep(link.delay_s(loop.time()))
            raise LinkBroken("connection refused")
        if incarnation != host.process.incarnation or host.sessions is None:
            await asyncio.sleep(link.delay_s(loop.time()))
            raise ConnectionRefused("another incarnation, or no sessions")
        call = _SessionCall(self._network, link, self._process, host.process)
        host.add_call(host.process.spawn(_serve(host.sessions, call.listener), "session-connection"))
        return call.dialler


async def _serve(serve: Serve, connection: SimConnection) -> None:
    try:
        await serve(connection)
    finally:
        connection.close()


class _SessionCall:
    """One connection: both ends, on one link."""

    def __init__(self, network: SimNetwork, link: SimLink, dialler: SimProcess, listener: SimProcess) -> None:
        self._network = network
        self.link = link
        self.dialler = SimConnection(self, dialler)
        self.listener = SimConnection(self, listener)
        self.dialler.peer, self.listener.peer = self.listener, self.dialler
        self._name = f"{dialler.name}<->{listener.name}"
        link.calls[self] = None
        self._note("Connect")

    def on_connection_lost(self, why: str) -> None:
        """Breaks the connection at both ends."""
        if self.link.calls.pop(self, self) is None:
            self._note(f"Session -x {why}")
        self.dialler.end()
        self.listener.end()

    def closed(self) -> None:
        """One end has closed it."""
        self.link.calls.pop(self, None)

    def _note(self, what: str) -> None:
        self._network.trace.note(self._name, what)


class SimConnection:
    """One end. What a process that is not alive sends is dropped."""

    peer: SimConnection
    wire = "memory"

    def __init__(self, call: _SessionCall, process: SimProcess) -> None:
        self._call = call
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[bytes] = deque()
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None
        self._last_arrival_s = 0.0

    async def send(self, message: pb.SessionMessage) -> None:
        """See `WireConnection`."""
        if self._ended:
            raise LinkBroken("the connection has ended")
        if not self._process.alive:
            return
        at = self._call.link.arrival(self._process.name, self._loop.time())
        if at is None:
            self._call.on_connection_lost(BROKE)
            raise LinkBroken(BROKE)
        self._last_arrival_s = max(at, self._last_arrival_s + TICK_S)
        self._loop.call_at(self._last_arrival_s, self.peer.deliver, message.SerializeToString())

    async def receive(self) -> pb.SessionMessage | None:
        """See `WireConnection`."""
        while not (self._inbox or self._ended):
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return pb.SessionMessage.FromString(self._inbox.popleft()) if self._inbox else None

    def close(self) -> None:
        """See `WireConnection`. The other end hears of it behind what was sent."""
        if not self._ended:
            self.end()
            self._call.closed()
            at = max(self._loop.time() + self._call.link.delay_s(self._loop.time()), self._last_arrival_s + TICK_S)
            self._loop.call_at(at, self.peer.end)

    def break_off(self, why: str) -> None:
        """Ends the connection at both ends at once. Idempotent."""
        if not self._ended:
            self._call.on_connection_lost(why)

    def deliver(self, data: bytes) -> None:
        """A message of the other end arrives."""
        if not self._ended:
            self._inbox.append(data)
            self._wake()

    def end(self) -> None:
        """Nothing more arrives or leaves."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
