"""A worker's registration: announces its record while the process runs and withdraws it at the end.

One asyncio task a worker process. An outage of the state store is logged once: routers keep the records they have,
and the next announcement makes the worker visible again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.domain.worker import WorkerRecord
from baton.store.store import StoreUnavailable, WorkerRegistry
from baton.telemetry import metrics
from baton.telemetry.logs import get_logger

log = get_logger()


class Registration:
    """Announces `record()` every `interval_s`, and at once after `announce_soon`."""

    def __init__(
        self,
        registry: WorkerRegistry,
        record: Callable[[], WorkerRecord],
        interval_s: float,
        on_replaced: Callable[[], None],
        trust: ClusterTrust = OPEN_CLUSTER,
    ) -> None:
        """Numbers and signs the records of `record()`."""
        self._registry = registry
        self._record = record
        self._interval_s = interval_s
        self._on_replaced = on_replaced
        self._trust = trust
        self._num_announcements = 0
        self._changed = asyncio.Event()
        self._announcing = asyncio.Lock()  # the later record must be the one that stays
        self._reachable = True

    def announce_soon(self) -> None:
        """Announces the changed record without waiting for the next heartbeat."""
        self._changed.set()

    async def run(self) -> None:
        """Announces until cancelled."""
        while True:
            self._changed.clear()
            await self.announce()
            try:
                await asyncio.wait_for(self._changed.wait(), self._interval_s)
            except TimeoutError:
                continue

    async def withdraw(self) -> None:
        """Withdraws the record. In an unreachable store it expires."""
        record = self._record()
        try:
            await self._registry.withdraw(record.id, record.incarnation)
        except StoreUnavailable:
            log.warning("withdraw_failed", worker=record.id)

    async def announce(self) -> None:
        """Writes the current record to the store. Bounded in time; logs an unreachable store and does not raise."""
        try:
            async with self._announcing:
                current = await self._registry.announce(self._next_record())
        except StoreUnavailable as error:
            if self._reachable:
                log.warning("store_unreachable", why=str(error))
            self._set_reachable(False)
            return
        self._set_reachable(True)
        if not current:
            log.error("worker_replaced", why="a newer process announced itself under this worker id")
            self._on_replaced()

    def _next_record(self) -> WorkerRecord:
        self._num_announcements += 1
        record = replace(self._record(), announcement=self._num_announcements)
        return replace(record, signature=self._trust.sign(record))

    def _set_reachable(self, reachable: bool) -> None:
        if reachable and not self._reachable:
            log.info("store_reachable_again")
        self._reachable = reachable
        metrics.DEGRADED.labels("redis").set(0 if reachable else 1)
