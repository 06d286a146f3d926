"""One attempt's stream in a session, as its attempt reads it. Owned by one event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from baton.domain.errors import WorkerLost
from baton.rpc.gen import decode_pb2
from baton.rpc.gen import session_pb2 as pb

SessionEvent = decode_pb2.GenerateEvent | pb.TokenRow


class SessionStream:
    """Keeps what came until it is read: the session itself never waits. A request bounds its own tokens.

    `on_cancel` tells the worker that the rest is not wanted.
    """

    def __init__(self, on_cancel: Callable[[], None]) -> None:
        self._on_cancel = on_cancel
        self._unread: deque[SessionEvent] = deque()
        self._lost: WorkerLost | None = None
        self._ended = False
        self._cancelled = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: SessionEvent) -> None:
        """Adds an event."""
        if not self._cancelled:
            self._unread.append(event)
            self._wake()

    def end(self, lost: WorkerLost | None = None) -> None:
        """Nothing more comes; after what is unread, `read` raises `lost`."""
        self._ended, self._lost = True, lost
        self._wake()

    def cancel(self) -> None:
        """Ends the stream here and at the worker. Idempotent. A read raises `CancelledError` from now on."""
        if not self._cancelled:
            self._cancelled = True
            self._unread.clear()
            if not self._ended:
                self._on_cancel()
            self._wake()

    async def read(self) -> SessionEvent | None:
        """The next event; None at the end. Raises `WorkerLost` when the session was lost."""
        while not self._unread:
            if self._cancelled:
                raise asyncio.CancelledError
            if self._lost is not None:
                raise self._lost
            if self._ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._unread.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
