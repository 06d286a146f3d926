"""What carries the messages of a session's connections.

`SocketWire` and `GrpcWire` between processes, `MemoryWire` inside one.

A wire keeps order and may end at any time; it need not detect damage. The session does all the rest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation
from baton.rpc.gen import session_pb2 as pb

CONNECT_TIMEOUT_S = 2.0


class ConnectionRefused(LinkBroken):
    """The listener's process serves no connection of this dialler: another secret or incarnation, or no sessions."""


class WireConnection(Protocol):
    """One end of a connection. Owned by one event loop; one task reads, one writes."""

    wire: str
    """What carries it: socket, grpc or memory; the label of its metric."""

    async def send(self, message: pb.SessionMessage) -> None:
        """Sends one message; waits while the transport has no room. Raises `LinkBroken` after the end.

        Raises `ConnectionRefused` if the listener has refused already.
        """
        ...

    async def receive(self) -> pb.SessionMessage | None:
        """The next message; None when the connection has ended. Raises `LinkBroken` for bytes that are no message.

        Raises `ConnectionRefused` instead of the first message.
        """
        ...

    def close(self) -> None:
        """Ends the connection at both ends; waits for nothing. Idempotent."""
        ...


@runtime_checkable
class DirectConnection(WireConnection, Protocol):
    """A connection that also hands messages over, and takes them, within calls: without a task switch for each."""

    async def hand_over(self, take: Callable[[pb.SessionMessage], bool]) -> None:
        """Instead of `receive`: calls `take` with each message when it comes, in order, until it returns False.

        Returns then, and when the connection has ended. Raises what `receive` does, and what `take` raises.
        """
        ...

    def write(self, message: pb.SessionMessage) -> bool:
        """Instead of `send`: sends one message. Returns False if the transport has no room for another one.

        `call_with_room` is called when it has again. Raises `LinkBroken` after the end.
        """
        ...

    def call_with_room(self, call: Callable[[], None]) -> None:
        """Calls `call` each time when the transport has room again."""
        ...


Serve = Callable[[WireConnection], Awaitable[None]]
"""Serves one connection of a listener; the connection is closed when it returns."""


class Wire(Protocol):
    """Opens connections."""

    async def connect(self, address: str, incarnation: Incarnation) -> WireConnection:
        """Connects to a listener. Raises `LinkBroken` if nobody listens there, within `CONNECT_TIMEOUT_S`."""
        ...
