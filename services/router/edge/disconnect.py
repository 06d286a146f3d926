"""Cancels the work on a request when its client disconnects.

Clients that time out try again, so a missed disconnect doubles the load. `respond` and `resume` run under
`cancel_on_disconnect`, streaming or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from starlette.types import Receive

from baton.domain.errors import Cancelled, DeadlineExceeded

CLOSE_TIMEOUT_S = 5.0

T = TypeVar("T")


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Returns the result of `work`, or cancels it when the client disconnects. The body must have been read.

    Raises `Cancelled` on a disconnect, `DeadlineExceeded` after `timeout_s`, and the errors of `work`.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((worker, watcher), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        if watcher.done():
            raise Cancelled("the client disconnected")
        raise DeadlineExceeded("the answer was not complete at the deadline")
    finally:
        worker.cancel()
        watcher.cancel()
        await join_tasks((worker, watcher))


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
