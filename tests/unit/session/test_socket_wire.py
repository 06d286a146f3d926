"""`SocketWire` beside the contract of wires: bytes in any parts, bounds, strangers, refusals, and the way by gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import uvloop

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.rpc.auth_interceptor import Malformed, RejectedCall
from baton.rpc.call_token import CallTokenFault
from baton.rpc.channel import call_token_issuer
from baton.rpc.gen import session_pb2 as pb
from baton.session.wires import socket_server
from baton.session.wires.memory_wire import MemoryConnection, MemoryWire
from baton.session.wires.socket_connection import (
    LENGTH,
    MAGIC,
    MAX_MESSAGE_BYTES,
    METHOD,
    REFUSED,
    ROOM_BYTES,
    SocketConnection,
)
from baton.session.wires.socket_server import MAX_STRANGERS, SessionEndpoint, SocketServer
from baton.session.wires.socket_wire import AVOID_S, MAX_UNANSWERED, ReachingWire, SocketWire
from baton.session.wires.wire import ConnectionRefused, WireConnection

WAIT_S = 10.0
INCARNATION = Incarnation(77)
SECRET = ClusterTrust(b"secret" * 6)


def message(text: str, num_bytes: int = 0) -> pb.SessionMessage:
    return pb.SessionMessage(body=text.encode() + bytes(num_bytes), tag=b"t")


def framed(one: pb.SessionMessage) -> bytes:
    data = one.SerializeToString()
    return LENGTH.pack(len(data)) + data


def preamble(trust: ClusterTrust = SECRET, method: str = METHOD, incarnation: Incarnation = INCARNATION) -> bytes:
    return MAGIC + call_token_issuer(trust, incarnation).issue(method, b"")


@dataclass
class Listener:
    """Echoes what comes, and keeps it."""

    received: list[pb.SessionMessage] = field(default_factory=list)
    rejected: list[RejectedCall] = field(default_factory=list)
    failures: list[LinkBroken] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    server: SocketServer = field(init=False)

    async def serve(self, connection: WireConnection) -> None:
        try:
            while (received := await connection.receive()) is not None:
                self.received.append(received)
                await connection.send(received)
        except LinkBroken as error:
            self.failures.append(error)
        finally:
            self.ended.set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    made = Listener()
    endpoint = SessionEndpoint(on_rejected=made.rejected.append)
    made.server = SocketServer(made.serve, SECRET, INCARNATION, endpoint)
    await made.server.start()
    async with asyncio.timeout(WAIT_S):
        yield made
    await made.server.close()


@contextlib.asynccontextmanager
async def dialled(listener: Listener) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.server.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("seed", range(8))
async def test_messages_are_found_however_their_bytes_come(listener: Listener, seed: int):
    drawn = random.Random(seed)
    sent = [message(str(number), drawn.choice((0, 1, 300, 70_000))) for number in range(40)]
    data = preamble() + b"".join(map(framed, sent))
    async with dialled(listener) as (reader, writer):
        echo = asyncio.create_task(reader.readexactly(len(data) - len(preamble())))
        while data:
            part = drawn.choice((1, 3, 100, 5_000, 100_000))
            writer.write(data[:part])
            await writer.drain()
            data = data[part:]
        assert await echo == b"".join(map(framed, sent))
    assert listener.received == sent
    await listener.ended.wait()
    assert (listener.failures, listener.rejected) == ([], [])


async def test_a_message_that_is_too_long_ends_its_connection(listener: Listener):
    async with dialled(listener) as (reader, writer):
        writer.write(preamble() + LENGTH.pack(MAX_MESSAGE_BYTES + 1))
        assert await reader.read() == b""
    await listener.ended.wait()
    assert [str(one) for one in listener.failures] == [f"a message of {MAX_MESSAGE_BYTES + 1} bytes"]


async def test_bytes_that_are_no_message_end_their_connection(listener: Listener):
    async with dialled(listener) as (reader, writer):
        writer.write(preamble() + LENGTH.pack(3) + b"\xff\xff\xff")
        assert await reader.read() == b""
    await listener.ended.wait()
    assert [str(one) for one in listener.failures] == ["bytes that are no message"]


@pytest.mark.parametrize(
    ("first", "fault"),
    [
        (preamble(ClusterTrust(b"another" * 6)), CallTokenFault.FORGED),
        (preamble(OPEN_CLUSTER), CallTokenFault.MISSING),
        (preamble(method="/baton.v1.Session/Connect"), CallTokenFault.FORGED),
        (preamble(incarnation=Incarnation(78)), CallTokenFault.OTHER_INCARNATION),
        (b"GET / HTTP/1.1\r\n" + bytes(200), Malformed.MALFORMED),
    ],
)
async def test_nothing_is_read_from_a_stranger(listener: Listener, first: bytes, fault: CallTokenFault | Malformed):
    async with dialled(listener) as (reader, writer):
        writer.write(first + framed(message("hello")))
        answer = await reader.read()
    assert LENGTH.unpack_from(answer) == (REFUSED,)
    assert [one.fault for one in listener.rejected] == [fault]
    assert listener.received == []
    assert not listener.ended.is_set()


async def test_a_captured_token_opens_no_second_connection(listener: Listener):
    captured = preamble()
    for number in range(2):
        async with dialled(listener) as (reader, writer):
            writer.write(captured + framed(message(str(number))))
            await reader.readexactly(LENGTH.size)
    assert [one.fault for one in listener.rejected] == [CallTokenFault.REPLAYED]
    assert listener.received == [message("0")]


async def test_a_dialler_that_is_refused_hears_why(listener: Listener):
    connection = await SocketWire(SECRET).connect(listener.address, Incarnation(78))
    with pytest.raises(ConnectionRefused, match="earlier incarnation"):
        await connection.receive()
    connection.close()


async def test_strangers_make_room_and_keep_no_connection(listener: Listener, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket_server, "TOKEN_S", 0.2)
    async with contextlib.AsyncExitStack() as stack:
        strangers = [await stack.enter_async_context(dialled(listener)) for _ in range(MAX_STRANGERS + 8)]
        assert await strangers[0][0].read() == b"", "the oldest made room"
        connection = await SocketWire(SECRET).connect(listener.address, INCARNATION)
        await connection.send(message("hello"))
        assert await connection.receive() == message("hello")
        for reader, _ in strangers:
            assert await reader.read() == b"", "a token is awaited for a while only"
        assert listener.server.num_connections == 1
        connection.close()


@pytest.mark.parametrize("num_passes", range(5))
async def test_a_close_loses_no_connection_on_its_way_in(num_passes: int):
    """asyncio accepts a socket in one pass of the loop, and makes and announces its transport in the next two."""
    heard = Listener()
    server = heard.server = SocketServer(heard.serve, SECRET, INCARNATION, SessionEndpoint())
    await server.start()
    with socket.create_connection(("127.0.0.1", server.port)) as dialler:
        dialler.setblocking(False)
        for _ in range(num_passes):
            await asyncio.sleep(0)
        await server.close()
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionResetError):  # it was not accepted yet
                assert await asyncio.get_running_loop().sock_recv(dialler, 1) == b""
    assert server.num_connections == 0


@pytest.mark.parametrize("num_passes", range(5))
async def test_a_close_ends_a_connection_that_was_accepted_in_it(
    listener: Listener, num_passes: int, monkeypatch: pytest.MonkeyPatch
):
    """A task that is cancelled before its first step closes nothing."""
    admitted, admit = asyncio.Event(), listener.server.admit

    def tell(stranger: WireConnection) -> bool:
        admitted.set()
        return admit(stranger)  # type: ignore[arg-type]

    monkeypatch.setattr(listener.server, "admit", tell)
    async with dialled(listener) as (reader, _):
        await admitted.wait()
        [stranger] = listener.server._strangers
        closing = asyncio.create_task(listener.server.close())
        for _ in range(num_passes):
            await asyncio.sleep(0)
        if not stranger._ended:  # else it was closed as a stranger
            stranger.data_received(preamble())
        await closing
        assert await reader.read() == b""
    assert listener.server.num_connections == 0


async def test_a_reader_that_stands_still_holds_few_bytes(listener: Listener):
    go_on, begun = asyncio.Event(), asyncio.Event()

    async def serve(connection: WireConnection) -> None:
        begun.set()
        await go_on.wait()

    listener.server._serve = serve
    one = framed(message("", 64 << 10))
    async with dialled(listener) as (_, writer):
        writer.write(preamble())
        await begun.wait()
        [served] = listener.server._serving.values()
        for _ in range(100):  # 6 MiB, which the transport holds
            writer.write(one)
        while served._is_reading:  # noqa: ASYNC110 - that it reads no further sends no event
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert ROOM_BYTES < served._received_bytes <= ROOM_BYTES + (1 << 20), "what one read brings, beside the room"
        go_on.set()


async def test_a_close_ends_a_connection_whose_peer_reads_nothing(listener: Listener, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("baton.session.wires.socket_connection.CLOSE_S", 0.1)
    is_full, lost = asyncio.Event(), asyncio.Event()

    async def serve(connection: WireConnection) -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(0.3):
                    await connection.send(message("", 1 << 20))
        is_full.set()
        await connection.receive()

    listener.server._serve = serve
    async with dialled(listener) as (_, writer):
        writer.write(preamble())
        await is_full.wait()
        [served] = listener.server._serving.values()
        served.connection_lost = lambda error: lost.set()  # type: ignore[method-assign]
        await listener.server.close()
        await lost.wait()


@dataclass
class Fallback:
    """A wire that reaches `listener`'s port, or gRPC, which a wire in memory stands for."""

    listener: Listener
    session_address: str
    reasons: list[str] = field(default_factory=list)
    now: float = 0.0
    grpc: MemoryWire = field(default_factory=MemoryWire)

    def __post_init__(self) -> None:
        self.grpc.listen("127.0.0.1:50051", self.listener.serve)
        socket = SocketWire(SECRET)
        self.wire = ReachingWire(socket, self.grpc, self.session_address, self.reasons.append, lambda: self.now)

    async def used(self) -> str:
        """What carries the next connection, once it has answered."""
        connection = await self.wire.connect("127.0.0.1:50051", INCARNATION)
        await connection.send(message("hello"))
        assert await connection.receive() == message("hello")
        connection.close()
        return connection.wire


async def test_a_port_that_is_reached_is_used(listener: Listener):
    fallback = Fallback(listener, str(listener.server.port))
    assert [await fallback.used(), await fallback.used()] == ["socket", "socket"]
    assert fallback.reasons == []


@pytest.mark.parametrize("announced", ["127.0.0.1:1", "no address", "host:70000"])
async def test_grpc_is_used_while_the_port_is_not_reached(listener: Listener, announced: str):
    fallback = Fallback(listener, announced)
    assert [await fallback.used(), await fallback.used()] == ["memory", "memory"]
    assert len(fallback.reasons) == 1, "tried and told once"
    fallback.now = AVOID_S
    fallback.wire._session_address = listener.address
    assert await fallback.used() == "socket"


async def test_grpc_is_used_where_something_else_listens(listener: Listener):
    """It hangs up on two connections in a row, before a word of the listener."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    other = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    fallback = Fallback(listener, str(other.sockets[0].getsockname()[1]))
    for _ in range(MAX_UNANSWERED):
        connection = await fallback.wire.connect("127.0.0.1:50051", INCARNATION)
        assert isinstance(connection, SocketConnection)
        assert await connection.receive() is None
    assert await fallback.used() == "memory"
    assert len(fallback.reasons) == 1
    other.close()


async def test_a_port_is_used_again_after_a_network_was_away(listener: Listener):
    """Connections that were opened meanwhile ended without an answer, or none could be opened: so it was by gRPC."""
    fallback = Fallback(listener, listener.address)
    opened = await fallback.wire.connect("127.0.0.1:50051", INCARNATION)
    opened.close()  # nothing was heard
    fallback.grpc.stop("127.0.0.1:50051")
    for _ in range(2 * MAX_UNANSWERED):
        with pytest.raises(LinkBroken):
            await fallback.wire.connect("127.0.0.1:50051", INCARNATION)
    fallback.grpc.listen("127.0.0.1:50051", listener.serve)
    assert await fallback.used() == "socket"
    assert fallback.reasons == []


async def test_a_port_that_returns_with_grpc_is_used(listener: Listener):
    """The network comes back between the two dials."""
    fallback = Fallback(listener, "127.0.0.1:1")
    connect = fallback.grpc.connect

    async def come_back(address: str, incarnation: Incarnation) -> MemoryConnection:
        fallback.wire._session_address = listener.address
        return await connect(address, incarnation)

    fallback.grpc.connect = come_back  # type: ignore[method-assign]
    assert await fallback.used() == "socket"
    assert fallback.reasons == []


def test_messages_arrive_in_the_event_loop_of_services():
    async def echoed() -> pb.SessionMessage | None:
        listener = Listener()
        listener.server = SocketServer(listener.serve, SECRET, INCARNATION, SessionEndpoint())
        await listener.server.start()
        connection = await SocketWire(SECRET).connect(listener.address, INCARNATION)
        await connection.send(message("hello", 1 << 20))
        answer = await connection.receive()
        connection.close()
        await listener.server.close()
        return answer

    assert uvloop.run(echoed()) == message("hello", 1 << 20)


async def test_a_process_that_is_gone_is_not_reached(listener: Listener):
    fallback = Fallback(listener, "127.0.0.1:1")
    with pytest.raises(LinkBroken):
        await fallback.wire.connect("127.0.0.1:2", INCARNATION)
    assert fallback.reasons == [], "it is gone, which says nothing of its port"
