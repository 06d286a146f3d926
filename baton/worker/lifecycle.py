"""Start, signals, crashes and drain of a worker process. Called by each worker's `app`.

Runs in the asyncio loop. Every end has this order: announce DRAINING, accept no new work, let running requests finish
(bounded), close the server, withdraw. Independent of the role: a callback returns the number of requests left.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, closing, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from baton import __version__
from baton.domain.ids import Incarnation, WorkerId
from baton.domain.trust import ClusterTrust
from baton.domain.worker import WorkerRecord, WorkerRole, WorkerStatus
from baton.engine.thread import EngineLoop, EngineThread
from baton.rpc.server import RunningServer, ServerAuth, start_server
from baton.rpc.shutdown import shutdown_event
from baton.settings.groups import WorkerProcessSettings
from baton.settings.model_source import model_name
from baton.settings.process import freeze_gc
from baton.settings.trust import open_cluster_warning, read_trust
from baton.settings.ucx import prepare_environment
from baton.store.connect import connect
from baton.store.options import StoreOptions
from baton.store.store import StateStore
from baton.telemetry.known_series import start_series
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics_server import start_metrics_server
from baton.worker.identity.address import advertised_address
from baton.worker.identity.incarnation_file import (
    IncarnationFile,
    open_incarnation_file,
    withdraw_predecessor,
)
from baton.worker.identity.worker_id import default_worker_id, require_free_id
from baton.worker.registration import PATIENCE_TTLS, Registration, RegistrationLoss
from baton.worker.rejected_calls import RejectedCallLog

log = get_logger()

EngineT = TypeVar("EngineT")
T = TypeVar("T")
EXIT_ID_TAKEN = 3
ENGINE_STOP_S = 10.0
"""Longest wait for the step in progress when the process ends."""
CANCEL_AGAIN_S = 1.0
"""Wait for cancelled tasks before they are cancelled once more."""

WATCHED_HEARTBEATS = 3
"""Heartbeats in which the live holder of a worker id announces itself."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Shared parts of a worker. `stack` closes resources in reverse order of their creation."""

    worker_id: WorkerId
    trust: ClusterTrust
    store: StateStore
    lifecycle: WorkerLifecycle
    stack: AsyncExitStack
    incarnation_file: IncarnationFile | None = None


class WorkerLifecycle:
    """Decides when and with which exit code the process ends. `on_idle` and `on_crash` are thread-safe."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = stop
        self._idle = asyncio.Event()
        self.drained = asyncio.Event()
        self.status = WorkerStatus.READY
        self.exit_code = 0
        self._unfit = False

    @property
    def draining(self) -> bool:
        return self.status is WorkerStatus.DRAINING

    def stop(self) -> None:
        """Requests a drain and an exit, as SIGTERM does; idempotent."""
        self._stop.set()

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`; None if the process is asked to stop first. Propagates its exception."""
        running, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            running.cancel()
            stopping.cancel()
            await asyncio.gather(running, stopping, return_exceptions=True)
        return None if running.cancelled() else running.result()

    def on_crash(self, error: BaseException) -> None:
        """Ends the process with exit code 1: a thread or task failed."""
        self._from_any_thread(self._request_exit, 1)

    def on_unfit(self) -> None:
        """Drains, then ends the process with exit code 1: its memory is faulty. New work goes elsewhere at once."""
        self._from_any_thread(self._drain_unfit)

    def on_registration_lost(self, loss: RegistrationLoss) -> None:
        """Ends the process: another one has its worker id. The exit code tells a configuration error from a fault."""
        self._request_exit(EXIT_ID_TAKEN if loss is RegistrationLoss.TAKEN else 1)

    def on_idle(self) -> None:
        """Wakes a waiting drain: the worker holds no request now."""
        self._from_any_thread(self._idle.set)

    async def run(
        self,
        registration: Registration,
        *work: Coroutine[Any, Any, None],
        num_requests: Callable[[], int],
        drain_timeout_s: float,
        close: Callable[[], Awaitable[object]],
    ) -> None:
        """Announces and runs `work` until a signal, a crash or a replacement; then drains, closes and withdraws."""
        async with self._background(registration.run(), *work):
            await self._stop.wait()
            await self.drain(registration.announce, num_requests, drain_timeout_s)
            await close()
        await registration.withdraw()

    async def drain(
        self, announce: Callable[[], Awaitable[object]], num_requests: Callable[[], int], timeout_s: float
    ) -> None:
        """Announces DRAINING, then waits until no request is left; logs a warning after `timeout_s`.

        `announce` must be bounded in time. Returns at once if the process ends because of a fault.
        """
        self.status = WorkerStatus.DRAINING
        try:
            if not self.exit_code:
                log.info("draining", requests=num_requests(), timeout_s=timeout_s)
                await announce()
                await self._wait_until_idle(num_requests, timeout_s)
        finally:
            self.exit_code = max(self.exit_code, int(self._unfit))
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
                    await _cancel_all(tasks)
        finally:
            for one in work:
                one.close()  # needed for a task that was cancelled before its first step

    async def _run_task(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:  # a task's root
            log.error("task_crashed", exc_info=True)
            self._request_exit(1)

    def _drain_unfit(self) -> None:
        self._unfit = True
        self._stop.set()

    def _request_exit(self, exit_code: int) -> None:
        self.exit_code = max(self.exit_code, exit_code)
        self._stop.set()
        self._idle.set()  # ends a drain in progress

    def _from_any_thread(self, call: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: the process is ending
            self._loop.call_soon_threadsafe(call, *arguments)


async def _cancel_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancels tasks until all have ended: a library may swallow a cancellation that meets its own timeout."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
        if pending:
            log.warning("tasks_cancelled_again", tasks=[repr(task.get_coro()) for task in pending])


async def run_worker(
    settings: WorkerProcessSettings,
    role: WorkerRole,
    build_engine: Callable[[], EngineT],
    serve: Callable[[EngineT, WorkerContext], Awaitable[None]],
) -> int:
    """Runs one worker process: reads credentials, looks for its id, builds the engine (slow), serves.

    Returns the exit code. Raises `BatonError` or `OSError` if it cannot start. A store that does not answer yet is
    waited for: the worker serves, and is announced once the store answers.
    """
    prepare_environment({})
    trust = read_trust(settings)
    if (why := open_cluster_warning(settings)) is not None:
        log.warning("cluster_unauthenticated", why=why)
    usual_port = type(settings).model_fields["port"].default
    worker_id = WorkerId(settings.worker_id or default_worker_id(role, settings.port, usual_port))
    options = StoreOptions(worker_ttl_s=settings.worker_ttl_s, heartbeat_s=settings.heartbeat_interval_s)
    file = open_incarnation_file(settings.redis_url, worker_id)
    with shutdown_event() as stop, nullcontext() if file is None else closing(file):
        async with AsyncExitStack() as before:
            registry = await connect(settings.redis_url, options, check=False)
            before.push_async_callback(registry.close)
            ended = None if file is None else file.ended()
            await require_free_id(registry, worker_id, WATCHED_HEARTBEATS * settings.heartbeat_interval_s, ended)
        engine = build_engine()
        freeze_gc()
        async with AsyncExitStack() as stack:
            store = await connect(settings.redis_url, options, check=False)
            stack.push_async_callback(store.close)
            lifecycle = WorkerLifecycle(stop)
            await serve(engine, WorkerContext(worker_id, trust, store, lifecycle, stack, file))
            return lifecycle.exit_code


def make_registration(
    context: WorkerContext, settings: WorkerProcessSettings, record: Callable[[], WorkerRecord]
) -> Registration:
    """What keeps the worker's `record` in the registry, and ends the process once another one has its id."""
    return Registration(
        context.store,
        record,
        settings.heartbeat_interval_s,
        context.lifecycle.on_registration_lost,
        context.trust,
        PATIENCE_TTLS * settings.worker_ttl_s,
    )


async def start_serving(
    context: WorkerContext,
    settings: WorkerProcessSettings,
    role: WorkerRole,
    incarnation: Incarnation,
    loop: EngineLoop,
    register: Callable[[grpc.aio.Server], None],
) -> tuple[RunningServer, str] | None:
    """Starts metrics, the engine's thread and the gRPC server, in this order; `register` adds the servicers.

    The id is this process's to announce then: the record of an ended predecessor is withdrawn.

    Returns the server and the address to announce; None, with the server closed, for a worker that is stopped before
    it has an address. Raises `OSError` if a port cannot be bound.
    """
    context.stack.callback(start_metrics_server(settings.host, settings.metrics_port).close)
    start_series(__version__, role.value, model_name(settings.model), vllm_names=settings.vllm_names)
    thread = EngineThread(loop, "baton-engine", context.lifecycle.on_crash)
    thread.start()
    context.stack.callback(thread.stop, ENGINE_STOP_S)
    auth = ServerAuth(incarnation, context.trust, RejectedCallLog().record)
    server = await start_server(settings.host, settings.port, register, auth)
    address = await context.lifecycle.unless_stopped(advertised_address(settings, server.port))
    if address is None:
        await server.stop(0.0)
        return None
    if context.incarnation_file is not None:
        await withdraw_predecessor(context.store, context.worker_id, context.incarnation_file)
        context.incarnation_file.note(incarnation)
    return server, address
