"""HTTP/1.1 connections and a pool of idle ones. Used by `bench_client`.

A protocol with callbacks and no task a token: only a clock reading, the parser and the meter lie between the socket and
a time stamp. Knows nothing of the contents of a body.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools


class ResponseReceiver(Protocol):
    """Receives one response."""

    def on_status(self, status: int) -> None:
        """Called once, before any body."""
        ...

    def on_body(self, data: bytes, at_s: float) -> None:
        """Called with every piece of the body; `at_s` is when its bytes were read from the socket."""
        ...


MAX_IDLE_S = 2.0
"""Longest idle time of a connection that is used again: many servers end those that are idle for 5 s."""


class HttpConnection(asyncio.Protocol):
    """Carries one exchange after another."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._receiver: ResponseReceiver | None = None
        self._response_end: asyncio.Future[None] | None = None
        self._read_at_s = 0.0
        self._ends_at_eof = True
        self._closed = asyncio.Event()
        self._keep_alive = True

    @property
    def is_reusable(self) -> bool:
        """True if neither side has ended the connection, nor may be about to: servers end those that are idle."""
        if not self._keep_alive or self._transport is None or self._transport.is_closing():
            return False
        return self._read_at_s == 0.0 or self._clock() - self._read_at_s < MAX_IDLE_S

    async def exchange(self, request: bytes, receiver: ResponseReceiver) -> None:
        """Sends a whole request and returns once the response has been received. Raises `OSError` if it breaks."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the connection is closed")
        self._parser = httptools.HttpResponseParser(self)
        self._receiver, self._ends_at_eof = receiver, True
        self._response_end = asyncio.get_running_loop().create_future()
        transport.write(request)
        try:
            await self._response_end
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._receiver = self._response_end = None

    def close(self) -> None:
        """Aborts the connection; idempotent."""
        self._keep_alive = False
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_closed(self) -> bool:
        """True once the socket is closed."""
        return self._closed.is_set()

    async def wait_closed(self) -> None:
        """Waits until the socket is closed."""
        await self._closed.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """From asyncio."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport does not subclass asyncio's

    def data_received(self, data: bytes) -> None:
        """From asyncio."""
        self._read_at_s = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ConnectionError(f"unreadable HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """From asyncio."""
        self._keep_alive = False
        self._closed.set()
        is_complete = exc is None and self._ends_at_eof and self._parser_has_head()
        self._end(None if is_complete else ConnectionResetError("the server closed the connection"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """From the parser."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_at_eof = False

    def on_headers_complete(self) -> None:
        """From the parser."""
        if self._receiver is not None:
            self._receiver.on_status(self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        """From the parser."""
        if self._receiver is not None:
            self._receiver.on_body(data, self._read_at_s)

    def on_message_complete(self) -> None:
        """From the parser."""
        self._keep_alive = self._keep_alive and self._parser.should_keep_alive()
        self._end(None)

    def _parser_has_head(self) -> bool:
        return bool(self._parser.get_status_code())

    def _end(self, error: OSError | None) -> None:
        if self._response_end is None or self._response_end.done():
            return
        if error is None:
            self._response_end.set_result(None)
        else:
            self._response_end.set_exception(error)


@dataclass(frozen=True, slots=True)
class ServerOrigin:
    """Host, port, scheme and base path of a server."""

    host: str
    port: int
    is_tls: bool
    path: str

    @classmethod
    def parse(cls, base_url: str) -> ServerOrigin:
        """From a URL. Raises `ValueError` for a URL without a host."""
        parts = urlsplit(base_url)
        if not parts.hostname:
            raise ValueError(f"{base_url} names no host")
        is_tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if is_tls else 80), is_tls, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class ConnectionPool:
    """Connections to one server; idle ones are reused first."""

    def __init__(self, origin: ServerOrigin, clock: Callable[[], float]) -> None:
        self._origin = origin
        self._clock = clock
        self._tls = ssl.create_default_context() if origin.is_tls else None
        self._idle: list[HttpConnection] = []
        self._open: list[HttpConnection] = []

    async def exchange(self, request: bytes, receiver: ResponseReceiver) -> None:
        """Sends a request on an idle connection or a new one. Raises `OSError`."""
        connection = self._pop_idle() or await self._connect()
        await connection.exchange(request, receiver)
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()

    async def close(self) -> None:
        """Aborts every connection and returns once all sockets are closed."""
        for connection in self._open:
            connection.close()
        await asyncio.gather(*(connection.wait_closed() for connection in self._open))
        self._open.clear()
        self._idle.clear()

    def _pop_idle(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
            connection.close()
        return None

    async def _connect(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        origin = self._origin
        _, connection = await loop.create_connection(
            lambda: HttpConnection(self._clock), origin.host, origin.port, ssl=self._tls
        )
        self._open = [other for other in self._open if not other.is_closed] + [connection]
        return connection
