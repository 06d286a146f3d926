"""Both sinks of a body, over real HTTP: order, back-pressure, a client that goes away, and the end."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from baton.services.router.edge.http_protocol import BoundedHttpProtocol
from baton.services.router.edge.sink import BODY_SINK, AsgiSink, BodySink, body_sink
from baton.services.router.edge.transport_sink import TransportSink

TIMEOUT_S = 10.0
PIECE = b"x" * 16_384
MAX_PIECES = 1000
"""More than the kernel and both sinks take of a client that reads nothing."""


@dataclass
class SinkWorld:
    """A response under way: its sink, and the client's socket."""

    sink: BodySink
    client: socket.socket
    finish: asyncio.Event
    ended: asyncio.Event
    body: bytearray = field(default_factory=bytearray)

    async def fill(self) -> bytes:
        """Writes until the sink stays blocked; returns what was written."""
        written = b""
        for _ in range(MAX_PIECES):
            self.sink.write(PIECE)
            written += PIECE
            if self.sink.blocked:
                draining = asyncio.create_task(self.sink.drain())
                _, waiting = await asyncio.wait((draining,), timeout=0.1)
                draining.cancel()
                if waiting:
                    return written
        raise AssertionError("a client that reads nothing never blocks the sink")

    async def read(self, num_bytes: int) -> bytes:
        """Reads until the client has so many bytes of the body."""
        parser, loop = httptools.HttpResponseParser(self), asyncio.get_running_loop()
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.body) < num_bytes:
                data = await loop.sock_recv(self.client, 1 << 20)
                assert data, "the server hung up"
                parser.feed_data(data)
        return bytes(self.body)

    def on_body(self, data: bytes) -> None:
        self.body += data


@asynccontextmanager
async def response(with_transport: bool) -> AsyncIterator[SinkWorld]:
    """A response whose head is sent. Afterwards its end is."""
    loop = asyncio.get_running_loop()
    given: asyncio.Future[BodySink] = loop.create_future()
    finish, ended = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if not with_transport:
            del scope["extensions"][BODY_SINK]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        sink = body_sink(scope, send)
        given.set_result(sink)
        await finish.wait()
        await sink.drain()
        await send({"type": "http.response.body", "body": b"end", "more_body": False})
        ended.set()

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
    server = uvicorn.Server(uvicorn.Config(app, http=BoundedHttpProtocol, lifespan="off", ws="none", log_config=None))
    serving = asyncio.create_task(server.serve([listener]))
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    try:
        await loop.sock_connect(client, listener.getsockname())
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        yield SinkWorld(await asyncio.wait_for(given, TIMEOUT_S), client, finish, ended)
    finally:
        finish.set()
        client.close()
        server.should_exit = True
        await asyncio.wait_for(serving, TIMEOUT_S)
        listener.close()


both = pytest.mark.parametrize("with_transport", [True, False], ids=["transport", "asgi"])


@both
async def test_bytes_come_in_order_and_the_end_after_them(with_transport: bool) -> None:
    async with response(with_transport) as world:
        assert isinstance(world.sink, TransportSink if with_transport else AsgiSink)
        pieces = [b"%d," % number for number in range(100)]
        for number, piece in enumerate(pieces):
            world.sink.write(piece)
            if number % 7 == 0:
                await world.sink.drain()
        world.finish.set()
        whole = b"".join(pieces) + b"end"
        assert await world.read(len(whole)) == whole


@both
async def test_a_client_that_does_not_read_blocks_until_it_reads(with_transport: bool) -> None:
    async with response(with_transport) as world:
        writable = asyncio.Event()
        world.sink.on_writable(writable.set)
        written = await world.fill()
        draining = asyncio.create_task(world.sink.drain())
        reading = asyncio.create_task(world.read(len(written)))
        await asyncio.wait_for(writable.wait(), TIMEOUT_S)
        await asyncio.wait_for(draining, TIMEOUT_S)
        assert not world.sink.blocked
        assert await reading == written


@both
async def test_a_client_that_is_gone_ends_the_wait(with_transport: bool) -> None:
    async with response(with_transport) as world:
        writable = asyncio.Event()
        world.sink.on_writable(writable.set)
        await world.fill()
        world.client.close()
        await asyncio.wait_for(writable.wait(), TIMEOUT_S)
        await asyncio.wait_for(world.sink.drain(), TIMEOUT_S)
        world.sink.write(b"dropped")
        await asyncio.wait_for(world.sink.drain(), TIMEOUT_S)
        world.finish.set()
        await asyncio.wait_for(world.ended.wait(), TIMEOUT_S)


@both
async def test_a_closed_sink_calls_nobody(with_transport: bool) -> None:
    async with response(with_transport) as world:
        calls: list[None] = []
        await world.fill()
        world.sink.on_writable(lambda: calls.append(None))
        world.sink.close()
        world.sink.close()
        world.client.close()
        await asyncio.wait_for(world.sink.drain(), TIMEOUT_S)
        assert not calls


async def test_nothing_is_written_to_the_transport_after_the_end() -> None:
    async with response(True) as world:
        world.finish.set()
        await asyncio.wait_for(world.ended.wait(), TIMEOUT_S)
        with pytest.raises(RuntimeError, match="until its end"):
            world.sink.write(b"late")


async def write(sink: AsgiSink) -> None:
    sink.write(b"b")


@pytest.mark.parametrize("use", [write, AsgiSink.drain])
async def test_a_send_that_fails_is_raised_once(use: Callable[[AsgiSink], Awaitable[None]]) -> None:
    called = asyncio.Event()

    async def send(message: Message) -> None:
        raise OSError("broken")

    sink = AsgiSink(send)
    sink.on_writable(called.set)
    sink.write(b"a")
    await called.wait()
    with pytest.raises(OSError, match="broken"):
        await use(sink)
    await sink.drain()


async def test_a_head_request_has_no_transport_sink() -> None:
    """Its response has no body: uvicorn's `send` drops the bytes."""
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        sink = body_sink(scope, send)
        sink.write(b"dropped")
        await sink.drain()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=BoundedHttpProtocol, lifespan="off", ws="none", log_config=None))
    serving = asyncio.create_task(server.serve([listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        writer.write(b"HEAD / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), TIMEOUT_S)
    finally:
        writer.close()
        server.should_exit = True
        await asyncio.wait_for(serving, TIMEOUT_S)
        listener.close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"dropped" not in answer
    assert BODY_SINK not in scopes[0]["extensions"]


async def test_a_sink_does_not_keep_the_state_of_its_request() -> None:
    """The request's scope has the sink: both would wait for the garbage collector. Late bytes are dropped."""

    class Transport:
        def __init__(self) -> None:
            self.written = bytearray()
            self.write = self.written.extend

    class Cycle:
        disconnected = response_complete = False
        response_started = chunked_encoding = True

        def __init__(self) -> None:
            self.scope: dict[str, object] = {}
            self.transport = Transport()

    class Connection:
        flow = type("Flow", (), {"write_paused": True})()
        on_writable = None

    cycle = Cycle()
    cycle.scope["sink"] = sink = TransportSink(cast(Any, cycle), cast(Any, Connection()))
    sink.write(b"ab")
    assert cycle.transport.written == b"2\r\nab\r\n"
    freed = weakref.ref(cycle)
    gc.disable()
    try:
        del cycle
        assert freed() is None
    finally:
        gc.enable()
    sink.write(b"late")
    await asyncio.wait_for(sink.drain(), TIMEOUT_S)
