"""TCP proxies that can reset their connections and refuse new ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.rpc.sockets.listen import stop_accepting

CHUNK_BYTES = 64 << 10


class ResettingProxy:
    """Forwards connections to `port`, which is read for each connection."""

    def __init__(self, port: Callable[[], int]) -> None:
        self._port_of = port
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_connections = 0
        self.refuses = False

    async def start(self) -> int:
        """Listens; returns the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def reset(self) -> None:
        """Breaks all connections; bytes on the way are lost."""
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.transport.abort()

    async def stop(self) -> None:
        """Ends everything."""
        if self._server is not None:
            await stop_accepting(self._server)
        self.reset()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.transport.abort()
            return
        upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self._port_of())
        if self._server is None or not self._server.is_serving():  # stopped meanwhile
            writer.transport.abort()
            upstream.transport.abort()
            return
        self._writers += [writer, upstream]
        self.num_connections += 1  # from here on a reset breaks it
        for source, sink in ((reader, upstream), (upstream_reader, writer)):
            task = asyncio.create_task(self._forward(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(CHUNK_BYTES):
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()


class ProxyPair:
    """Proxies of a worker's gRPC server and of its port of sessions, in one condition."""

    def __init__(self, calls: ResettingProxy, sessions: ResettingProxy) -> None:
        self.calls = calls
        self.sessions = sessions

    @property
    def num_connections(self) -> int:
        return self.calls.num_connections + self.sessions.num_connections

    @property
    def refuses(self) -> bool:
        return self.calls.refuses

    @refuses.setter
    def refuses(self, refuses: bool) -> None:
        self.calls.refuses = self.sessions.refuses = refuses

    def reset(self) -> None:
        """Breaks all connections; bytes on the way are lost."""
        self.calls.reset()
        self.sessions.reset()

    async def stop(self) -> None:
        """Ends everything."""
        await self.calls.stop()
        await self.sessions.stop()
