"""Takes the bytes of a streamed body, after its head went through all middleware. Nothing here waits for a client.

`TransportSink` writes to the connection: middleware only passes a body on, so its bytes need not pass middleware.
`BoundedHttpProtocol` puts one into the scope of each request. Where there is none, `AsgiSink` sends messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from starlette.types import Scope, Send

BODY_SINK = "baton.sink"
"""Key of the `BodySink` among the extensions of an ASGI scope."""

MAX_PENDING_BYTES = 64 * 1024
"""Bytes that an `AsgiSink` takes before it is blocked: as many as a transport holds."""


class BodySink(Protocol):
    """The body of one response, between its head and its last part, which both are sent by ASGI messages."""

    @property
    def blocked(self) -> bool:
        """The client reads too slowly: write no more before the callback of `on_writable`."""
        ...

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        """Sets what is called when it is no longer blocked, or has failed; None: nothing."""
        ...

    def hold(self) -> None:
        """The head comes next, and at once what follows it: may send both together."""
        ...

    def write(self, data: bytes) -> None:
        """Takes bytes; drops them once the client is gone. Raises the error of an earlier write."""
        ...

    async def drain(self) -> None:
        """Waits while it is blocked; raises as `write`. Call it before the last part."""
        ...

    def close(self) -> None:
        """Drops what is not sent: the response is given up. Idempotent."""
        ...


class AsgiSink:
    """A `BodySink` of ASGI messages. A task sends what was written since the last message."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pending: list[bytes] = []
        self._num_pending_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._callback: Callable[[], None] | None = None

    @property
    def blocked(self) -> bool:
        """See `BodySink`."""
        return self._num_pending_bytes >= MAX_PENDING_BYTES

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        """See `BodySink`."""
        self._callback = callback

    def hold(self) -> None:
        """See `BodySink`. Messages are not joined."""

    def write(self, data: bytes) -> None:
        """See `BodySink`."""
        if self._task is not None and self._task.done():
            self._raise_failure()
        self._pending.append(data)
        self._num_pending_bytes += len(data)
        if self._task is None:
            self._task = asyncio.create_task(self._send_pending())

    async def drain(self) -> None:
        """Waits until everything is sent, since the next message must not overtake it."""
        if self._task is not None:
            await asyncio.wait((self._task,))
            self._raise_failure()

    def close(self) -> None:
        """See `BodySink`."""
        self._callback, self._pending = None, []
        if self._task is not None:
            self._task.cancel()

    def _raise_failure(self) -> None:
        """Forgets the ended task. Raises its error."""
        task, self._task = self._task, None
        if task is not None and not task.cancelled():
            task.result()

    async def _send_pending(self) -> None:
        try:
            while self._pending:
                was_blocked, body, self._pending = self.blocked, b"".join(self._pending), []
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
                self._num_pending_bytes -= len(body)
                if was_blocked and not self.blocked and self._callback is not None:
                    self._callback()
        except Exception:
            self._num_pending_bytes = 0
            if self._callback is not None:
                self._callback()
            raise


def body_sink(scope: Scope, send: Send) -> BodySink:
    """The sink of a response to this request."""
    found: BodySink | None = scope.get("extensions", {}).get(BODY_SINK)
    return AsgiSink(send) if found is None else found
