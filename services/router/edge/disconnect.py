"""Watches the client's connection while its answer is being made: who hangs up gets no more work done.

`respond` runs everything that takes time under `cancel_on_disconnect`, streaming or not: a client that times out tries
again, so a missed hang-up doubles the load.
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
    """What `work` returns; it is cancelled when the client goes away first. The body must have been read.

    Raises `Cancelled` for that, `DeadlineExceeded` after `timeout_s`, else what `work` raises.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((worker, watcher), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        if watcher.done():
            raise Cancelled("the client went away")
        raise DeadlineExceeded("the answer was not complete at the deadline")
    finally:
        worker.cancel()
        watcher.cancel()
        await join_tasks((worker, watcher))


async def join_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Waits until tasks have ended, however they do; those that take over `CLOSE_TIMEOUT_S` are cancelled."""
    running = set(tasks)
    if running:
        _, late = await asyncio.wait(running, timeout=CLOSE_TIMEOUT_S)
        for task in late:
            task.cancel()
    for task in running:
        if task.done() and not task.cancelled():
            task.exception()  # read, or asyncio reports it as never seen


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
