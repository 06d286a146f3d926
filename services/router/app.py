"""Builds the router and runs it until SIGTERM. Called by `baton.services.cli.serve`.

SIGTERM -> new requests get 503 -> running ones finish, or drain_timeout_s is over -> the port closes -> the rest is
aborted on its workers -> pending records are written -> calls that were cut off are released for another router
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from baton import __version__
from baton.domain.ids import OwnerId, new_incarnation
from baton.domain.trust import ClusterTrust
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.shutdown import shutdown_event
from baton.services.router.admin import make_admin_app
from baton.services.router.admission.tenants import TenantTable
from baton.services.router.cluster.demo import DemoClient
from baton.services.router.cluster_reader import ClusterReader
from baton.services.router.dispatch.aborts import Aborts
from baton.services.router.dispatch.cache_index.reader import CacheEventReaders
from baton.services.router.dispatch.dispatcher import RouterIdentity, TokenDispatcher
from baton.services.router.dispatch.placement.worker_filter import WorkerFilter
from baton.services.router.dispatch.rate_limiter import RateLimiter
from baton.services.router.dispatch.service_sync import ServiceSync
from baton.services.router.dispatch.sessions.worker_sessions import open_sessions
from baton.services.router.dispatch.workers import WorkerSet
from baton.services.router.edge.api_keys import ApiKeys
from baton.services.router.frontend import Frontend, StoreAccess, build_frontend
from baton.services.router.http_server import make_http_server
from baton.services.router.limits import (
    api_limits,
    dispatch_limits,
    store_options,
    stored_media_bytes,
    worker_limits,
)
from baton.services.router.live_view import open_feed
from baton.services.router.routes import ReadinessCheck, make_app
from baton.services.router.settings import RouterSettings
from baton.services.router.store_health import StoreHealth
from baton.services.router.takeover.call_media import CallMedia
from baton.services.router.takeover.supersede_listener import SupersedeListener
from baton.services.router.text.text_model import TextModel
from baton.services.router.ui.bundle import page_bundle
from baton.services.router.vision.image_model import ImageModel, read_image_model
from baton.settings.base import SettingsError
from baton.settings.groups import MIB
from baton.settings.model_source import ModelFiles, model_name, resolve_model
from baton.settings.process import MANY_YOUNG_OBJECTS, freeze_gc
from baton.settings.trust import open_cluster_warning, read_trust
from baton.store.connect import connect
from baton.store.durability import DurabilityWatcher
from baton.store.media.redis_media_file_store import connect_media
from baton.store.ownership import OwnerLease
from baton.store.private_store import PrivateStore
from baton.store.store import StateStore
from baton.store.tenants.pseudonym import pseudonyms
from baton.store.tenants.redis_tenant_store import connect_tenants
from baton.store.write_behind.writer import StoreWriter
from baton.telemetry.known_series import start_series
from baton.telemetry.logs import get_logger
from baton.telemetry.request_traces import RequestTraces

if TYPE_CHECKING:
    from baton.telemetry.spans import SpanSink

BACKLOG = 2048
SHUTDOWN_GRACE_S = 1
"""Longest wait for connections to close after their requests."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunningBackend:
    """The running dispatch side, and its access to the store."""

    dispatcher: TokenDispatcher
    workers: WorkerSet
    traces: RequestTraces
    tenants: TenantTable
    watching: asyncio.Task[None]
    writer: StoreWriter
    durability: DurabilityWatcher
    store_access: StoreAccess
    health: StoreHealth

    def on_store_reset(self) -> None:
        """The store has lost what it had: writes it again, and reads again what the store keeps."""
        self.store_access.losses.note()
        self.writer.put_again()
        self.store_access.media.put_again()
        self.durability.recheck()

    def readiness(self) -> tuple[bool, str]:
        """True if new requests are accepted, and the reason."""
        return (False, "draining") if self.dispatcher.draining else self.workers.readiness()


@dataclass(frozen=True, slots=True)
class RunningFrontend:
    """The running HTTP side, without the HTTP server."""

    frontend: Frontend
    ownership: OwnerLease

    def drain(self) -> None:
        """Takes over no further call; keeps its own."""
        self.ownership.stop_claiming()
        self.frontend.takeovers.drain()


async def serve(settings: RouterSettings) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status.

    Raises `SettingsError` for the model, `StoreUnavailable` for the store, `OSError` for the port.
    """
    with closing(listen(settings.host, settings.port)) as sock, closing(_listen_admin(settings)) as admin:
        directory = await asyncio.to_thread(resolve_model, settings.model, ModelFiles.TEXT)
        text = await asyncio.to_thread(TextModel.load, directory, settings.chat_template)
        text.choose_formats(settings.reasoning_parser.value, settings.tool_parser.value, settings.reasoning_fields)
        images = await asyncio.to_thread(read_image_model, directory, text.added_token, text.encode)
        if images.reason:
            log.warning("images_not_served", why=images.reason)
        freeze_gc(MANY_YOUNG_OBJECTS)
        options = replace(store_options(settings), text_digest=text.digest)
        store = await connect(settings.redis_url, options, read_trust(settings), check=False)
        with shutdown_event() as stop:
            return await run(settings, text, store, sock, stop, admin, images)


async def run(
    settings: RouterSettings,
    text: TextModel,
    store: StateStore,
    sock: socket.socket,
    stop: asyncio.Event,
    admin: socket.socket | None = None,
    images: ImageModel | None = None,
) -> int:
    """Serves on `sock` until `stop`, then drains; closes `store`. `admin`: socket of metrics and probes, if they are
    wanted. `images`: of the model.

    Returns 0, or 1 if a part of the router ended by itself.
    """
    async with (
        open_backend(settings, store, text.digest) as backend,
        open_frontend(settings, text, backend, images) as running,
        open_feed(settings, _reader(backend), backend.traces, backend.store_access.owner) as feed,
    ):
        backend.workers.add_listener(feed.view.observe)
        keys = ApiKeys.read(settings.api_keys_file) if settings.api_keys_file is not None else None
        start_series(__version__, "router", settings.public_model_name, vllm_names=settings.vllm_names)
        page = page_bundle() if settings.ui else None
        demo = DemoClient(settings.demo_socket) if settings.demo_socket is not None else None
        readiness = _until_stop(stop, backend.readiness)
        server = make_http_server(make_app(running.frontend, readiness, keys, feed, page, demo), SHUTDOWN_GRACE_S)
        await backend.workers.wait_for_first_read()
        serving = asyncio.create_task(server.serve(sockets=[sock]), name="http")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        log.info("router_listening", address="{}:{}".format(*sock.getsockname()[:2]), model=settings.public_model_name)
        try:
            async with _serving_admin(make_admin_app(readiness, feed, settings.public_model_name), admin):
                await asyncio.wait((serving, stopping, backend.watching), return_when=asyncio.FIRST_COMPLETED)
                if stop.is_set():
                    running.ownership.stop_claiming()  # others finish orphans; clients are served
                    parts = (serving, backend.watching)
                    await asyncio.wait(parts, timeout=settings.shutdown_delay_s, return_when=asyncio.FIRST_COMPLETED)
                    running.drain()
                    await _drain(backend.dispatcher, settings.drain_timeout_s)
        finally:
            stopping.cancel()
            await feed.close()
            server.should_exit = True
            await asyncio.gather(serving, stopping, return_exceptions=True)
            await running.frontend.takeovers.close()
            backend.dispatcher.drain()
            with suppress(TimeoutError):
                async with asyncio.timeout(SHUTDOWN_GRACE_S):
                    await backend.dispatcher.wait_empty()
        return _exit_status(serving, backend.watching)


@asynccontextmanager
async def open_backend(
    settings: RouterSettings, store: StateStore, text_digest: str = ""
) -> AsyncIterator[RunningBackend]:
    """Starts everything below HTTP; closes it in reverse order, the store last. Raises `SettingsError`.

    `text_digest`: that of the workers to use; "" for any.
    """
    trust = read_trust(settings)
    if (why := open_cluster_warning(settings)) is not None:
        log.warning("cluster_unauthenticated", why=why)
    health, channels = StoreHealth(), ChannelPool(trust)
    limits, on_degraded = worker_limits(settings), health.reporter("workers")
    workers = WorkerSet(
        store, channels, WorkerFilter(model_name(settings.model), trust, text_digest), limits, on_degraded
    )
    aborts = Aborts(workers)
    readers = CacheEventReaders(workers.served, channels, workers.cache_index)
    workers.add_listener(readers.refresh)
    traces = RequestTraces(settings.router_id, settings.public_model_name, settings.request_log)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        if settings.otlp_endpoint is not None:
            traces.add_sink(_open_spans(settings.otlp_endpoint, settings.otlp_sample_ratio, stack))
        store = PrivateStore(store, store_options(settings))
        owner, supersede_listener = owner_id(settings.router_id), SupersedeListener()
        durability = await stack.enter_async_context(DurabilityWatcher(store))

        def on_store_degraded(degraded: bool) -> None:
            health.reporter("writer")(degraded)
            durability.recheck()

        writer = await stack.enter_async_context(
            StoreWriter(store, on_degraded=on_store_degraded, on_superseded=supersede_listener.on_superseded)
        )
        stack.push_async_callback(channels.close)
        stack.push_async_callback(readers.close)
        workers.worker_sessions = await stack.enter_async_context(open_sessions(settings.sessions, owner, trust))
        stack.push_async_callback(workers.close)
        stack.push_async_callback(aborts.close)
        identity = RouterIdentity(settings.router_id, settings.public_model_name)
        tenant_store, dispatch = connect_tenants(settings.redis_url, store_options(settings)), dispatch_limits(settings)
        stack.push_async_callback(tenant_store.close)
        media = await stack.enter_async_context(_open_media(settings, trust))
        rates = RateLimiter(tenant_store, dispatch.tenants, pseudonyms(trust))
        dispatcher = TokenDispatcher(workers, aborts, writer, identity, dispatch, rates)
        service_sync = ServiceSync(tenant_store, owner, dispatcher.admission_queue, rates)
        stack.push_async_callback(service_sync.close)
        service_sync.start()
        yield RunningBackend(
            dispatcher,
            workers,
            traces,
            dispatch.tenants,
            workers.start(),
            writer,
            durability,
            StoreAccess(store, writer, owner, supersede_listener, lambda: durability.level, media=media),
            health,
        )


@asynccontextmanager
async def open_frontend(
    settings: RouterSettings, text: TextModel, backend: RunningBackend, images: ImageModel | None = None
) -> AsyncIterator[RunningFrontend]:
    """Starts everything between HTTP and the dispatcher, and the ownership lease.

    Calls that are cut off are released after all their records are written.
    """
    store_access = backend.store_access
    built = build_frontend(text, backend.dispatcher, api_limits(settings, text), backend.traces, store_access, images)
    workers, rate_headers = backend.workers, backend.tenants.rate_headers
    frontend = replace(
        built, encodes=workers.encodes, held_tokens=workers.max_request_tokens, rate_headers=rate_headers
    )
    ownership = OwnerLease(
        store_access.store,
        store_access.owner,
        frontend.takeovers.take_over,
        on_reset=lambda reset: backend.on_store_reset(),
    )
    frontend.takeovers.follow(ownership)
    store_access.losses.follow(ownership.wait_for_renewal)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(ownership.close)
        stack.push_async_callback(backend.writer.flush, SHUTDOWN_GRACE_S)
        stack.push_async_callback(frontend.takeovers.close)
        ownership.start()
        yield RunningFrontend(frontend, ownership)


@asynccontextmanager
async def _open_media(settings: RouterSettings, trust: ClusterTrust) -> AsyncIterator[CallMedia]:
    """Files of images in the store."""
    store = connect_media(settings.redis_url, store_options(settings), trust, stored_media_bytes(settings))
    media = CallMedia(store, settings.max_media_mib * MIB)
    try:
        yield media
    finally:
        await media.close()


def _open_spans(endpoint: str, sample_ratio: float, stack: AsyncExitStack) -> SpanSink:
    """A sink that `stack` closes. Raises `SettingsError` if the extra is not installed."""
    try:
        from baton.telemetry import spans
    except ImportError as error:
        hint = "Install it: pip install 'baton-serve[otel]'."
        raise SettingsError("otlp_endpoint", why=f"{error.name} is not installed", hint=hint) from None
    sink = spans.SpanSink(spans.otlp_exporter(endpoint), sample_ratio)
    stack.push_async_callback(asyncio.to_thread, sink.close)
    return sink


def listen(host: str, port: int) -> socket.socket:
    """A listening socket (port 0: any free port). Raises `OSError`, which names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(error.errno, f"HTTP port {port} on {host} is in use by another process") from None
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror or error}") from None


def owner_id(router_id: str) -> OwnerId:
    """A new owner id: a restarted router is a different owner."""
    return OwnerId(f"{router_id}/{new_incarnation():x}")


def _reader(backend: RunningBackend) -> ClusterReader:
    return ClusterReader(backend.dispatcher, backend.workers, backend.health.away)


def _listen_admin(settings: RouterSettings) -> socket.socket:
    """The socket of metrics and probes. Raises `OSError`, which names the flag of a busy port."""
    try:
        return listen(settings.host, settings.metrics_port)
    except OSError as error:
        hint = f"for example --metrics-port {settings.metrics_port + 1}"
        raise OSError(error.errno, f"{error.strerror} (metrics; {hint})") from None


@asynccontextmanager
async def _serving_admin(app: ASGIApp, sock: socket.socket | None) -> AsyncIterator[None]:
    """Serves metrics and probes within the context, also while the router drains."""
    if sock is None:
        yield
        return
    server = make_http_server(app, SHUTDOWN_GRACE_S)
    task = asyncio.create_task(server.serve(sockets=[sock]), name="admin")
    log.info("admin_listening", address="{}:{}".format(*sock.getsockname()[:2]))
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)


def _until_stop(stop: asyncio.Event, readiness: ReadinessCheck) -> ReadinessCheck:
    """`readiness`, and not ready from the stop on: load balancers look away while requests are still served."""
    return lambda: (False, "draining") if stop.is_set() else readiness()


async def _drain(dispatcher: TokenDispatcher, timeout_s: float) -> None:
    """Refuses new requests and gives running ones `timeout_s` to finish."""
    dispatcher.drain()
    log.info("draining", num_requests=dispatcher.num_open)
    try:
        async with asyncio.timeout(timeout_s):
            await dispatcher.wait_empty()
    except TimeoutError:
        log.warning("drain_timed_out", num_requests=dispatcher.num_open)


def _exit_status(serving: asyncio.Task[None], watching: asyncio.Task[None]) -> int:
    """0 if every part was stopped; logs the error of a part that failed."""
    status = 0
    for task in (serving, watching):
        error = task.exception() if task.done() and not task.cancelled() else None
        if error is not None:
            log.error("router_task_failed", part=task.get_name(), error=repr(error))
            status = 1
    return status
