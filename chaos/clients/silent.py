"""Clients that send a request and never read its answer: their sockets stay open, with the smallest receive buffer."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from chaos.clients.client import COMPLETIONS
from chaos.clients.requests import FILLER

RECEIVE_BUFFER_BYTES = 1024
CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class SilentClient:
    """One open connection with an unread answer."""

    connection: socket.socket

    @classmethod
    async def connect(cls, url: str, model: str, num_choices: int) -> SilentClient:
        """Sends a streamed request with `num_choices` long choices and logprobs."""
        target = urlsplit(url)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        body = json.dumps(
            {"model": model, "stream": True, "n": num_choices, "logprobs": 5, **FILLER.parameters, "temperature": 1.0}
        )
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: {target.netloc}\r\ncontent-type: application/json\r\n"
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await loop.sock_connect(connection, (target.hostname, target.port))
            await loop.sock_sendall(connection, f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        return cls(connection)

    def close(self) -> None:
        """Closes the connection."""
        self.connection.close()
