"""Any bytes in any pieces: the server never fails and answers in HTTP, with errors in the API's shape."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import h11
import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from baton.services.router.edge.http_protocol import MAX_HEAD_BYTES, BoundedHttpProtocol

pytestmark = pytest.mark.timeout(240)

BODY = b'{"a": 1}'
REQUESTS = [
    b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST /p?q=1 HTTP/1.1\r\nhost: x\r\ncontent-length: 8\r\n\r\n" + BODY,
    b"POST /p HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n8;e=v\r\n" + BODY + b"\r\n0\r\nt: v\r\n\r\n",
    b"POST /p HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 8\r\n\r\n" + BODY,
    b"GET / HTTP/1.0\r\n\r\n",
    b"HEAD /%zz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 8\r\n\r\n" + BODY,
    b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
]
FRAGMENTS = [
    *(b"\r\n|\n|\r|:| |\0|\xff|%00|../|HTTP/1.1|GET |POST |content-length: 5\r\n|content-length: -1\r\n".split(b"|")),
    *(b"transfer-encoding: chunked\r\n|transfer-encoding: x\r\n|upgrade: h2c\r\nconnection: upgrade\r\n".split(b"|")),
    b"5\r\nhello\r\n",
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"x: " + b"y" * (MAX_HEAD_BYTES // 2) + b"\r\n",
    b"\x16\x03\x01",
]


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Consecutive requests, corrupted and cut into pieces."""
    data = bytearray(b"".join(draw(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 8)))
        data[start:end] = draw(st.one_of(st.sampled_from(FRAGMENTS), st.binary(max_size=6)))
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=5)))
    return [bytes(data[start:end]) for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


class Socket(asyncio.Transport):
    """Keeps written bytes. Like a real transport it drops writes after `close`, and notifies the protocol later."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: BoundedHttpProtocol | None = None
        self.written = bytearray()
        self.closing = False

    def write(self, data: Any) -> None:
        if not self.closing:
            self.written += data

    def close(self) -> None:
        if not self.closing and self.protocol is not None:
            self.closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 0  # the client reads at once

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Ends writing; the client reads all of it and closes."""
        self.close()

    def pause_reading(self) -> None:
        """Does nothing."""

    def resume_reading(self) -> None:
        """Does nothing."""


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An application that reads the whole body and returns its length."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    body = str(size).encode()
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


async def exchange(pieces: list[bytes]) -> tuple[Socket, list[str]]:
    """Answers of a connection to the pieces, and the methods of the answered requests, in order."""
    methods: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await echo(scope, receive, send)
        methods.append(scope["method"])

    config = uvicorn.Config(app, http=BoundedHttpProtocol, lifespan="off", ws="none", log_config=None)
    config.load()
    state, socket = ServerState(), Socket()
    protocol = socket.protocol = BoundedHttpProtocol(config, state, {})
    protocol.connection_made(socket)
    for piece in pieces:
        if socket.is_closing():
            break
        protocol.data_received(piece)
        await run_pending()
    if not socket.is_closing():
        protocol.connection_lost(None)
    async with asyncio.timeout(10):
        await asyncio.gather(*state.tasks)
    return socket, methods


async def run_pending() -> None:
    """Runs the loop until the application needs more bytes. `echo` needs a few turns."""
    loop = asyncio.get_running_loop()
    for _ in range(12):
        turn = loop.create_future()
        loop.call_soon(turn.set_result, None)
        await turn


def responses(data: bytes, methods: list[str]) -> list[tuple[int, bytes]]:
    """The responses in the bytes, by an independent parser. Raises `h11.RemoteProtocolError`."""
    found: list[tuple[int, bytes]] = []
    asked = iter(methods)
    while data:
        client = h11.Connection(h11.CLIENT)
        client.send(h11.Request(method=next(asked, "GET"), target="/", headers=[("host", "x")]))
        client.send(h11.EndOfMessage())
        client.receive_data(data)
        status, body, invited = 0, b"", False
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if event in (h11.NEED_DATA, h11.PAUSED):
                assert (invited, status) == (True, 0), f"half a response: {data!r}"
                return found  # the client got 100 Continue and has not sent its body
            invited |= isinstance(event, h11.InformationalResponse)
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
        found.append((status, body))
        data = client.trailing_data[0]
    return found


class ErrorLog(logging.Handler):
    """Collects uvicorn's error log."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.getMessage())


@pytest.fixture(scope="module")
def error_log() -> Iterator[ErrorLog]:
    handler = ErrorLog()
    logging.getLogger("uvicorn.error").addHandler(handler)
    yield handler
    logging.getLogger("uvicorn.error").removeHandler(handler)


@settings(max_examples=300, deadline=None)
@given(pieces=streams())
def test_any_bytes_in_any_pieces(loop: asyncio.Runner, error_log: ErrorLog, pieces: list[bytes]):
    error_log.records.clear()
    socket, methods = loop.run(exchange(pieces))
    assert error_log.records == []
    for status, body in responses(bytes(socket.written), methods):
        assert status in (200, 400, 431)
        if status != 200:
            assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
            assert socket.is_closing()


@settings(max_examples=100, deadline=None)
@given(request=st.sampled_from([r for r in REQUESTS if not r.startswith((b"CONNECT", b"OPTIONS"))]), data=st.data())
def test_split_requests_are_answered(loop: asyncio.Runner, request: bytes, data: st.DataObject):
    cuts = sorted(data.draw(st.sets(st.integers(1, len(request) - 1), max_size=8)))
    pieces = [request[start:end] for start, end in zip([0, *cuts], [*cuts, len(request)], strict=True)]
    socket, methods = loop.run(exchange(pieces))
    size = str(len(BODY) if request.startswith(b"POST") else 0).encode()
    expected = (200, b"" if request.startswith(b"HEAD") else size)
    assert responses(bytes(socket.written), methods) == [expected]


@pytest.mark.parametrize("size", [MAX_HEAD_BYTES, 4 * MAX_HEAD_BYTES])
def test_a_head_in_one_piece_is_bounded(loop: asyncio.Runner, size: int):
    socket, methods = loop.run(exchange([b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * size + b"\r\n\r\n"]))
    assert methods == []
    assert [status for status, _ in responses(bytes(socket.written), methods)] == [431]


def test_garbage_after_a_request_closes_the_connection(loop: asyncio.Runner):
    socket, _ = loop.run(exchange([REQUESTS[1] + b"\0\0\0"]))
    assert socket.is_closing()
    assert socket.written == b""
