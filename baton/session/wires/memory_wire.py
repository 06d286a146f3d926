"""A wire inside one process: two bounded queues a connection. For the in-process mode, tests and the simulation."""

from __future__ import annotations

import asyncio
from collections import deque

from google.protobuf.message import DecodeError

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation
from baton.rpc.gen import session_pb2 as pb
from baton.session.wires.wire import Serve

ROOM_BYTES = 256 << 10
"""Bytes that a connection holds in each direction before `send` waits, beside the last message."""


class _Queue:
    """One direction. Messages are kept as bytes: nothing is shared by both ends."""

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()
        self.num_bytes = 0
        self.closed = False
        self.finished = False  # nothing more is sent; what is here may still be read
        self.changed = asyncio.Event()

    def notify(self) -> None:
        self.changed.set()

    async def wait(self) -> None:
        self.changed.clear()
        await self.changed.wait()


class MemoryConnection:
    """One end of a connection of `MemoryWire`."""

    wire = "memory"

    def __init__(self, sent: _Queue, received: _Queue) -> None:
        self._sent = sent
        self._received = received

    async def send(self, message: pb.SessionMessage) -> None:
        """See `WireConnection`."""
        queue = self._sent
        while queue.num_bytes > ROOM_BYTES and not queue.closed:
            await queue.wait()
        if queue.closed:
            raise LinkBroken("the connection has ended")
        data = message.SerializeToString()
        queue.messages.append(data)
        queue.num_bytes += len(data)
        queue.notify()

    async def receive(self) -> pb.SessionMessage | None:
        """See `WireConnection`."""
        queue = self._received
        while not (queue.messages or queue.closed or queue.finished):
            await queue.wait()
        if queue.closed or not queue.messages:
            return None
        data = queue.messages.popleft()
        queue.num_bytes -= len(data)
        queue.notify()
        try:
            return pb.SessionMessage.FromString(data)
        except DecodeError:
            raise LinkBroken("bytes that are no message") from None

    def inject(self, data: bytes) -> None:
        """Puts any bytes on the way to the other end, as a damaged network would."""
        self._sent.messages.append(data)
        self._sent.num_bytes += len(data)
        self._sent.notify()

    def finish(self) -> None:
        """Ends the connection after what was sent, as a handler's return does."""
        self._sent.finished = self._received.closed = True
        self._sent.notify()
        self._received.notify()

    def close(self) -> None:
        """See `WireConnection`."""
        for queue in (self._sent, self._received):
            queue.closed = True
            queue.notify()


class MemoryWire:
    """Connects to the listeners that were added to it. Owned by one event loop."""

    def __init__(self) -> None:
        self._listeners: dict[str, Serve] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self.connections: list[MemoryConnection] = []

    def listen(self, address: str, serve: Serve) -> None:
        """Serves connections to `address` from now on."""
        self._listeners[address] = serve

    def stop(self, address: str) -> None:
        """Refuses connections to `address` from now on."""
        self._listeners.pop(address, None)

    async def connect(self, address: str, incarnation: Incarnation) -> MemoryConnection:
        """See `Wire`."""
        serve = self._listeners.get(address)
        if serve is None:
            raise LinkBroken(f"nobody listens at {address}")
        down, up = _Queue(), _Queue()
        connection = MemoryConnection(down, up)
        self.connections.append(connection)
        task = asyncio.create_task(_serve(serve, MemoryConnection(up, down)), name=f"serve-{address}")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        return connection

    async def close(self) -> None:
        """Ends all connections."""
        self._listeners.clear()
        for connection in self.connections:
            connection.close()
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def _serve(serve: Serve, connection: MemoryConnection) -> None:
    try:
        await serve(connection)
    finally:
        connection.finish()
