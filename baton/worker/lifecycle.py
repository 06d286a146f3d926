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
from baton.rpc.shutdown import shutdown_event
from baton.settings.groups import WorkerSettings
from baton.settings.process import freeze_gc
from baton.settings.trust import open_cluster_warning, read_trust
from baton.settings.ucx import prepare_environment
from baton.store.connect import connect
from baton.store.options import StoreOptions
from baton.store.store import StateStore
from baton.telemetry.logs import get_logger
from baton.worker.registration import Registration

log = get_logger()

EngineT = TypeVar("EngineT")


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker is built on. `stack` takes what has to be closed, in reverse order of its making."""

    trust: ClusterTrust
    store: StateStore
    lifecycle: WorkerLifecycle
    stack: AsyncExitStack


class WorkerApp(Protocol):
    """All rooms of one process."""

    async def run(self) -> None:
        """Serves until stopped; returns when nothing is left to do but to close."""
        ...


class WorkerLifecycle:
    """Why and when this process ends. `on_idle` and `on_crash` may be called from any thread."""

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

    def on_crash(self, error: BaseException) -> None:
        """A thread or task that must not end has ended."""
        self._from_any_thread(self._request_exit, 1)

    def on_replaced(self) -> None:
        """Another process runs under this worker's name."""
        self._request_exit(1)

    def on_idle(self) -> None:
        """This worker holds no request, for the moment."""
        self._from_any_thread(self._idle.set)

    async def run(
        self,
        registration: Registration,
        *work: Coroutine[Any, Any, None],
        num_requests: Callable[[], int],
        drain_timeout_s: float,
        close: Callable[[], Awaitable[object]],
    ) -> None:
        """Announces and does `work` until a signal, a crash or a replacement; then drains, closes and withdraws."""
        async with self._background(registration.run(), *work):
            await self._stop.wait()
            await self.drain(registration.announce, num_requests, drain_timeout_s)
            await close()
        await registration.withdraw()

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
                await self._wait_until_idle(num_requests, timeout_s)
        finally:
            self.drained.set()

    async def _wait_until_idle(self, num_requests: Callable[[], int], timeout_s: float) -> None:
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
                tasks = [group.create_task(self._run_task(one)) for one in work]
                try:
                    yield
                finally:
                    for task in tasks:
                        task.cancel()
        finally:
            for one in work:
                one.close()  # one that was cancelled before its first step

    async def _run_task(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:  # a task's root
            log.error("task_crashed", exc_info=True)
            self._request_exit(1)

    def _request_exit(self, exit_code: int) -> None:
        self.exit_code = max(self.exit_code, exit_code)
        self._stop.set()
        self._idle.set()  # a drain in progress has nothing to wait for any more

    def _from_any_thread(self, call: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: the process has ended already
            self._loop.call_soon_threadsafe(call, *arguments)


async def run_worker(
    settings: WorkerSettings,
    build_engine: Callable[[], EngineT],
    build_worker: Callable[[EngineT, WorkerContext], WorkerApp],
) -> int:
    """One worker process: reads its files, assembles its engine (this may take long), opens the store, runs.

    Returns the process's exit code. Raises `BatonError` or `OSError` when it cannot start.
    """
    prepare_environment({})
    trust = read_trust(settings)
    if (why := open_cluster_warning(settings)) is not None:
        log.warning("cluster_unauthenticated", why=why)
    with shutdown_event() as stop:
        engine = build_engine()
        freeze_gc()
        async with AsyncExitStack() as stack:
            options = StoreOptions(worker_ttl_s=settings.worker_ttl_s, heartbeat_s=settings.heartbeat_interval_s)
            store = await connect(settings.redis_url, options)
            stack.push_async_callback(store.close)
            lifecycle = WorkerLifecycle(stop)
            await build_worker(engine, WorkerContext(trust, store, lifecycle, stack)).run()
            return lifecycle.exit_code
