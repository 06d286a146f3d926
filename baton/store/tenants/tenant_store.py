"""Interface and values of the store of tenants. `RedisTenantStore` and `MemoryTenantStore` implement it.

Called by the router's dispatch, before a request is admitted and once a second. Tenants appear under pseudonyms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.domain.ids import OwnerId

PERIOD_S = 60.0
"""A full bucket holds what refills in this time."""


@dataclass(frozen=True, slots=True)
class RateTake:
    """An amount from one bucket that refills at `per_minute`. A negative amount gives back."""

    bucket: str
    amount: float
    per_minute: float

    @property
    def interval_s(self) -> float:
        """Time in which an amount of 1 refills."""
        return PERIOD_S / self.per_minute

    @property
    def cost_s(self) -> float:
        """Time in which the amount refills."""
        return self.amount * self.interval_s


class TenantStore(Protocol):
    """Token buckets, and the totals that each router has charged."""

    async def take(self, takes: Sequence[RateTake], *, overdraw: bool = False) -> float:
        """Takes from all buckets in one step and returns 0; or takes nothing and returns the seconds to wait.

        An amount that no bucket can hold passes when the bucket is full, and is refilled before the next. With
        `overdraw` every amount passes. Raises `StoreUnavailable`; then the amounts may have been taken.
        """
        ...

    async def share_service(self, owner: OwnerId, totals: Mapping[str, float]) -> Mapping[str, Mapping[str, float]]:
        """Stores the totals of one router by tenant, and returns those of all live others by router.

        Totals grow from the start of a router; a repeated call changes nothing.
        """
        ...

    async def close(self) -> None:
        """Releases connections; idempotent."""
        ...
