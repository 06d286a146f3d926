"""Shares the charged tokens of tenants with the other routers, once a second. Owned by `dispatcher`; one task.

Every router stores its totals since its start and reads those of the others. The increase since the last reading is
added here, so a lost or repeated exchange changes nothing.
"""

from __future__ import annotations

import asyncio

from baton.domain.ids import OwnerId
from baton.services.router.admission.admission_queue import AdmissionQueue
from baton.services.router.dispatch.rate_limiter import RateLimiter
from baton.store.store import StoreUnavailable
from baton.store.tenants.tenant_store import TenantStore
from baton.telemetry.logs import get_logger

INTERVAL_S = 1.0
MAX_CHARGE = 1e12
"""Tokens, more than a router serves between two readings: none wrote a total that changes by more. If it counted, the
service of a tenant could be no number until this router ends, and tenants would have no order."""

log = get_logger(__name__)


class ServiceSync:
    """Exchanges totals while more than one tenant is known, and writes the refunds of the rate limiter."""

    def __init__(
        self,
        store: TenantStore,
        owner: OwnerId,
        queue: AdmissionQueue,
        rates: RateLimiter,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._store = store
        self._owner = owner
        self._queue = queue
        self._rates = rates
        self._interval_s = interval_s
        self._seen: dict[str, dict[str, float]] = {}
        self._away = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the task inside a running loop; idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="service-sync")

    async def close(self) -> None:
        """Stops the task and writes the last refunds; idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
            await self._rates.flush()

    async def exchange(self) -> None:
        """Stores this router's totals and adds what the others have served since the last time."""
        charges, pseudonym = self._queue.charges(), self._rates.pseudonym
        names = {pseudonym(tenant): tenant for tenant in charges}
        totals = {pseudonym(tenant): total for tenant, total in charges.items()}
        others = await self._store.share_service(self._owner, totals)
        self._rates.num_routers, self._rates.store_away = 1 + len(others), False
        for router, theirs in others.items():
            before = self._seen.get(router, theirs)  # what it served before it was first seen is not compared
            for name, total in theirs.items():
                charge = total - before.get(name, 0.0)
                if name in names and abs(charge) <= MAX_CHARGE:
                    self._queue.add_remote(names[name], charge)
            self._seen[router] = dict(theirs)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await self._once()
            await asyncio.sleep(max(0.0, began + self._interval_s - loop.time()))

    async def _once(self) -> None:
        try:
            if len(self._queue.charges()) > 1 or self._rates.limits_any:
                await self.exchange()
            await self._rates.flush()
            if self._away:
                log.info("tenant_store_back")
            self._away = False
        except StoreUnavailable as error:
            if not self._away:
                log.warning("tenant_store_away", reason=str(error))
            self._away = True
