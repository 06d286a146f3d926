"""Cancels the work on a request when its client disconnects or does not read.

Clients that time out try again, so a missed disconnect doubles the load. `respond` and `resume` run under
`cancel_on_disconnect`, streaming or not. A client that does not read is hung up. Its call is abandoned, not ended: the
client can resume it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol, TypeVar

from starlette.types import Receive, Scope

from baton.domain.errors import Cancelled, DeadlineExceeded

CLOSE_TIMEOUT_S = 5.0

CONNECTION = "baton.connection"
"""Key of the `RequestConnection` among the extensions of an ASGI scope."""

T = TypeVar("T")


class ClientTooSlow(Cancelled):
    """The client did not read its answer."""

    code = "client_too_slow"


class RequestConnection(Protocol):
    """The connection of a request. `too_slow`: it was hung up because its client did not read."""

    too_slow: bool

    def hang_up(self) -> None:
        """Closes the connection at once; drops what is not sent. Idempotent."""
        ...


async def cancel_on_disconnect(
    scope: Scope, receive: Receive, work: Coroutine[Any, Any, T], timeout_s: float, too_slow: asyncio.Future[None]
) -> T:
    """Returns the result of `work`, or cancels it when the client disconnects. The body must have been read.

    Hangs up when `too_slow` is done. Raises `ClientTooSlow` for a client that was hung up, `Cancelled` on a disconnect,
    `DeadlineExceeded` after `timeout_s`, and the errors of `work`.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        waiting: set[asyncio.Future[Any]] = {worker, watcher, too_slow}
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if too_slow.done():
            hang_up(scope)
            raise ClientTooSlow("the client left too much of its answer unread")
        if worker.done():
            return worker.result()
        if watcher.done():
            connection = connection_of(scope)
            if connection is not None and connection.too_slow:
                raise ClientTooSlow("the client accepted no byte of its answer")
            raise Cancelled("the client disconnected")
        raise DeadlineExceeded("the answer was not complete at the deadline")
    finally:
        worker.cancel()
        watcher.cancel()
        await join_tasks((worker, watcher))


def connection_of(scope: Scope) -> RequestConnection | None:
    """The connection of a request; None on a server without `BoundedHttpProtocol`."""
    found: RequestConnection | None = scope.get("extensions", {}).get(CONNECTION)
    return found


def hang_up(scope: Scope) -> None:
    """Closes the connection of a request at once."""
    connection = connection_of(scope)
    if connection is not None:
        connection.hang_up()


async def join_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Waits until all tasks have ended. Cancels those that take longer than `CLOSE_TIMEOUT_S`."""
    running = set(tasks)
    if running:
        _, late = await asyncio.wait(running, timeout=CLOSE_TIMEOUT_S)
        for task in late:
            task.cancel()
    for task in running:
        if task.done() and not task.cancelled():
            task.exception()  # retrieved, or asyncio logs it


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
