"""Cancels the work on a request when its client disconnects or does not read.

Clients that time out try again, so a missed disconnect doubles the load. `respond` and `resume` run under
`cancel_on_disconnect`, streaming or not. A client that does not read is hung up. Its call is abandoned, not ended: the
client can resume it.

The work runs in the task of its request, which is cancelled as `asyncio.timeout` cancels: no task a request. The
connection calls when it is lost. A server without `BoundedHttpProtocol` has to be asked, by a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

from starlette.types import Receive, Scope

from baton.domain.errors import BatonError, Cancelled, DeadlineExceeded

CLOSE_TIMEOUT_S = 5.0

CONNECTION = "baton.connection"
"""Key of the `RequestConnection` among the extensions of an ASGI scope."""

T = TypeVar("T")


class ClientTooSlow(Cancelled):
    """The client did not read its answer."""

    code = "client_too_slow"


class RequestConnection(Protocol):
    """The connection of a request. `too_slow`: it was hung up because its client did not read.

    `lost`: it has ended. `on_lost`: called when it ends; of the response that runs.
    """

    too_slow: bool
    lost: bool
    on_lost: Callable[[], None] | None

    def has_body(self, scope: Scope) -> bool:
        """True if the whole body of the request is here, so that `receive` gives it without a wait."""
        ...

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
    watcher = _DisconnectWatcher(scope)
    watcher.watch(receive, timeout_s, too_slow)
    try:
        return await work
    except asyncio.CancelledError:
        if watcher.reason is not None and not watcher.is_cancelled_elsewhere():
            raise watcher.reason from None
        raise
    finally:
        await watcher.close(too_slow)


class _DisconnectWatcher:
    """Cancels the current task when its client is gone or too slow, or its time is over."""

    def __init__(self, scope: Scope) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.reason: BatonError | None = None  # why it was cancelled here
        self._is_open = True
        self._task = task
        self._num_cancels = task.cancelling()
        self._scope = scope
        self._connection = connection_of(scope)
        self._asking: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, receive: Receive, timeout_s: float, too_slow: asyncio.Future[None]) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(timeout_s, self._on_timeout)
        too_slow.add_done_callback(self._on_too_slow)
        if self._connection is None:
            self._asking = asyncio.create_task(_wait_for_disconnect(receive))
            self._asking.add_done_callback(lambda _: self._on_lost())
        else:
            self._connection.on_lost = self._on_lost
            if self._connection.lost:
                loop.call_soon(self._on_lost)  # not before the work has begun: it releases what it holds

    def is_cancelled_elsewhere(self) -> bool:
        """True if the task was cancelled by others, too, such as a server that stops."""
        return self._task.cancelling() - 1 > self._num_cancels

    async def close(self, too_slow: asyncio.Future[None]) -> None:
        """Cancels no more, and leaves the task as it was."""
        self._is_open = False
        if self._timer is not None:
            self._timer.cancel()
        too_slow.remove_done_callback(self._on_too_slow)
        if self._connection is not None:
            self._connection.on_lost = None
        if self.reason is not None:
            self._task.uncancel()
        if self._asking is not None:
            self._asking.cancel()
            await join_tasks((self._asking,))

    def _cancel(self, reason: BatonError) -> None:
        if self._is_open and self.reason is None:
            self.reason = reason
            self._task.cancel()

    def _on_lost(self) -> None:
        if self._asking is not None and self._asking.cancelled():
            return
        if self._connection is not None and self._connection.too_slow:
            self._cancel(ClientTooSlow("the client accepted no byte of its answer"))
        else:
            self._cancel(Cancelled("the client disconnected"))

    def _on_too_slow(self, too_slow: asyncio.Future[None]) -> None:
        if self._is_open and self.reason is None and not too_slow.cancelled():
            self._cancel(ClientTooSlow("the client left too much of its answer unread"))
            hang_up(self._scope)

    def _on_timeout(self) -> None:
        self._cancel(DeadlineExceeded("the answer was not complete at the deadline"))


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
    """Waits until all tasks have ended. Cancels those that take longer than `CLOSE_TIMEOUT_S`.

    Where all have, as at the end of most answers, it does not wait for a pass of the loop.
    """
    joined = set(tasks)
    running = [task for task in joined if not task.done()]
    if running:
        _, late = await asyncio.wait(running, timeout=CLOSE_TIMEOUT_S)
        for task in late:
            task.cancel()
    for task in joined:
        if task.done() and not task.cancelled():
            task.exception()  # retrieved, or asyncio logs it


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
