"""Limits on the socket, before any application runs: malformed, oversized and slow requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from baton.services.router.edge import body, http_protocol, lingering_close
from tests.fake_dispatcher import WaitForGate, one_token_chunks
from tests.service.http.http_server import RouterServer, router, says, tokens_of

pytestmark = pytest.mark.timeout(60)

TIMEOUT_S = 20.0
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
COMPLETION = b'{"model": "tiny", "prompt": "x"}'
WHOLE_POST = POST + b"content-length: %d\r\n\r\n%b" % (len(COMPLETION), COMPLETION)


@dataclass
class Answer:
    """A response. `closed`: the server closed the connection after it."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert self.headers["x-request-id"]
        return error["code"]


@dataclass
class RawConnection:
    """A raw connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, *parts: bytes) -> None:
        """Sends parts until the server closes."""
        for part in parts:
            try:
                self.writer.write(part)
                await self.writer.drain()
            except ConnectionError:
                return

    async def answer(self) -> Answer:
        async with asyncio.timeout(TIMEOUT_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            lines = head.split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines[1:-2])
            content = await self.reader.readexactly(int(headers["content-length"]))
        return Answer(int(lines[0].split()[1]), headers, content)

    async def closed(self) -> bytes:
        """All bytes until the server closes."""
        async with asyncio.timeout(TIMEOUT_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""


@asynccontextmanager
async def connected(world: RouterServer) -> AsyncIterator[RawConnection]:
    url = world.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        yield RawConnection(reader, writer)
    finally:
        writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50,
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /h\xc3\xa9alth HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET http://[:: HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nbad header: \r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nx: \x00\r\n\r\n",
        POST + b"content-length: -1\r\n\r\n",
        POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"content-length: 99999999999999999999999\r\n\r\n",
        b"CONNECT example.com:80 HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
async def test_malformed_http_gets_a_json_error(data: bytes):
    async with router(says("hi")) as world:
        async with connected(world) as client:
            await client.send(data)
            answer = await client.answer()
            assert (answer.status, answer.code) == (400, "malformed_http")
            assert await client.closed() == b""
        assert (await world.complete()).status_code == 200


@pytest.mark.parametrize("piece", [1000, 1 << 20])
@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        GET + b"x: " + b"a" * 200_000 + b"\r\n\r\n",
        GET + b"".join(b"x-%d: y\r\n" % n for n in range(20_000)) + b"\r\n",
        b"\r\n" * 100_000,
    ],
)
async def test_the_size_of_a_head_is_bounded(head: bytes, piece: int):
    async with router(says("hi")) as world:
        async with connected(world) as client:
            sending = asyncio.create_task(client.send(*(head[i : i + piece] for i in range(0, len(head), piece))))
            rest = await client.closed()
            await sending
            assert rest == b"" or rest.startswith(b"HTTP/1.1 431 ")  # a reset may overtake the response
        assert (await world.complete()).status_code == 200


async def test_a_head_that_is_too_large_gets_an_error():
    async with router(says("hi")) as world, connected(world) as client:
        await client.send(
            GET + b"x: " + b"a" * http_protocol.MAX_HEAD_BYTES
        )  # read as one part: nothing is left to reset
        answer = await client.answer()
        assert (answer.status, answer.code) == (431, "head_too_large")


async def test_a_head_of_moderate_size_is_accepted():
    async with router(says("hi")) as world:
        response = await world.http.get("/health", headers={"x-long": "a" * 50_000}, params={"q": "a" * 8000})
        assert response.status_code == 200


@pytest.mark.parametrize("rest", [b"x: " + b"t" * 200_000, b"x: y\r\n" * 40_000])
async def test_trailers_are_bounded(rest: bytes):
    async with router(says("hi")) as world, connected(world) as client:
        await client.send(
            POST + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(COMPLETION) + COMPLETION + b"\r\n0\r\n"
        )
        await client.send(rest)
        await client.closed()
        assert world.dispatcher.admitted == []


@pytest.mark.parametrize("sent", [b"GET /hea", GET, GET + b"x: y", b"\r\n"])
async def test_a_slow_head_times_out(sent: bytes, monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    async with router(says("hi")) as world, connected(world) as client:
        await client.send(sent)
        if sent.strip():
            answer = await client.answer()
            assert (answer.status, answer.code) == (408, "head_timeout")
        assert await client.closed() == b""


async def test_a_silent_connection_is_closed(monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    async with router(says("hi")) as world, connected(world) as client:
        assert await client.closed() == b""


async def test_a_slow_body_times_out(monkeypatch):
    monkeypatch.setattr(body, "READ_TIMEOUT_S", 0.2)
    async with router(says("hi")) as world, connected(world) as client:
        await client.send(POST + b"content-length: 100\r\n\r\n{")
        answer = await client.answer()
        assert (answer.status, answer.code) == (408, "body_timeout")
        assert await client.closed() == b""
        assert await world.recorder.until_ended(1) == [("refused", "body_timeout")]


@pytest.mark.parametrize(
    ("sent", "rest", "told"),
    [
        (WHOLE_POST, b"", [True]),
        (WHOLE_POST[:-1], WHOLE_POST[-1:], [False]),
        (POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", b"1\r\n}\r\n0\r\n\r\n", [False]),
        (WHOLE_POST + WHOLE_POST[:-1], WHOLE_POST[-1:], [False, False]),
        (WHOLE_POST * 2, b"", [False, True]),  # the first one has another behind it
    ],
)
async def test_a_body_that_is_here_needs_no_timer(sent: bytes, rest: bytes, told: list[bool], monkeypatch):
    answers, asked = [], asyncio.Event()
    has_body = http_protocol.BoundedHttpProtocol.has_body

    def ask(self, scope) -> bool:
        answers.append(has_body(self, scope))
        asked.set()
        return answers[-1]

    monkeypatch.setattr(http_protocol.BoundedHttpProtocol, "has_body", ask)
    async with router(says("hi")) as world, connected(world) as client:
        await client.send(sent)
        async with asyncio.timeout(TIMEOUT_S):
            await asked.wait()
        if len(told) == 2 and rest:
            assert (await client.answer()).status == 200
        await client.send(rest)
        statuses = [(await client.answer()).status for _ in range(len(told) - (len(told) == 2 and bool(rest)))]
    assert statuses[-1] == (400 if b"chunked" in sent else 200)
    assert answers == told


async def test_the_rest_of_a_refused_body_is_bounded(monkeypatch):
    monkeypatch.setattr(http_protocol, "MESSAGE_TIMEOUT_S", 0.2)
    async with router(says("hi"), max_body_bytes=2000) as world, connected(world) as client:
        await client.send(POST + b"content-length: 1000000000\r\n\r\n" + b"x" * 3000)
        assert (await client.answer()).status == 413
        assert await client.closed() == b""


async def test_a_long_response_does_not_time_out_its_request(monkeypatch):
    """Also holds when the next request has begun."""
    num_late, often_late, too_late = 0, asyncio.Event(), http_protocol.BoundedHttpProtocol._on_timeout

    def count(self, part):
        nonlocal num_late
        num_late += 1
        if num_late == 3:
            often_late.set()
        too_late(self, part)

    gate = asyncio.Event()
    async with (
        router(lambda sequence: [WaitForGate(gate), *one_token_chunks(tokens_of("hi"))]) as world,
        connected(world) as client,
    ):
        await client.send(GET + b"\r\n")
        assert (await client.answer()).status == 200
        monkeypatch.setattr(http_protocol.BoundedHttpProtocol, "_on_timeout", count)
        for name in ("HEAD_TIMEOUT_S", "MESSAGE_TIMEOUT_S"):  # of bytes that come at once, however slow the machine is
            monkeypatch.setattr(http_protocol, name, 0.02)
        await client.send(WHOLE_POST + b"GET /hea")
        async with asyncio.timeout(TIMEOUT_S):
            await often_late.wait()
        gate.set()
        assert (await client.answer()).status == 200


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"TLS/1.0"])
async def test_an_upgrade_offer_is_answered_in_http_1_1(protocol: bytes):
    """Some clients offer HTTP/2 with every first request."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: %b\r\nhttp2-settings: AAMAAABk\r\n" % protocol
    data = POST + offer + b"content-length: %d\r\n\r\n%b" % (len(COMPLETION), COMPLETION)
    async with router(says("hi")) as world, connected(world) as client:
        await client.send(data)
        assert (await client.answer()).status == 200
        await client.send(data[:200], data[200:], WHOLE_POST)
        assert [(await client.answer()).status for _ in range(2)] == [200, 200]
        await client.send(data * 3)
        assert [(await client.answer()).status for _ in range(3)] == [200] * 3
        assert len(world.dispatcher.finished) == 6


async def test_requests_may_be_pipelined():
    async with router(says("hi")) as world, connected(world) as client:
        for _ in range(3):
            await client.send(WHOLE_POST)
            assert (await client.answer()).status == 200
        await client.send(WHOLE_POST * 3 + GET + b"\r\n")
        assert [(await client.answer()).status for _ in range(4)] == [200] * 4
        for byte in GET + b"\r\n":
            await client.send(bytes([byte]))
        assert (await client.answer()).status == 200


@pytest.mark.parametrize("connection", [b"", b"connection: close\r\n"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_refused_body_is_answered_before_the_close(connection: bytes, chunked: bool):
    """The client sends its whole body before it reads. A reset would make its kernel drop the response."""
    size, piece = 8 << 20, 64 << 10
    async with router(says("hi")) as world, connected(world) as client:
        length = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % size
        head = POST + connection + length + b"\r\n\r\n"
        part = b"%x\r\n%b\r\n" % (piece, b" " * piece) if chunked else b" " * piece
        for data in (head, *[part] * (size // piece)):
            client.writer.write(data)
            await client.writer.drain()
        await asyncio.sleep(0.2)
        answer = await client.answer()
        assert (answer.status, answer.code, answer.headers["connection"]) == (413, "body_too_large", "close")
        assert await client.closed() == b""


async def test_a_refused_client_that_never_stops_is_closed(monkeypatch):
    monkeypatch.setattr(lingering_close, "LINGER_S", 0.3)
    async with router(says("hi")) as world, connected(world) as client:
        await client.send(POST + b"content-length: 999999999\r\n\r\n", b" " * 1000)
        assert (await client.answer()).status == 413
        assert await client.closed() == b""
        async with asyncio.timeout(TIMEOUT_S):
            with contextlib.suppress(ConnectionError):
                while True:
                    client.writer.write(b" " * 1000)
                    await client.writer.drain()
                    await asyncio.sleep(0.01)


async def test_the_bytes_of_a_refused_client_are_bounded(monkeypatch):
    monkeypatch.setattr(lingering_close, "MAX_LINGER_BYTES", 1 << 20)
    monkeypatch.setattr(lingering_close, "LINGER_S", 60.0)
    async with router(says("hi")) as world, connected(world) as client:
        await client.send(POST + b"content-length: 999999999\r\n\r\n")
        await client.send(*[b" " * (64 << 10)] * 1000)
        await client.closed()
        assert client.writer.transport.is_closing()
