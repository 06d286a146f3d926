"""A TCP proxy that flips one bit in a chosen HTTP/2 frame: damage that TCP's checksum did not notice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9
DATA, HEADERS = 0, 1


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


class FlippingProxy:
    """Forwards connections to `port`, which is read for each connection."""

    def __init__(self, port: Callable[[], int], plan: FlipPlan) -> None:
        self._port_of = port
        self.plan = plan
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self._port_of())
        except OSError:
            writer.close()
            return
        for source, sink, preface_bytes in ((reader, upstream[1], len(PREFACE)), (upstream[0], writer, 0)):
            task = asyncio.create_task(self._forward(source, sink, preface_bytes))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, preface_bytes: int) -> None:
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                if preface_bytes:
                    sink.write(await source.readexactly(preface_bytes))
                while True:
                    header = await source.readexactly(HEADER_BYTES)
                    payload = await source.readexactly(int.from_bytes(header[:3]))
                    sink.write(header + (self.plan.apply(payload) if header[3] == self.plan.kind else payload))
                    await sink.drain()
        finally:
            sink.close()
            with suppress(OSError):
                await sink.wait_closed()
