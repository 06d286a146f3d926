"""Conditions of the fault proxy, on open and on new connections."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator

import pytest

from baton.rpc.sockets.listen import stop_accepting
from baton.session.wires import socket_connection
from baton.transfer.stream import page_wire
from chaos.testbed.bit_flipper import MIN_PAYLOAD_BYTES, BitFlipper, FlipBudget, PortKind
from chaos.testbed.connection_owner import connection_owner
from chaos.testbed.network import PARTITIONED, UNKNOWN_CLIENT, ProxyNetwork
from chaos.testbed.proxy import LinkCondition

TIMEOUT_S = 10.0
SERVER = "echo"
LONG_ENOUGH_S = 0.2
"""Wait that shows silence; data that must come has `TIMEOUT_S`."""


class EchoClient:
    """A connection to the echo server, through the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> bytes:
        self.writer.write(data)
        async with asyncio.timeout(TIMEOUT_S):
            return await self.reader.readexactly(len(data))

    async def is_silent(self) -> bool:
        try:
            async with asyncio.timeout(LONG_ENOUGH_S):
                await self.reader.read(1)
        except TimeoutError:
            return True
        return False

    async def is_reset(self) -> bool:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self.reader.read(1) == b""
        except ConnectionError:
            return True


class EchoNetwork:
    """A network with an echo server behind a proxy, and its clients."""

    def __init__(self) -> None:
        self.network = ProxyNetwork(dict)
        self._address = ""
        self._callers: list[EchoClient] = []
        self._echo_tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> EchoNetwork:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address_of_server: tuple[str, int] = self._server.sockets[0].getsockname()
        self._address = await self.network.serve(SERVER, self.address_of_server)
        return self

    async def __aexit__(self, *_: object) -> None:
        for caller in self._callers:
            caller.writer.transport.abort()
        await self.network.close()
        await stop_accepting(self._server)
        for task in self._echo_tasks:
            task.cancel()
        await asyncio.gather(*self._echo_tasks, return_exceptions=True)

    async def call(self, address: str = "") -> EchoClient:
        host, port = (address or self._address).split(":")
        self._callers.append(EchoClient(*await asyncio.open_connection(host, int(port))))
        return self._callers[-1]

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._echo(reader, writer))
        self._echo_tasks.add(task)
        task.add_done_callback(self._echo_tasks.discard)

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(65536):
                writer.write(piece)
                await writer.drain()
        except OSError:
            return
        finally:
            writer.transport.abort()


@pytest.fixture
async def echo() -> AsyncIterator[EchoNetwork]:
    async with EchoNetwork() as echo:
        yield echo


async def test_a_healthy_link_passes_everything(echo: EchoNetwork) -> None:
    caller = await echo.call()
    data = bytes(range(256)) * 4096
    assert await caller.send(data) == data


async def test_a_reset_ends_open_and_new_connections(echo: EchoNetwork) -> None:
    before = await echo.call()
    assert await before.send(b"hello") == b"hello"
    echo.network.change([UNKNOWN_CLIENT], [SERVER], LinkCondition(reset=True))
    assert await before.is_reset()
    assert await (await echo.call()).is_reset()
    echo.network.heal()
    assert await (await echo.call()).send(b"again") == b"again"


async def test_a_partition_delays_data_and_accepts_no_connection(echo: EchoNetwork) -> None:
    before = await echo.call()
    assert await before.send(b"hello") == b"hello"
    echo.network.change([UNKNOWN_CLIENT], [SERVER], PARTITIONED)
    meanwhile = await echo.call()
    meanwhile.writer.write(b"anybody?")
    before.writer.write(b"late")
    assert await before.is_silent()
    assert await meanwhile.is_silent()
    echo.network.heal()
    async with asyncio.timeout(TIMEOUT_S):
        assert await before.reader.readexactly(4) == b"late"
    assert await meanwhile.is_reset()


async def test_other_links_are_not_affected(echo: EchoNetwork) -> None:
    echo.network.change(["somebody else"], [SERVER], LinkCondition(reset=True))
    caller = await echo.call()
    assert await caller.send(b"hello") == b"hello"


async def test_delay_and_throttling_take_their_time(echo: EchoNetwork) -> None:
    caller = await echo.call()
    for condition, least_s in ((LinkCondition(delay_s=0.1), 0.2), (LinkCondition(bytes_per_s=100_000.0), 0.2)):
        echo.network.change([UNKNOWN_CLIENT], [SERVER], condition)
        began_s = time.monotonic()
        assert await caller.send(b"x" * 10_000) == b"x" * 10_000
        assert time.monotonic() - began_s >= least_s


def frame(kind: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, 0]) + (1).to_bytes(4) + payload


@pytest.mark.parametrize("piece_bytes", [1, 7, 4096, 1 << 20])
def test_only_large_data_frames_are_flipped(piece_bytes: int) -> None:
    page = bytes(MIN_PAYLOAD_BYTES)
    stream = frame(4, b"settings") + frame(0, b"a message") + frame(0, page) + frame(1, page) + frame(0, page)
    budget = FlipBudget(1)
    flipper = BitFlipper()
    pieces = [stream[at : at + piece_bytes] for at in range(0, len(stream), piece_bytes)]
    out = b"".join(flipper.feed(piece, budget) for piece in pieces)
    differing = [at for at, (old, new) in enumerate(zip(stream, out, strict=True)) if old != new]
    begin = len(frame(4, b"settings") + frame(0, b"a message")) + 9
    assert len(differing) == budget.num_flipped == 1
    assert flipper.num_page_frames == 2
    assert begin <= differing[0] < begin + MIN_PAYLOAD_BYTES


@pytest.mark.parametrize("piece_bytes", [1, 7, 4096, 1 << 20])
def test_messages_are_flipped_behind_the_prefix_of_grpc(piece_bytes: int) -> None:
    page, message, empty = bytes(MIN_PAYLOAD_BYTES), bytes(40), bytes(5)
    before = frame(0, page) + frame(1, message) + frame(0, empty)
    stream = before + 2 * frame(0, message)
    flipper, budget = BitFlipper(), FlipBudget(1, messages=True)
    pieces = [stream[at : at + piece_bytes] for at in range(0, len(stream), piece_bytes)]
    out = b"".join(flipper.feed(piece, budget) for piece in pieces)
    differing = [at for at, (old, new) in enumerate(zip(stream, out, strict=True)) if old != new]
    assert differing == [len(before) + 9 + len(message) // 2]
    assert BitFlipper(PortKind.PAGES).feed(stream, FlipBudget(None, messages=True)) == stream


@pytest.mark.parametrize("piece_bytes", [1, 7, 4096, 1 << 20])
def test_answers_of_page_connections_are_flipped_and_refusals_are_not(piece_bytes: int) -> None:
    pages, refusal, empty = bytes(3000), b"no".ljust(6000), page_wire.HEAD.pack(page_wire.PAGES, 0)
    before = page_wire.HEAD.pack(page_wire.REFUSED, len(refusal)) + refusal + empty
    stream = before + 2 * (page_wire.HEAD.pack(page_wire.PAGES, len(pages)) + pages)
    flipper, budget = BitFlipper(PortKind.PAGES), FlipBudget(1)
    pieces = [stream[at : at + piece_bytes] for at in range(0, len(stream), piece_bytes)]
    out = b"".join(flipper.feed(piece, budget) for piece in pieces)
    differing = [at for at, (old, new) in enumerate(zip(stream, out, strict=True)) if old != new]
    assert differing == [len(before) + page_wire.HEAD.size + len(pages) // 2]
    assert (budget.num_flipped, flipper.num_page_frames) == (1, 2)


@pytest.mark.parametrize("piece_bytes", [1, 7, 4096, 1 << 20])
def test_messages_of_session_connections_are_flipped_behind_their_lengths(piece_bytes: int) -> None:
    messages = [bytes(6), bytes(MIN_PAYLOAD_BYTES), bytes(70)]
    framed = [socket_connection.LENGTH.pack(len(message)) + message for message in messages]
    pieces = [b"".join(framed)[at : at + piece_bytes] for at in range(0, sum(map(len, framed)), piece_bytes)]
    flipper, budget = BitFlipper(PortKind.SESSIONS), FlipBudget(2, messages=True)
    out = b"".join(flipper.feed(piece, budget) for piece in pieces)
    differing = [at for at, (old, new) in enumerate(zip(b"".join(framed), out, strict=True)) if old != new]
    size = socket_connection.LENGTH.size
    assert differing == [size + 3, len(framed[0]) + size + MIN_PAYLOAD_BYTES // 2]
    assert (flipper.num_session_messages, flipper.num_page_frames) == (3, 0)


@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_refusals_of_session_connections_are_not_flipped(piece_bytes: int) -> None:
    refused = socket_connection.refusal("another incarnation")
    flipper, budget = BitFlipper(PortKind.SESSIONS), FlipBudget(None, messages=True)
    pieces = [refused[at : at + piece_bytes] for at in range(0, len(refused), piece_bytes)]
    assert b"".join(flipper.feed(piece, budget) for piece in pieces) == refused
    assert (flipper.num_session_messages, budget.num_flipped) == (0, 0)


def test_pages_are_not_flipped_in_a_session_connection() -> None:
    message = socket_connection.LENGTH.pack(MIN_PAYLOAD_BYTES) + bytes(MIN_PAYLOAD_BYTES)
    assert BitFlipper(PortKind.SESSIONS).feed(message, FlipBudget(None)) == message


async def test_all_ports_of_a_server_have_one_condition(echo: EchoNetwork) -> None:
    """A fault of a link hits calls, pages and sessions alike."""
    addresses = {kind: await echo.network.serve(SERVER, echo.address_of_server, kind=kind) for kind in PortKind}
    assert len(set(addresses.values())) == len(PortKind)
    callers = [await echo.call(address) for address in addresses.values()]
    for caller in callers:
        assert await caller.send(b"hello") == b"hello"
    echo.network.change([UNKNOWN_CLIENT], [SERVER], LinkCondition(reset=True))
    assert [await caller.is_reset() for caller in callers] == [True] * len(PortKind)


def test_the_client_preface_is_no_frame() -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    page = frame(0, bytes(MIN_PAYLOAD_BYTES))
    flipper, budget = BitFlipper(), FlipBudget(None)
    out = flipper.feed(preface + page + page, budget)
    assert out.startswith(preface)
    assert budget.num_flipped == 2


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")])
def test_the_process_behind_a_connection_is_known(family: socket.AddressFamily, address: str) -> None:
    """Covers gRPC, which calls IPv4 addresses from IPv6 sockets."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(family) as client:
        client.connect((address, server.getsockname()[1]))
        with server.accept()[0] as accepted:
            ends = accepted.getpeername(), accepted.getsockname()
            assert connection_owner(*ends, {"nobody": 2**22 + 1, "we": os.getpid()}) == "we"
            assert connection_owner(*ends, {"nobody": 2**22 + 1}) is None
            assert connection_owner(("127.0.0.1", 1), ends[1], {"we": os.getpid()}) is None
