"""The fault proxy does what its condition says, to connections that are open and to new ones."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator

import pytest

from chaos.flipper import MIN_PAYLOAD_BYTES, FlipBudget, FrameFlipper
from chaos.network import HELD, STRANGER, Network
from chaos.peers import owner_of
from chaos.proxy import Condition

TIMEOUT_S = 10.0
SERVER = "echo"
LONG_ENOUGH_S = 0.2
"""To see that nothing comes; what must come is waited for with `TIMEOUT_S`."""


class Caller:
    """One connection to the echo server, through the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def say(self, words: bytes) -> bytes:
        self.writer.write(words)
        async with asyncio.timeout(TIMEOUT_S):
            return await self.reader.readexactly(len(words))

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


class World:
    """A network with an echo server behind a proxy, and those who call it."""

    def __init__(self) -> None:
        self.network = Network(dict)
        self._address = ""
        self._callers: list[Caller] = []
        self._conversations: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> World:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._address = await self.network.serve(SERVER, self._server.sockets[0].getsockname())
        return self

    async def __aexit__(self, *_: object) -> None:
        for caller in self._callers:
            caller.writer.transport.abort()
        await self.network.close()
        self._server.close()
        for task in self._conversations:
            task.cancel()
        await asyncio.gather(*self._conversations, return_exceptions=True)

    async def call(self) -> Caller:
        host, port = self._address.split(":")
        self._callers.append(Caller(*await asyncio.open_connection(host, int(port))))
        return self._callers[-1]

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._echo(reader, writer))
        self._conversations.add(task)
        task.add_done_callback(self._conversations.discard)

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
async def world() -> AsyncIterator[World]:
    async with World() as world:
        yield world


async def test_passes_everything_when_the_weather_is_good(world: World) -> None:
    caller = await world.call()
    words = bytes(range(256)) * 4096
    assert await caller.say(words) == words


async def test_a_cut_resets_open_connections_and_new_ones(world: World) -> None:
    before = await world.call()
    assert await before.say(b"hello") == b"hello"
    world.network.change([STRANGER], [SERVER], Condition(cut=True))
    assert await before.is_reset()
    assert await (await world.call()).is_reset()
    world.network.heal()
    assert await (await world.call()).say(b"again") == b"again"


async def test_what_is_held_arrives_late_and_nothing_is_made_meanwhile(world: World) -> None:
    before = await world.call()
    assert await before.say(b"hello") == b"hello"
    world.network.change([STRANGER], [SERVER], HELD)
    meanwhile = await world.call()
    meanwhile.writer.write(b"anybody?")
    before.writer.write(b"late")
    assert await before.is_silent()
    assert await meanwhile.is_silent()
    world.network.heal()
    async with asyncio.timeout(TIMEOUT_S):
        assert await before.reader.readexactly(4) == b"late"
    assert await meanwhile.is_reset()


async def test_other_pairs_are_not_concerned(world: World) -> None:
    world.network.change(["somebody else"], [SERVER], Condition(cut=True))
    caller = await world.call()
    assert await caller.say(b"hello") == b"hello"


async def test_delay_and_narrowness_take_their_time(world: World) -> None:
    caller = await world.call()
    for condition, least_s in ((Condition(delay_s=0.1), 0.2), (Condition(bytes_per_s=100_000.0), 0.2)):
        world.network.change([STRANGER], [SERVER], condition)
        began_s = time.monotonic()
        assert await caller.say(b"x" * 10_000) == b"x" * 10_000
        assert time.monotonic() - began_s >= least_s


def frame(kind: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, 0]) + (1).to_bytes(4) + payload


@pytest.mark.parametrize("piece_bytes", [1, 7, 4096, 1 << 20])
def test_only_large_data_frames_are_flipped_however_they_are_cut(piece_bytes: int) -> None:
    page = bytes(MIN_PAYLOAD_BYTES)
    stream = frame(4, b"settings") + frame(0, b"a message") + frame(0, page) + frame(1, page) + frame(0, page)
    budget = FlipBudget(1)
    flipper = FrameFlipper()
    pieces = [stream[at : at + piece_bytes] for at in range(0, len(stream), piece_bytes)]
    out = b"".join(flipper.feed(piece, budget) for piece in pieces)
    differing = [at for at, (old, new) in enumerate(zip(stream, out, strict=True)) if old != new]
    begin = len(frame(4, b"settings") + frame(0, b"a message")) + 9
    assert len(differing) == budget.num_flipped == 1
    assert flipper.num_page_frames == 2
    assert begin <= differing[0] < begin + MIN_PAYLOAD_BYTES


def test_a_client_s_preface_is_no_frame() -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    page = frame(0, bytes(MIN_PAYLOAD_BYTES))
    flipper, budget = FrameFlipper(), FlipBudget(None)
    out = flipper.feed(preface + page + page, budget)
    assert out.startswith(preface)
    assert budget.num_flipped == 2


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")])
def test_the_process_behind_a_connection_is_known(family: socket.AddressFamily, address: str) -> None:
    """Also when it calls an IPv4 address from an IPv6 socket, as gRPC does."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(family) as client:
        client.connect((address, server.getsockname()[1]))
        with server.accept()[0] as accepted:
            ends = accepted.getpeername(), accepted.getsockname()
            assert owner_of(*ends, {"nobody": 2**22 + 1, "we": os.getpid()}) == "we"
            assert owner_of(*ends, {"nobody": 2**22 + 1}) is None
            assert owner_of(("127.0.0.1", 1), ends[1], {"we": os.getpid()}) is None
