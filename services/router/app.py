"""Builds the router and runs it until it is told to stop. Called by `services.cli.serve`; owns nothing else's logic.

SIGTERM -> new requests are answered 503 -> running ones finish, or drain_timeout_s is over -> the port closes
        -> what still runs is aborted on its workers -> the book is written to its end
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

import uvicorn

from baton import __version__
from baton.rpc.client import Channels
from baton.rpc.shutdown import shutdown_event
from baton.settings.model_source import ModelFiles, model_name, resolve_model
from baton.state.base import StateBook
from baton.state.connect import connect
from baton.state.options import BookOptions
from baton.state.writer import BookWriter
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics import BUILD_INFO, DEGRADED
from services.router.api.routes import ApiLimits, make_app
from services.router.dispatch.aborts import Aborts
from services.router.dispatch.admission import DoorLimits
from services.router.dispatch.booking import BookingLimits
from services.router.dispatch.dispatcher import DispatchLimits, Identity, TokenDispatcher
from services.router.dispatch.fleet import Fleet, FleetLimits
from services.router.settings import RouterSettings
from services.router.stopwatch import Stopwatch
from services.router.text.model import TextModel

BACKLOG = 2048
LAST_WORDS_S = 1
"""How long connections may take to close once requests are finished, or given up."""

WORKER_PATIENCE_S = 30.0
"""How long an interrupted request waits for a worker to be there again: long enough for one to be restarted."""

UNBOUNDED_MODEL_TOKENS = 1 << 20
"""For a model that names no longest context: the workers' pools are the bound."""

log = get_logger(__name__)


class BookHealth:
    """`baton_degraded{component="redis"}`: 1 while the reader or the writer of the book finds it away."""

    def __init__(self) -> None:
        self._complaints: set[str] = set()
        self._show()

    def reporter(self, name: str) -> Callable[[bool], None]:
        """What `name` calls with whether the book is away."""

        def report(degraded: bool) -> None:
            (self._complaints.add if degraded else self._complaints.discard)(name)
            self._show()

        return report

    def _show(self) -> None:
        DEGRADED.labels("redis").set(bool(self._complaints))


@dataclass(frozen=True, slots=True)
class LowerHalf:
    """The running lower half of the router."""

    dispatcher: TokenDispatcher
    fleet: Fleet
    stopwatch: Stopwatch
    following: asyncio.Task[None]

    def readiness(self) -> tuple[bool, str]:
        """Whether new requests are taken, and why or why not."""
        return (False, "draining") if self.dispatcher.draining else self.fleet.readiness()


async def serve(settings: RouterSettings) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status.

    Raises `SettingsError` for the model, `StateUnavailable` for the book, `OSError` for the port.
    """
    sock = listen(settings.host, settings.port)
    try:
        directory = await asyncio.to_thread(resolve_model, settings.model, ModelFiles.TEXT)
        text = await asyncio.to_thread(TextModel.load, directory)
        options = BookOptions(worker_ttl_s=settings.worker_ttl_s, heartbeat_s=settings.heartbeat_interval_s)
        book = await connect(settings.redis_url, options)
        with shutdown_event() as stop:
            return await run(settings, text, book, sock, stop)
    finally:
        sock.close()


async def run(
    settings: RouterSettings, text: TextModel, book: StateBook, sock: socket.socket, stop: asyncio.Event
) -> int:
    """Serves on `sock` until `stop`, then drains; closes `book`. Returns 0, or 1 when a part of it ended by itself."""
    async with open_lower_half(settings, book) as half:
        server = _http_server(settings, text, half)
        serving = asyncio.create_task(server.serve(sockets=[sock]), name="http")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        log.info("router_listening", address="{}:{}".format(*sock.getsockname()[:2]), model=settings.public_model_name)
        try:
            await asyncio.wait((serving, stopping, half.following), return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                await _drain(half.dispatcher, settings.drain_timeout_s)
        finally:
            stopping.cancel()
            server.should_exit = True
            await asyncio.gather(serving, stopping, return_exceptions=True)
            half.dispatcher.drain()
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await half.dispatcher.wait_empty()
        return _exit_status(serving, half.following)


@asynccontextmanager
async def open_lower_half(settings: RouterSettings, book: StateBook) -> AsyncIterator[LowerHalf]:
    """Everything below HTTP, started; closed in reverse order, the book last."""
    health, channels = BookHealth(), Channels()
    fleet = Fleet(book, channels, model_name(settings.model), fleet_limits(settings), health.reporter("fleet"))
    aborts = Aborts(fleet)
    stopwatch = Stopwatch()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(book.close)
        writer = await stack.enter_async_context(BookWriter(book, on_degraded=health.reporter("writer")))
        stack.push_async_callback(channels.close)
        stack.push_async_callback(fleet.close)
        stack.push_async_callback(aborts.close)
        identity = Identity(settings.router_id, settings.public_model_name)
        dispatcher = TokenDispatcher(fleet, aborts, writer, stopwatch, identity, dispatch_limits(settings))
        yield LowerHalf(dispatcher, fleet, stopwatch, fleet.start())


def listen(host: str, port: int) -> socket.socket:
    """A listening socket (port 0: a free one). Raises `OSError` that names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(error.errno, f"HTTP port {port} on {host} is in use by another process") from None
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror or error}") from None


def fleet_limits(settings: RouterSettings) -> FleetLimits:
    """The part of the settings that is about workers."""
    return FleetLimits(settings.worker_ttl_s, settings.heartbeat_interval_s, settings.max_step_age_s)


def dispatch_limits(settings: RouterSettings) -> DispatchLimits:
    """The part of the settings that is about requests."""
    return DispatchLimits(
        door=DoorLimits(
            max_running_requests=settings.max_running_requests,
            max_queued_requests=settings.max_queued_requests,
            max_queued_tokens=settings.max_queued_tokens,
        ),
        booking=BookingLimits(settings.promise_timeout_s, WORKER_PATIENCE_S),
        max_attempts=settings.max_attempts,
    )


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: `run` decides when to stop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _http_server(settings: RouterSettings, text: TextModel, half: LowerHalf) -> _HttpServer:
    BUILD_INFO.labels(__version__, "router", settings.public_model_name).set(1)
    limits = ApiLimits(
        model_name=settings.public_model_name,
        max_model_len=text.max_position_tokens or UNBOUNDED_MODEL_TOKENS,
        max_body_bytes=settings.max_body_bytes,
        request_deadline_s=settings.request_deadline_s,
    )
    app = make_app(text, half.dispatcher, half.readiness, limits, half.stopwatch)
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )
    return _HttpServer(config)


async def _drain(dispatcher: TokenDispatcher, timeout_s: float) -> None:
    """Takes nothing new and gives running requests `timeout_s` to finish."""
    dispatcher.drain()
    log.info("draining", num_requests=dispatcher.num_open)
    try:
        async with asyncio.timeout(timeout_s):
            await dispatcher.wait_empty()
    except TimeoutError:
        log.warning("drain_timed_out", num_requests=dispatcher.num_open)


def _exit_status(serving: asyncio.Task[None], following: asyncio.Task[None]) -> int:
    """0 when both parts ended because they were told to; a part's own error is logged."""
    status = 0
    for task in (serving, following):
        error = task.exception() if task.done() and not task.cancelled() else None
        if error is not None:
            log.error("router_part_failed", part=task.get_name(), error=repr(error))
            status = 1
    return status
