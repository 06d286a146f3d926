"""Store of tenants in this process's memory, for one-process serving and tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from baton.domain.ids import OwnerId
from baton.store.store import StoreUnavailable
from baton.store.tenants.tenant_store import RateTake
from baton.store.tenants.token_buckets import TokenBuckets

SERVICE_TTL_S = 10.0
"""A router that has not shared its totals for so long is gone."""


class MemoryTenantStore:
    """A `TenantStore` without a server. For one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets = TokenBuckets()
        self._totals: dict[OwnerId, tuple[float, dict[str, float]]] = {}
        self._closed = False

    async def take(self, takes: Sequence[RateTake], *, overdraw: bool = False) -> float:
        self._check_open()
        return self._buckets.take(takes, self._clock(), overdraw=overdraw)

    async def share_service(self, owner: OwnerId, totals: Mapping[str, float]) -> Mapping[str, Mapping[str, float]]:
        self._check_open()
        now = self._clock()
        self._totals[owner] = now, dict(totals)
        self._totals = {id: entry for id, entry in self._totals.items() if now - entry[0] <= SERVICE_TTL_S}
        return {id: stored for id, (_, stored) in self._totals.items() if id != owner}

    async def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("this store of tenants has been closed")
