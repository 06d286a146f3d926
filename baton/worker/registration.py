"""A worker's registration: announces its record while the process runs and withdraws it at the end.

One asyncio task a worker process. An id that another live process holds is asked for again until `patience_s` is over:
the holder may be this worker's own predecessor, whose record has not expired. An outage of the state store is logged
once: routers keep the records they have, and the next announcement makes the worker visible again.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Callable
from dataclasses import replace

from baton.domain.ids import WorkerId
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.domain.worker import WorkerRecord
from baton.store.store import StoreUnavailable, WorkerIdInUse, WorkerRegistry
from baton.telemetry import metrics
from baton.telemetry.logs import get_logger

log = get_logger()


class RegistrationLoss(enum.Enum):
    """Reason why a process may not use its worker id. REPLACED: a newer process has it. TAKEN: another one held it."""

    REPLACED = "replaced"
    TAKEN = "taken"


PATIENCE_TTLS = 2
"""Record lifetimes for which a process asks for an id that another one holds."""


class Registration:
    """Announces `record()` every `interval_s`, and at once after `announce_soon`."""

    def __init__(
        self,
        registry: WorkerRegistry,
        record: Callable[[], WorkerRecord],
        interval_s: float,
        on_lost: Callable[[RegistrationLoss], object],
        trust: ClusterTrust = OPEN_CLUSTER,
        patience_s: float = 4.0,
    ) -> None:
        """Numbers and signs the records of `record()`."""
        self._registry = registry
        self._record = record
        self._interval_s = interval_s
        self._on_lost = on_lost
        self._trust = trust
        self._patience_s = patience_s
        self._taken_at: float | None = None
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
            with contextlib.suppress(TimeoutError):  # not `wait_for`: Python 3.11's swallows a cancellation at a change
                async with asyncio.timeout(self._interval_s):
                    await self._changed.wait()

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
        except WorkerIdInUse:
            self._set_reachable(True)
            await self._wait_for_id()
            return
        self._set_reachable(True)
        self._taken_at = None
        if not current:
            log.error("worker_replaced", why="a newer process announced itself under this worker id")
            self._on_lost(RegistrationLoss.REPLACED)

    async def _wait_for_id(self) -> None:
        """Another process holds the id. Ends this one if it still does after `patience_s`."""
        now = asyncio.get_running_loop().time()
        if self._taken_at is None:
            self._taken_at = now
            log.warning("worker_id_held", worker=self._record().id, patience_s=self._patience_s)
        elif now - self._taken_at >= self._patience_s:
            log.error("worker_id_taken", why=await describe_holder(self._registry, self._record().id))
            self._on_lost(RegistrationLoss.TAKEN)

    def _next_record(self) -> WorkerRecord:
        self._num_announcements += 1
        record = replace(self._record(), announcement=self._num_announcements)
        return replace(record, signature=self._trust.sign(record))

    def _set_reachable(self, reachable: bool) -> None:
        if reachable and not self._reachable:
            log.info("store_reachable_again")
        self._reachable = reachable
        metrics.DEGRADED.labels("redis").set(0 if reachable else 1)


async def describe_holder(registry: WorkerRegistry, id: WorkerId) -> str:
    """The message for an operator whose worker id is in use."""
    try:
        holder = next((worker.address for worker in await registry.workers() if worker.id == id), "another process")
    except StoreUnavailable:
        holder = "another process"
    return f"worker id {id} is held by {holder}. Start with another --worker-id"
