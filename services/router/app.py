"""Builds the router and runs it until it is told to stop. Called by `services.cli.serve`; owns nothing else's logic.

SIGTERM -> new requests are answered 503 -> running ones finish, or drain_timeout_s is over -> the port closes
        -> what still runs is aborted on its workers -> the book is written to its end -> the calls that were cut off
        are let go, for another router to carry on
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
from baton.domain.ids import OwnerId, new_incarnation
from baton.rpc.client import Channels
from baton.rpc.shutdown import shutdown_event
from baton.settings.model_source import ModelFiles, model_name, resolve_model
from baton.settings.process import keep_for_good
from baton.settings.trust import read_trust, why_open
from baton.state.base import StateBook
from baton.state.connect import connect
from baton.state.options import BookOptions
from baton.state.ownership import Ownership
from baton.state.writer import BookWriter
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics import BUILD_INFO, DEGRADED
from services.router.api.fence import Fence
from services.router.api.front import ApiLimits, Front, Memory, build_front
from services.router.api.keys import KeyRing
from services.router.api.routes import make_app
from services.router.api.wire import BoundedProtocol
from services.router.dispatch.aborts import Aborts
from services.router.dispatch.admission import DoorLimits
from services.router.dispatch.booking import BookingLimits
from services.router.dispatch.dispatcher import DispatchLimits, Identity, TokenDispatcher
from services.router.dispatch.fleet import Fleet, FleetLimits
from services.router.settings import EventIds, RouterSettings
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
    """The running lower half of the router, and what the upper one gets of the book."""

    dispatcher: TokenDispatcher
    fleet: Fleet
    stopwatch: Stopwatch
    following: asyncio.Task[None]
    writer: BookWriter
    memory: Memory

    def readiness(self) -> tuple[bool, str]:
        """Whether new requests are taken, and why or why not."""
        return (False, "draining") if self.dispatcher.draining else self.fleet.readiness()


@dataclass(frozen=True, slots=True)
class UpperHalf:
    """The running upper half of the router, but for HTTP itself."""

    front: Front
    ownership: Ownership

    def drain(self) -> None:
        """Takes no call over any more, and holds on to its own."""
        self.ownership.stop_claiming()
        self.front.carrier.drain()


async def serve(settings: RouterSettings) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status.

    Raises `SettingsError` for the model, `StateUnavailable` for the book, `OSError` for the port.
    """
    sock = listen(settings.host, settings.port)
    try:
        directory = await asyncio.to_thread(resolve_model, settings.model, ModelFiles.TEXT)
        text = await asyncio.to_thread(TextModel.load, directory)
        keep_for_good()
        book = await connect(settings.redis_url, book_options(settings))
        with shutdown_event() as stop:
            return await run(settings, text, book, sock, stop)
    finally:
        sock.close()


async def run(
    settings: RouterSettings, text: TextModel, book: StateBook, sock: socket.socket, stop: asyncio.Event
) -> int:
    """Serves on `sock` until `stop`, then drains; closes `book`. Returns 0, or 1 when a part of it ended by itself."""
    async with open_lower_half(settings, book) as half, open_upper_half(settings, text, half) as upper:
        keys = KeyRing.read(settings.api_keys_file) if settings.api_keys_file is not None else None
        server = _http_server(settings, text, half, upper.front, keys)
        serving = asyncio.create_task(server.serve(sockets=[sock]), name="http")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        log.info("router_listening", address="{}:{}".format(*sock.getsockname()[:2]), model=settings.public_model_name)
        try:
            await asyncio.wait((serving, stopping, half.following), return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                upper.drain()
                await _drain(half.dispatcher, settings.drain_timeout_s)
        finally:
            stopping.cancel()
            server.should_exit = True
            await asyncio.gather(serving, stopping, return_exceptions=True)
            await upper.front.carrier.close()
            half.dispatcher.drain()
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await half.dispatcher.wait_empty()
        return _exit_status(serving, half.following)


@asynccontextmanager
async def open_lower_half(settings: RouterSettings, book: StateBook) -> AsyncIterator[LowerHalf]:
    """Everything below HTTP, started; closed in reverse order, the book last. Raises `SettingsError`."""
    trust = read_trust(settings)
    if (why := why_open(settings)) is not None:
        log.warning("cluster_open", why=why)
    health, channels = BookHealth(), Channels(trust)
    limits, on_degraded = fleet_limits(settings), health.reporter("fleet")
    fleet = Fleet(book, channels, model_name(settings.model), limits, on_degraded, trust=trust)
    aborts = Aborts(fleet)
    stopwatch = Stopwatch()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(book.close)
        owner, fence = owner_id(settings.router_id), Fence()
        writer = await stack.enter_async_context(
            BookWriter(book, on_degraded=health.reporter("writer"), on_superseded=fence.superseded)
        )
        stack.push_async_callback(channels.close)
        stack.push_async_callback(fleet.close)
        stack.push_async_callback(aborts.close)
        identity = Identity(settings.router_id, settings.public_model_name)
        dispatcher = TokenDispatcher(fleet, aborts, writer, stopwatch, identity, dispatch_limits(settings))
        yield LowerHalf(dispatcher, fleet, stopwatch, fleet.start(), writer, Memory(book, writer, owner, fence))


@asynccontextmanager
async def open_upper_half(settings: RouterSettings, text: TextModel, half: LowerHalf) -> AsyncIterator[UpperHalf]:
    """What is between HTTP and the lower half, with this router's hold on its calls.

    Calls that are cut off by the end are let go once all that is known of them is written.
    """
    memory = half.memory
    front = build_front(text, half.dispatcher, api_limits(settings, text), half.stopwatch, memory)
    ownership = Ownership(memory.store, memory.owner, front.carrier.take, on_lapsed=half.writer.doubt)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(ownership.close)
        stack.push_async_callback(half.writer.flush, LAST_WORDS_S)
        stack.push_async_callback(front.carrier.close)
        ownership.start()
        yield UpperHalf(front, ownership)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket (port 0: a free one). Raises `OSError` that names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(error.errno, f"HTTP port {port} on {host} is in use by another process") from None
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror or error}") from None


def owner_id(router_id: str) -> OwnerId:
    """A fresh owner: a restarted router is another one than it was."""
    return OwnerId(f"{router_id}/{new_incarnation():x}")


def book_options(settings: RouterSettings) -> BookOptions:
    """The part of the settings that is about the book; what it keeps outlives the longest request."""
    return BookOptions(
        worker_ttl_s=settings.worker_ttl_s,
        heartbeat_s=settings.heartbeat_interval_s,
        retention_s=max(BookOptions().retention_s, 2 * settings.request_deadline_s),
    )


def api_limits(settings: RouterSettings, text: TextModel) -> ApiLimits:
    """The part of the settings that is about HTTP."""
    return ApiLimits(
        model_name=settings.public_model_name,
        max_model_len=text.max_position_tokens or UNBOUNDED_MODEL_TOKENS,
        max_body_bytes=settings.max_body_bytes,
        request_deadline_s=settings.request_deadline_s,
        always_ids=settings.event_ids is EventIds.ALWAYS,
    )


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
            max_ttft_s=settings.max_ttft_s,
        ),
        booking=BookingLimits(settings.promise_timeout_s, WORKER_PATIENCE_S),
        max_attempts=settings.max_attempts,
    )


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: `run` decides when to stop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _http_server(
    settings: RouterSettings, text: TextModel, half: LowerHalf, front: Front, keys: KeyRing | None
) -> _HttpServer:
    BUILD_INFO.labels(__version__, "router", settings.public_model_name).set(1)
    limits = api_limits(settings, text)
    app = make_app(text, half.dispatcher, half.readiness, limits, half.stopwatch, keys, front)
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
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
