"""How a worker process lives and ends: start, signals, crashes, drain. Called by both workers' `app`.

Lives in the asyncio loop. The order of an end is always: say so in the registry, take nothing new, let what runs
finish (bounded), close the doors, withdraw. Knows no role: what a worker holds is a number that the worker gives.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from baton.domain.trust import ClusterTrust
from baton.domain.worker import WorkerStatus
from baton.engine.presence import Presence
from baton.rpc.shutdown import shutdown_event
from baton.settings.groups import WorkerSettings
from baton.settings.process import keep_for_good
from baton.settings.trust import read_trust, why_open
from baton.settings.ucx import prepare_environment
from baton.state.base import StateBook
from baton.state.connect import connect
from baton.state.options import BookOptions
from baton.telemetry.logs import get_logger

log = get_logger()

Engine = TypeVar("Engine")


@dataclass(frozen=True, slots=True)
class Premises:
    """What a worker is built on. `stack` takes what has to be closed, in reverse order of its making."""

    trust: ClusterTrust
    book: StateBook
    lifetime: Lifetime
    stack: AsyncExitStack


class Worker(Protocol):
    """All rooms of one process."""

    async def run(self) -> None:
        """Serves until stopped; returns when nothing is left to do but to close."""
        ...


class Lifetime:
    """Why and when this process ends. `idle` and `crashed` may be called from any thread."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = stop
        self._idle = asyncio.Event()
        self.drained = asyncio.Event()
        self.status = WorkerStatus.READY
        self.exit_code = 0

    @property
    def draining(self) -> bool:
        return self.status is WorkerStatus.DRAINING

    def stop(self) -> None:
        """Asks for a drain and an exit, as SIGTERM does; idempotent."""
        self._stop.set()

    def crashed(self, error: BaseException) -> None:
        """A thread or task that must not end has ended."""
        self._from_any_thread(self._end, 1)

    def replaced(self) -> None:
        """Another process runs under this worker's name."""
        self._end(1)

    def idle(self) -> None:
        """This worker holds no request, for the moment."""
        self._from_any_thread(self._idle.set)

    async def live(
        self,
        presence: Presence,
        *work: Coroutine[Any, Any, None],
        num_requests: Callable[[], int],
        drain_timeout_s: float,
        close: Callable[[], Awaitable[object]],
    ) -> None:
        """Announces and does `work` until a signal, a crash or a replacement; then drains, closes and withdraws."""
        async with self._background(presence.run(), *work):
            await self._stop.wait()
            await self.drain(presence.announce, num_requests, drain_timeout_s)
            await close()
        await presence.leave()

    async def drain(
        self, announce: Callable[[], Awaitable[object]], num_requests: Callable[[], int], timeout_s: float
    ) -> None:
        """Says that it drains, then waits until nothing is held; warns of what is given up if that takes too long.

        `announce` must be bounded in time. Returns at once when the process has to end for a fault.
        """
        self.status = WorkerStatus.DRAINING
        try:
            if not self.exit_code:
                log.info("draining", requests=num_requests(), timeout_s=timeout_s)
                await announce()
                await self._until_idle(num_requests, timeout_s)
        finally:
            self.drained.set()

    async def _until_idle(self, num_requests: Callable[[], int], timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    self._idle.clear()
                    if num_requests() == 0 or self.exit_code:
                        return
                    await self._idle.wait()
        log.warning("drain_timed_out", requests=num_requests())

    @contextlib.asynccontextmanager
    async def _background(self, *work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """Runs tasks beside the block and cancels them at its end; an exception in one ends the process."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._guarded(one)) for one in work]
                try:
                    yield
                finally:
                    for task in tasks:
                        task.cancel()
        finally:
            for one in work:
                one.close()  # one that was cancelled before its first step

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:  # a task's root
            log.error("task_crashed", exc_info=True)
            self._end(1)

    def _end(self, exit_code: int) -> None:
        self.exit_code = max(self.exit_code, exit_code)
        self._stop.set()
        self._idle.set()  # a drain in progress has nothing to wait for any more

    def _from_any_thread(self, call: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: the process has ended already
            self._loop.call_soon_threadsafe(call, *arguments)


async def serve_worker(
    settings: WorkerSettings, assemble: Callable[[], Engine], make: Callable[[Engine, Premises], Worker]
) -> int:
    """One worker process: reads its files, assembles its engine (this may take long), opens the book, runs.

    Returns the process's exit code. Raises `BatonError` or `OSError` when it cannot start.
    """
    prepare_environment({})
    trust = read_trust(settings)
    if (why := why_open(settings)) is not None:
        log.warning("cluster_open", why=why)
    with shutdown_event() as stop:
        engine = assemble()
        keep_for_good()
        async with AsyncExitStack() as stack:
            options = BookOptions(worker_ttl_s=settings.worker_ttl_s, heartbeat_s=settings.heartbeat_interval_s)
            book = await connect(settings.redis_url, options)
            stack.push_async_callback(book.close)
            lifetime = Lifetime(stop)
            await make(engine, Premises(trust, book, lifetime, stack)).run()
            return lifetime.exit_code
