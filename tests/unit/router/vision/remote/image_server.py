"""A real https server of images that misbehave, by path, and a network that leads a public address to it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from baton.rpc.sockets.listen import stop_accepting
from baton.services.router.vision.remote.fetcher import Network, connect_socket
from tests.certificates import Certificate

HOST = "localhost"
PUBLIC = "93.184.215.14"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def head(length: int | None, status: str = "200 OK", kind: str = "image/png", more: str = "") -> bytes:
    """The head of an answer."""
    told = "" if length is None else f"Content-Length: {length}\r\n"
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{told}{more}\r\n".encode()


def whole(data: bytes, **more: str) -> Answer:
    """Answers with a file."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(head(len(data), **more) + data)

    return answer


def raw(*parts: bytes) -> Answer:
    """Answers with these bytes, then ends."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return answer


@dataclass
class ImageServer:
    """`answers` by path. Notes what was asked, resolved and connected to."""

    certificate: Certificate
    answers: dict[str, Answer]
    addresses: list[Sequence[str]] = field(default_factory=lambda: [(PUBLIC,)])
    """What the name resolves to, the first time, the second time, ..."""
    requests: list[bytes] = field(default_factory=list)
    resolved: list[str] = field(default_factory=list)
    connected: list[str] = field(default_factory=list)
    port: int = 0

    def network(self, timeout_s: float = 60.0, authorities: bool = True) -> Network:
        """`authorities` False: the server's certificate is not trusted."""
        trusted = str(self.certificate.authorities) if authorities else None
        return Network(self._resolve, self._connect, ssl.create_default_context(cafile=trusted), timeout_s)

    async def _resolve(self, host: str) -> Sequence[str]:
        self.resolved.append(host)
        return self.addresses[min(len(self.resolved), len(self.addresses)) - 1]

    async def _connect(self, address: str, port: int) -> socket.socket:
        assert port == 443
        self.connected.append(address)
        return await connect_socket("127.0.0.1", self.port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(request)
            await self.answers[request.split()[1].decode()](writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has what it wanted
        finally:
            writer.close()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ImageServer]:
        """Serves until the end of the block."""
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(self.certificate.certificate, self.certificate.key)
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            await stop_accepting(server)
