"""How a worker process lives and ends: signals, crashes, drain. Shared by both workers' `app`. Asyncio loop only.

The order of an end is always: say so in the registry, take nothing new, let what runs finish (bounded), stop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from baton.domain.worker import WorkerStatus
from baton.settings.groups import WorkerSettings
from baton.state.base import StateBook
from baton.state.connect import connect
from baton.state.options import BookOptions
from baton.telemetry.logs import get_logger

log = get_logger()


class Lifetime:
    """Why and when this process ends. `drained` may be called from the engine thread, `crashed` from any."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = stop
        self._idle = asyncio.Event()
        self.status = WorkerStatus.READY
        self.exit_code = 0

    @property
    def draining(self) -> bool:
        return self.status is WorkerStatus.DRAINING

    def crashed(self, error: BaseException) -> None:
        """A thread or task that must not end has ended."""
        self._from_any_thread(self._end, 1)

    def replaced(self) -> None:
        """Another process runs under this worker's name."""
        self._end(1)

    def idle(self) -> None:
        """The engine holds no request."""
        self._from_any_thread(self._idle.set)

    async def until_stopped(self) -> None:
        """Returns when a signal, a crash or a replacement ends this process."""
        await self._stop.wait()

    async def drain(self, num_requests: Callable[[], int], timeout_s: float) -> None:
        """Waits until the engine holds no request; says how many were given up if that takes too long."""
        self.status = WorkerStatus.DRAINING
        if self.exit_code:
            return
        log.info("draining", requests=num_requests(), timeout_s=timeout_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    self._idle.clear()
                    if num_requests() == 0:
                        return
                    await self._idle.wait()
        log.warning("drain_timed_out", requests=num_requests())

    @contextlib.asynccontextmanager
    async def background(self, *work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """Runs tasks beside the block and cancels them at its end; an exception in one ends the process."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._guarded(one)) for one in work]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:  # a task's root
            log.error("task_crashed", exc_info=True)
            self._end(1)

    def _end(self, exit_code: int) -> None:
        self.exit_code = max(self.exit_code, exit_code)
        self._stop.set()

    def _from_any_thread(self, call: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: the process has ended already
            self._loop.call_soon_threadsafe(call, *arguments)


async def open_book(settings: WorkerSettings) -> StateBook:
    """The reception book that this worker's settings name. Raises `StateUnavailable`."""
    options = BookOptions(worker_ttl_s=settings.worker_ttl_s, heartbeat_s=settings.heartbeat_interval_s)
    return await connect(settings.redis_url, options)
