"""Writes the body of a response to its connection. `BoundedHttpProtocol` makes one a request.

A write is one HTTP chunk. uvicorn's own `send` would do the same for each message: check the state of the response,
frame the chunk, write. Head and end still go through it, so its state holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol
from weakref import ref

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class WritableConnection(Protocol):
    """The protocol as a sink uses it. `on_writable`: called when the client has accepted bytes, or is gone."""

    flow: FlowControl
    on_writable: Callable[[], None] | None

    def hold(self) -> None:
        """Sends what is written in this pass of the loop together."""
        ...


class TransportSink:
    """A `BodySink`. `cycle`: uvicorn's state of the request, which lives as long as it; its body must be chunked."""

    def __init__(self, cycle: RequestResponseCycle, connection: WritableConnection) -> None:
        self._cycle = ref(cycle)  # its scope has this sink: a cycle of references would wait for the garbage collector
        self._connection = connection
        self._flow = connection.flow

    @property
    def blocked(self) -> bool:
        """See `BodySink`. The transport holds more than its high-water mark."""
        return self._flow.write_paused

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        """See `BodySink`."""
        self._connection.on_writable = callback

    def hold(self) -> None:
        """See `BodySink`."""
        self._connection.hold()

    def write(self, data: bytes) -> None:
        """See `BodySink`. Raises `RuntimeError` before the head, after the end, and for a body that is not chunked."""
        cycle = self._cycle()
        if cycle is None or cycle.disconnected:
            return
        if not cycle.response_started or cycle.response_complete or not cycle.chunked_encoding:
            raise RuntimeError("a body can be written after its head, until its end, if it is chunked")
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def drain(self) -> None:
        """See `BodySink`."""
        cycle = self._cycle()
        if self._flow.write_paused and cycle is not None and not cycle.disconnected:
            await self._flow.drain()

    def close(self) -> None:
        """See `BodySink`. What the transport holds is its own."""
        self._connection.on_writable = None
