"""Finds the address that a worker announces. Called once its server is bound.

A worker that listens on every interface announces the local end of its route to Redis: processes that reach Redis from
elsewhere reach that interface.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Any
from urllib.parse import urlsplit

from baton.session.wires.socket_server import SessionEndpoint
from baton.settings.groups import ANY_ADDRESS, WorkerProcessSettings, WorkerSettings
from baton.telemetry.logs import get_logger
from baton.transfer.stream.source import PageEndpoint
from baton.worker.rejected_calls import RejectedCallLog

log = get_logger()

DEFAULT_REDIS_PORT = 6379
RETRY_S = 0.5


async def advertised_address(settings: WorkerProcessSettings, bound_port: int) -> str:
    """The host:port to announce. Waits while the name of the Redis host cannot be resolved, and logs that once."""
    if settings.advertise_address is not None or settings.host not in ANY_ADDRESS:
        return settings.advertised(bound_port)
    host = await _route_to(settings.redis_url)
    if ipaddress.ip_address(host).is_loopback:
        log.warning("advertised_loopback", address=host, why="Redis is on this host: others cannot call it there")
    return f"[{host}]:{bound_port}" if ":" in host else f"{host}:{bound_port}"


async def _route_to(redis_url: str) -> str:
    """The local address of the route to Redis."""
    url, loop = urlsplit(redis_url), asyncio.get_running_loop()
    waiting = False
    while True:
        try:
            found = await loop.getaddrinfo(url.hostname, url.port or DEFAULT_REDIS_PORT, type=socket.SOCK_DGRAM)
            return next(filter(None, map(_local_end, found)))
        except (OSError, StopIteration) as error:
            if not waiting:
                log.warning("starting", waits_for=f"a route to {url.hostname}", why=str(error) or "it has no address")
            waiting = True
            await asyncio.sleep(RETRY_S)  # the name appears when Redis starts; nothing tells


def _local_end(found: tuple[int, int, int, str, Any]) -> str | None:
    """The local address that a datagram to an address would have; nothing is sent. None without a route."""
    family, kind, protocol, _, address = found
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def session_endpoint(settings: WorkerSettings) -> SessionEndpoint:
    """Where a worker listens for session connections."""
    advertised = settings.advertise_session_address or ""
    return SessionEndpoint(settings.host, settings.session_port, advertised, RejectedCallLog().record)


def page_endpoint(settings: WorkerSettings) -> PageEndpoint:
    """Where a worker listens for page connections."""
    advertised = settings.advertise_page_address or ""
    return PageEndpoint(settings.host, settings.page_port, advertised, RejectedCallLog().record)
