"""A TCP proxy that flips one bit in a frame of HTTP/2 or of sessions: damage that TCP's checksum did not notice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from baton.rpc.call_token import TOKEN_BYTES
from baton.rpc.sockets.listen import stop_accepting
from baton.session.wires.socket_connection import LENGTH, MAGIC, REFUSED

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9
DATA, HEADERS, SESSION, NO_FRAME = 0, 1, -1, -2
"""Types of HTTP/2 frames; of what a session connection carries, its preamble and messages with lengths; of the rest."""


class FlipPlan:
    """Flips one bit in the `skip`-th frame of `kind` that passes any proxy of the plan, once."""

    def __init__(self, rng: random.Random, skip: int, kind: int = DATA) -> None:
        self.kind = kind
        self._rng = rng
        self._skip = skip
        self.num_frames = 0
        self.flipped = False

    def apply(self, payload: bytes) -> bytes:
        """The payload of a frame of `kind`, with or without damage."""
        self.num_frames += 1
        if self.flipped or self.num_frames <= self._skip or not payload:
            return payload
        self.flipped = True
        bit = self._rng.randrange(8 * len(payload))
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << bit % 8
        return bytes(damaged)


Frames = AsyncIterator[tuple[int, bytes, bytes]]
"""Frames of one direction: kind, head and payload."""


async def http_frames(source: asyncio.StreamReader, is_client: bool) -> Frames:
    if is_client:
        yield NO_FRAME, await source.readexactly(len(PREFACE)), b""
    while True:
        header = await source.readexactly(HEADER_BYTES)
        yield header[3], header, await source.readexactly(int.from_bytes(header[:3]))


async def session_frames(source: asyncio.StreamReader, is_client: bool) -> Frames:
    if is_client:
        yield SESSION, b"", await source.readexactly(len(MAGIC) + TOKEN_BYTES)
    while True:
        head = await source.readexactly(LENGTH.size)
        (length,) = LENGTH.unpack(head)
        if length == REFUSED:  # the length of the reason follows
            yield NO_FRAME, head, b""
        else:
            yield SESSION, b"", head + await source.readexactly(length)


class FlippingProxy:
    """Forwards connections to `port`, which is read for each connection."""

    def __init__(
        self,
        port: Callable[[], int],
        plan: FlipPlan,
        frames: Callable[[asyncio.StreamReader, bool], Frames] = http_frames,
    ) -> None:
        self._port_of = port
        self.plan = plan
        self._frames = frames
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        if self._server is not None:
            await stop_accepting(self._server)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in list(self._writers):  # a task that never ran has closed none
            await self._close(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self._port_of())
        except OSError:
            await self._close(writer)
            return
        self._writers.add(upstream[1])
        if self._server is None or not self._server.is_serving():  # stopped meanwhile
            await asyncio.gather(self._close(writer), self._close(upstream[1]))
            return
        for source, sink, is_client in ((reader, upstream[1], True), (upstream[0], writer, False)):
            task = asyncio.create_task(self._forward(source, sink, is_client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_client: bool) -> None:
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                async for kind, head, payload in self._frames(source, is_client):
                    sink.write(head + (self.plan.apply(payload) if kind == self.plan.kind else payload))
                    await sink.drain()
        finally:
            await self._close(sink)

    async def _close(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
