"""Durability of what the state store acknowledges: read from the server itself, once a minute and after every doubt.

`RedisStore` reads it, the router's headers pass it on. A configuration file or a promise of an operator does not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol, Self

import structlog

from baton.store.notifier import wait_for_event
from baton.store.store import Durability, StoreUnavailable

READ_INTERVAL_S = 60.0
RETRY_S = 1.0

_log = structlog.get_logger(__name__)


class DurabilitySource(Protocol):
    """A store that can tell what it keeps."""

    async def durability(self) -> Durability:
        """Reads what acknowledged writes survive now. Raises `StoreUnavailable`."""
        ...


def redis_durability(info: Mapping[str, Any], config: Mapping[Any, Any]) -> Durability:
    """The durability of a Redis server, from `INFO` and `CONFIG GET`; an empty `config`: it may not be read.

    RESTART needs an append-only file that is written before each answer, whose last write succeeded, and no eviction.
    `appendfsync everysec` does not do that: while an fsync is slow, the server answers first and writes up to 2 s later
    (`flushAppendOnlyFile` of Redis). HOST also needs an fsync a write, or replicas without which the server refuses
    writes.
    """
    writes_file = info.get("aof_enabled") == 1 and info.get("aof_last_write_status") == "ok"
    evicts = info.get("maxmemory", 0) != 0 and info.get("maxmemory_policy") != "noeviction"
    writes_first = config.get("appendfsync") in ("always", "no")
    if not (writes_file and writes_first) or evicts or info.get("loading") != 0:
        return Durability.ROUTER
    if config.get("appendfsync") == "always" or int(config.get("min-replicas-to-write", 0)) > 0:
        return Durability.HOST
    return Durability.RESTART


class DurabilityWatcher:
    """Keeps the last reading. One task; owned by the router's `app`."""

    def __init__(
        self, source: DurabilitySource, *, interval_s: float = READ_INTERVAL_S, retry_s: float = RETRY_S
    ) -> None:
        self._source = source
        self._interval_s = interval_s
        self._retry_s = retry_s
        self._level = Durability.ROUTER
        self._doubt = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="store-durability")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=self._retry_s)

    @property
    def level(self) -> Durability:
        """The last reading; ROUTER before the first one and while there is doubt."""
        return self._level

    def recheck(self) -> None:
        """Distrusts the last reading and takes a new one: the store was away, or has lost what it had."""
        self._set(Durability.ROUTER)
        self._doubt.set()

    async def _run(self) -> None:
        while True:
            self._doubt.clear()
            try:
                level, wait_s = await self._source.durability(), self._interval_s
            except StoreUnavailable:
                level, wait_s = Durability.ROUTER, self._retry_s
            if not self._doubt.is_set():
                self._set(level)
            await wait_for_event(self._doubt, wait_s)

    def _set(self, level: Durability) -> None:
        if level is not self._level:
            _log.info("store_durability", scope=level.value, before=self._level.value)
        self._level = level
