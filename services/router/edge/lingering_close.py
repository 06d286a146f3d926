"""Closes a connection without destroying the response that its client has not read yet.

A socket that is closed while bytes of the request are unread sends a reset, and a reset makes the client's kernel drop
the response. `http_protocol` gives each response a `LingeringTransport`: its `close` ends the sending direction only,
until the client closes too. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LINGER_S = 2.0
"""Longest wait for the client to close."""

MAX_LINGER_BYTES = 32 << 20
"""Most bytes that are read and dropped meanwhile."""


class LingeringTransport:
    """The transport as a response uses it. Owned by one connection."""

    def __init__(self, transport: asyncio.Transport, is_read: Callable[[], bool]) -> None:
        """`is_read`: True when all bytes of the requests were read, so that a close sends no reset."""
        self.lingering = False
        self.write: Callable[[bytes], object] = transport.write  # called for every token
        self._held: list[bytes] | None = None
        self._transport = transport
        self._is_read = is_read
        self._num_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def hold(self) -> None:
        """Holds writes until the loop's next pass, and sends them together: a response's head and what follows it."""
        if self._held is None:
            self._held = []
            self.write = self._held.append
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Sends what is held. Idempotent."""
        held, self._held = self._held, None
        if held is not None:
            self.write = self._transport.write
            if held:
                self._transport.write(b"".join(held))

    def close(self) -> None:
        """Closes at once, or ends the response and waits up to `LINGER_S` for the client. Idempotent."""
        self.flush()
        if self.lingering or self._transport.is_closing():
            return
        if self._is_read() or not self._transport.can_write_eof():
            self._transport.close()
            return
        self.lingering = True
        self._transport.write_eof()
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)

    def is_closing(self) -> bool:
        """True once nothing can be written any more."""
        return self.lingering or self._transport.is_closing()

    def drop(self, num_bytes: int) -> None:
        """Counts bytes that were read and dropped while it lingers."""
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_LINGER_BYTES:
            self._transport.close()

    def on_lost(self) -> None:
        """Stops the timer: the connection has ended."""
        if self._timer is not None:
            self._timer.cancel()
