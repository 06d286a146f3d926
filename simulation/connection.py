"""One client's connection to a router: the answer runs in the router's process, and either end may be lost.

Used by `client`. An answer is an ASGI application, as the product's are; what it sends is heard in the same instant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import Message

from baton.domain.errors import BatonError
from simulation.router import SimRouter

SSE_SCOPE = {"type": "http", "method": "POST", "headers": [(b"accept", b"text/event-stream")]}


class Lost(Exception):
    """The connection is gone."""


class Connection:
    """Asks `router` for a response and takes what it sends; `hear` gets the parts of its body."""

    def __init__(
        self, router: SimRouter, request: Coroutine[Any, Any, Response], hear: Callable[[bytes], None], name: str
    ) -> None:
        self._process = router.process
        self._request = request
        self._hear = hear
        self._hung_up = asyncio.Event()
        self._end: asyncio.Future[BatonError | None] = asyncio.get_running_loop().create_future()
        self._task = router.process.spawn(self._serve(), name)
        self._task.add_done_callback(self._closed)
        router.host.took(self._task)

    async def ended(self) -> None:
        """Returns at the end of the answer. Raises what stood in its place, or `Lost`."""
        error = await self._end
        if error is not None:
            raise error

    def hang_up(self) -> None:
        """The client goes away; the router hears of it."""
        self._hung_up.set()
        if not self._end.done():
            self._end.set_exception(Lost())

    async def _serve(self) -> None:
        try:
            response = await self._request
            await response(dict(SSE_SCOPE), self._receive, self._send)
            self._say(None)
        except BatonError as error:
            self._say(error)

    async def _receive(self) -> Message:
        await self._hung_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._process.alive and not self._end.done() and message["type"] == "http.response.body":
            self._hear(message["body"])

    def _say(self, error: BatonError | None) -> None:
        if not self._end.done():
            self._end.set_result(error)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._request.close()
        if not self._end.done():
            self._end.set_exception(Lost())
