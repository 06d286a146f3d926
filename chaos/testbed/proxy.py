"""A faulty TCP proxy: delays, throttles, holds, resets and corrupts the bytes of one server.

`network` makes one for every server of a cluster and identifies the client at each accept. The condition of a client is
looked up for every piece of data, so it changes under open connections. Runs in one asyncio loop. Knows no protocol
except frames with page bytes and with messages, for bit flips.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from baton.rpc.sockets.listen import stop_accepting
from chaos.testbed.bit_flipper import BitFlipper, FlipBudget, PortKind
from chaos.testbed.connection_owner import Address

PIECE_BYTES = 16 * 1024
MAX_QUEUED_PIECES = 256
CONNECT_TIMEOUT_S = 2.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, no time: close() sends RST


@dataclass(frozen=True, slots=True)
class LinkCondition:
    """Condition of the connections between a client and a server. The default is good.

    `partitioned`: nothing gets through, no end is signalled, and held bytes arrive when the condition ends, as TCP
    would retransmit them; new connections wait. `reset`: open and new connections are reset. `flips` corrupts what the
    server sends.
    """

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    partitioned: bool = False
    reset: bool = False
    flips: FlipBudget | None = None


HEALTHY = LinkCondition()


class LinkState:
    """The present condition of one client's connections to one server; a change wakes its waiters.

    `num_page_frames` counts frames with page bytes that the server has sent, `num_session_messages` what it has sent on
    session connections, `num_bytes` the bytes of both directions.
    """

    def __init__(self) -> None:
        self.num_page_frames = 0
        self.num_session_messages = 0
        self.num_bytes = 0
        self._condition = HEALTHY
        self._changed = asyncio.Event()
        self._healed = asyncio.Event()
        self._healed.set()

    @property
    def condition(self) -> LinkCondition:
        return self._condition

    def change(self, condition: LinkCondition) -> None:
        """Sets the condition."""
        self._condition = condition
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if condition.partitioned:
            self._healed.clear()
        else:
            self._healed.set()

    async def wait_healed(self) -> None:
        """Waits until the link is not partitioned."""
        await self._healed.wait()

    async def wait_reset(self) -> None:
        """Waits until the link resets its connections."""
        while not self._condition.reset:
            await self._changed.wait()


class Proxy:
    """Listens on a port of its own in front of `upstream` (host, port), which may change when the server restarts.

    `state_of` maps both ends of a connection, the client's first, to the link state of that client.
    """

    def __init__(
        self,
        upstream: tuple[str, int],
        state_of: Callable[[Address, Address], LinkState],
        kind: PortKind = PortKind.CALLS,
    ) -> None:
        """`kind`: of the port of `upstream`."""
        self.upstream = upstream
        self._kind = kind
        self._state_of = state_of
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Starts to accept connections."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=PIECE_BYTES)

    @property
    def port(self) -> int:
        """The address it listens on."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Resets open connections and stops; idempotent."""
        if self._server is not None:
            await stop_accepting(self._server)
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
            await self._forward(reader, writer)
        except (OSError, TimeoutError):
            pass  # upstream is down: the client gets a reset
        finally:
            _reset(writer)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link_state = self._state_of(writer.get_extra_info("peername"), writer.get_extra_info("sockname"))
        if link_state.condition.partitioned:  # a real partition would not have let this connection open
            await link_state.wait_healed()
            return
        if link_state.condition.reset:
            return
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            upstream_reader, upstream_writer = await asyncio.open_connection(*self.upstream, limit=PIECE_BYTES)
        reset = asyncio.create_task(link_state.wait_reset())
        directions = [
            asyncio.create_task(_Direction(link_state, None).run(reader, upstream_writer)),
            asyncio.create_task(_Direction(link_state, BitFlipper(self._kind)).run(upstream_reader, writer)),
        ]
        try:
            await _until_over(directions, reset)
        finally:
            for each in (*directions, reset):
                each.cancel()
            await asyncio.gather(*directions, reset, return_exceptions=True)
            _reset(upstream_writer)


class _Direction:
    """One direction of one connection: pieces are read, kept until they are due, and written."""

    def __init__(self, link_state: LinkState, flipper: BitFlipper | None) -> None:
        self._link_state = link_state
        self._flipper = flipper
        self._pieces: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue(MAX_QUEUED_PIECES)

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Runs until the reader's end has been passed on; False if either side broke off."""
        reader_task = asyncio.create_task(self._read(reader))
        try:
            return await self._write(writer)
        except OSError:
            return False
        finally:
            reader_task.cancel()
            await asyncio.gather(reader_task, return_exceptions=True)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Pieces with the time they are due; b"" is the end, None a broken connection."""
        loop = asyncio.get_running_loop()
        piece: bytes | None = b"more"
        while piece:
            try:
                piece = await reader.read(PIECE_BYTES)
            except OSError:
                piece = None
            await self._pieces.put((loop.time() + self._link_state.condition.delay_s, piece))

    async def _write(self, writer: asyncio.StreamWriter) -> bool:
        loop = asyncio.get_running_loop()
        while True:
            due, piece = await self._pieces.get()
            await asyncio.sleep(max(0.0, due - loop.time()))  # the delay
            await self._link_state.wait_healed()
            if piece is None:
                return False
            if not piece:
                writer.write_eof()
                return True
            rate = self._link_state.condition.bytes_per_s
            if rate is not None:
                await asyncio.sleep(len(piece) / rate)  # the throttle
                await self._link_state.wait_healed()  # a partition may have begun meanwhile
            if self._flipper is not None:
                before = self._flipper.num_page_frames, self._flipper.num_session_messages
                piece = self._flipper.feed(piece, self._link_state.condition.flips)
                self._link_state.num_page_frames += self._flipper.num_page_frames - before[0]
                self._link_state.num_session_messages += self._flipper.num_session_messages - before[1]
            self._link_state.num_bytes += len(piece)
            writer.write(piece)
            await writer.drain()


async def _until_over(directions: list[asyncio.Task[bool]], reset: asyncio.Task[None]) -> None:
    """Waits until both directions have ended, one has broken, or the connection is reset."""
    pending = set(directions)
    while pending:
        done, _ = await asyncio.wait({*pending, reset}, return_when=asyncio.FIRST_COMPLETED)
        if reset in done or not all(direction.result() for direction in directions if direction in done):
            return
        pending -= done


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes with RST, so the other side notices at once."""
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
