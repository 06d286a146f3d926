"""One client's connection to a router: the answer runs in the router's process, and either end may be lost.

Used by `client`. An answer is an ASGI application, like the product's; its data arrive in the same instant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import Message

from baton.domain.errors import BatonError
from simulation.nodes.router import SimRouter

SSE_SCOPE = {"type": "http", "method": "POST", "headers": [(b"accept", b"text/event-stream")]}


class ConnectionLost(Exception):
    """The connection is lost."""


class ClientConnection:
    """Requests a response of `router` and receives it; `on_body` gets the parts of its body."""

    def __init__(
        self, router: SimRouter, request: Coroutine[Any, Any, Response], on_body: Callable[[bytes], None], name: str
    ) -> None:
        self._process = router.process
        self._request = request
        self._on_body = on_body
        self._hung_up = asyncio.Event()
        self._end: asyncio.Future[BatonError | None] = asyncio.get_running_loop().create_future()
        self._task = router.process.spawn(self._serve(), name)
        self._task.add_done_callback(self._closed)
        router.host.add_call(self._task)

    async def ended(self) -> None:
        """Returns at the end of the answer. Raises the error response, or `ConnectionLost`."""
        error = await self._end
        if error is not None:
            raise error

    def hang_up(self) -> None:
        """The client disconnects; the router is notified."""
        self._hung_up.set()
        if not self._end.done():
            self._end.set_exception(ConnectionLost())

    async def _serve(self) -> None:
        try:
            response = await self._request
            await response(dict(SSE_SCOPE), self._receive, self._send)
            self._set_end(None)
        except BatonError as error:
            self._set_end(error)

    async def _receive(self) -> Message:
        await self._hung_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._process.alive and not self._end.done() and message["type"] == "http.response.body":
            self._on_body(message["body"])

    def _set_end(self, error: BatonError | None) -> None:
        if not self._end.done():
            self._end.set_result(error)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._request.close()
        if not self._end.done():
            self._end.set_exception(ConnectionLost())
