"""Identifies a worker process: its default id, and the check that no live process holds the id.

Called by `lifecycle` before the engine is built: a second process with the same id ends before it loads a model.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import socket

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.store.store import StoreUnavailable, WorkerIdInUse, WorkerRegistry
from baton.telemetry.logs import get_logger
from baton.worker.identity.container_name import container_name
from baton.worker.registration import describe_holder

log = get_logger()

MAX_HOST_CHARS = 63
_UNUSUAL = re.compile(r"[^A-Za-z0-9.-]+")


def default_worker_id(role: WorkerRole, port: int, usual_port: int, host_name: str | None = None) -> WorkerId:
    """`<role>-<host name>`; another port than the usual one is added, so workers of one host differ.

    In a container whose host name is its id, the container's name instead; of compose's only the number: `decode-2` for
    `baton-decode-2`. A worker on any free port (0) gets a random suffix: it has no lasting name.
    """
    host = host_name or socket.gethostname()
    if (container := container_name(host)) is not None:
        host = _without_service(role, container)
    host = _UNUSUAL.sub("-", host)[:MAX_HOST_CHARS].strip("-.") or "host"
    suffix = "" if port == usual_port else f"-{port}" if port else f"-{secrets.token_hex(4)}"
    return WorkerId(f"{role.value}-{host}{suffix}")


def _without_service(role: WorkerRole, name: str) -> str:
    """The number of a replica in a name that compose gives, `<project>-<service>-<number>`; else the name itself."""
    found = re.search(rf"(?:^|[-_]){role.value}[-_](\d+)$", name)
    return name if found is None else found[1]


async def require_free_id(
    registry: WorkerRegistry, id: WorkerId, watch_s: float, ended: Incarnation | None = None
) -> None:
    """Raises `WorkerIdInUse` if a process that announces itself within `watch_s` holds the id. `ended` is no more.

    A silent holder is a dead predecessor: its record expires while the model loads. A store that does not answer is no
    reason to wait either. The registration asks again in both cases.
    """
    try:
        held = await _find(registry, id)
        if held is not None and held.incarnation != ended and await _is_announced_again(registry, held, watch_s):
            raise WorkerIdInUse(await describe_holder(registry, id))
    except StoreUnavailable as error:
        log.warning("store_unreachable", why=str(error))


async def _is_announced_again(registry: WorkerRegistry, held: WorkerRecord, watch_s: float) -> bool:
    log.info("worker_id_held", worker=held.id, address=held.address, watched_s=watch_s)
    try:
        async with asyncio.timeout(watch_s):
            async for _ in registry.changes():
                now = await _find(registry, held.id)
                if now is None or (now.incarnation, now.announcement) != (held.incarnation, held.announcement):
                    return now is not None
    except TimeoutError:
        pass
    return False


async def _find(registry: WorkerRegistry, id: WorkerId) -> WorkerRecord | None:
    return next((worker for worker in await registry.workers() if worker.id == id), None)
