"""A TCP proxy that can be bad: it delays, narrows, holds, cuts and damages what passes through. One a server.

`network` makes one for every server of a cluster, and says at each accept who the client is; what happens to a
connection is looked up by that name at every piece of data, so that conditions change under open connections.
Runs in one asyncio loop. Knows no protocol but, for flips, the frames of HTTP/2.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from chaos.flipper import FlipBudget, FrameFlipper
from chaos.peers import Address

PIECE_BYTES = 16 * 1024
MAX_PIECES_ON_THE_WAY = 256
CONNECT_TIMEOUT_S = 2.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, no time: close() sends RST


@dataclass(frozen=True, slots=True)
class Condition:
    """How the way between a client and a server is. The default is a good one.

    `held`: nothing gets through, no end is told, and what was sent arrives when the condition is over, as TCP would
    send it again; connections asked for meanwhile are not made. `cut`: connections are reset, and new ones too.
    `flips` damages what the server sends.
    """

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    held: bool = False
    cut: bool = False
    flips: FlipBudget | None = None


GOOD = Condition()


class Weather:
    """The present condition of one client's way to one server; those who wait for a change of it are woken.

    `num_page_frames` counts frames with page bytes that the server has sent.
    """

    def __init__(self) -> None:
        self.num_page_frames = 0
        self._now = GOOD
        self._changed = asyncio.Event()
        self._released = asyncio.Event()
        self._released.set()

    @property
    def now(self) -> Condition:
        return self._now

    def change(self, condition: Condition) -> None:
        """From here on."""
        self._now = condition
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if condition.held:
            self._released.clear()
        else:
            self._released.set()

    async def released(self) -> None:
        """Waits until nothing is held."""
        await self._released.wait()

    async def is_cut(self) -> None:
        """Waits until connections are cut."""
        while not self._now.cut:
            await self._changed.wait()


class Proxy:
    """Listens on a port of its own in front of `upstream` (host, port), which may change when the server restarts.

    `weather_of` is told both ends of a connection, the client's first, and gives the weather of that client.
    """

    def __init__(self, upstream: tuple[str, int], weather_of: Callable[[Address, Address], Weather]) -> None:
        self.upstream = upstream
        self._weather_of = weather_of
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Takes connections from now on."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=PIECE_BYTES)

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Resets what is open and ends; idempotent."""
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The root of one connection's task."""
        try:
            await self._carry(reader, writer)
        except (OSError, TimeoutError):
            pass  # nobody listens upstream: the client is told by a reset
        finally:
            _reset(writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        weather = self._weather_of(writer.get_extra_info("peername"), writer.get_extra_info("sockname"))
        if weather.now.held:  # in a real partition this connection would never have been made
            await weather.released()
            return
        if weather.now.cut:
            return
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            far_reader, far_writer = await asyncio.open_connection(*self.upstream, limit=PIECE_BYTES)
        cut = asyncio.create_task(weather.is_cut())
        ways = [
            asyncio.create_task(_Way(weather, damages=False).run(reader, far_writer)),
            asyncio.create_task(_Way(weather, damages=True).run(far_reader, writer)),
        ]
        try:
            await _until_over(ways, cut)
        finally:
            for each in (*ways, cut):
                each.cancel()
            await asyncio.gather(*ways, cut, return_exceptions=True)
            _reset(far_writer)


class _Way:
    """One direction of one connection: pieces are read, kept until they are due, and written."""

    def __init__(self, weather: Weather, *, damages: bool) -> None:
        self._weather = weather
        self._flipper = FrameFlipper() if damages else None
        self._pieces: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue(MAX_PIECES_ON_THE_WAY)

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Until the reader's end has been passed on; False when either side broke off instead."""
        reading = asyncio.create_task(self._read(reader))
        try:
            return await self._write(writer)
        except OSError:
            return False
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Pieces with the time they are due; b"" is the end, None a broken connection."""
        loop = asyncio.get_running_loop()
        piece: bytes | None = b"more"
        while piece:
            try:
                piece = await reader.read(PIECE_BYTES)
            except OSError:
                piece = None
            await self._pieces.put((loop.time() + self._weather.now.delay_s, piece))

    async def _write(self, writer: asyncio.StreamWriter) -> bool:
        loop = asyncio.get_running_loop()
        while True:
            due, piece = await self._pieces.get()
            await asyncio.sleep(max(0.0, due - loop.time()))  # the delay itself
            await self._weather.released()
            if piece is None:
                return False
            if not piece:
                writer.write_eof()
                return True
            rate = self._weather.now.bytes_per_s
            if rate is not None:
                await asyncio.sleep(len(piece) / rate)  # the narrowness itself
            if self._flipper is not None:
                num_before = self._flipper.num_page_frames
                piece = self._flipper.feed(piece, self._weather.now.flips)
                self._weather.num_page_frames += self._flipper.num_page_frames - num_before
            writer.write(piece)
            await writer.drain()


async def _until_over(ways: list[asyncio.Task[bool]], cut: asyncio.Task[None]) -> None:
    """Until both directions have ended well, one has broken, or the connection is cut."""
    pending = set(ways)
    while pending:
        done, _ = await asyncio.wait({*pending, cut}, return_when=asyncio.FIRST_COMPLETED)
        if cut in done or not all(way.result() for way in ways if way in done):
            return
        pending -= done


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes with RST, so that the other side hears of it at once."""
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
