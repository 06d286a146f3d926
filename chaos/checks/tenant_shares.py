"""What the tenants of a load got, and what is wrong with it. Pure; `load` counts, `soak` and `storm` report.

The promise: a steady tenant within its share loses at most 1 % to the load of others, no tenant reads a call of
another one, and every label names a tenant with a key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from chaos.clients.tenants import LoadTenant
from chaos.testbed.metrics import ProcessMetrics

MAX_LOST_SHARE = 0.01
MIN_ASKED = 100
"""Fewer requests tell nothing about 1 %: then one may be lost."""

_TENANT = "tenant"
OVERLOADED = "overloaded"
"""Code of a refusal for want of room. All other refusals are those of a cluster without workers or without a store."""


@dataclass(slots=True)
class TenantCounts:
    """Requests of one tenant: sent, refused for want of room; reads with another tenant's key that were refused."""

    num_asked: int = 0
    num_overloaded: int = 0
    num_tokens: int = 0
    num_foreign_reads: int = 0


@dataclass(slots=True)
class TenantShares:
    """Counts by tenant."""

    counts: dict[str, TenantCounts] = field(default_factory=dict)

    def of(self, tenant: str) -> TenantCounts:
        """The counts of a tenant, made when first asked for."""
        return self.counts.setdefault(tenant, TenantCounts())

    def record(self, tenant: str, code: str, num_tokens: int) -> None:
        """Counts an answer, or a refusal with `code`."""
        counts = self.of(tenant)
        counts.num_asked += 1
        counts.num_overloaded += code == OVERLOADED
        counts.num_tokens += num_tokens

    def problems(self, tenants: Collection[LoadTenant]) -> list[str]:
        """Steady tenants that lost more than 1 %."""
        found = []
        for tenant in tenants:
            counts = self.of(tenant.name)
            most = MAX_LOST_SHARE * max(counts.num_asked, MIN_ASKED)
            if tenant.is_steady and counts.num_overloaded > most:
                found.append(
                    f"{tenant.name} stays within its share, and {counts.num_overloaded} of its {counts.num_asked} "
                    "requests found no room"
                )
        return found

    def summary(self) -> str:
        """One line; empty without tenants."""
        parts = (
            f"{name} {one.num_asked} requests, {one.num_overloaded} without room, {one.num_tokens} tokens, "
            f"{one.num_foreign_reads} refused to others"
            for name, one in sorted(self.counts.items())
        )
        return "; ".join(parts)


def wrong_labels(metrics: Mapping[str, ProcessMetrics], tenants: Collection[LoadTenant]) -> list[str]:
    """Labels of routers that name a tenant whose key nobody has. `metrics`: by router.

    Series of the tenant "" begin at 0, for clusters without keys.
    """
    known = {tenant.name for tenant in tenants}
    found = {
        (router, one.labels[_TENANT])
        for router, own in metrics.items()
        for one in own.samples
        if one.labels.keys() >= {_TENANT} and one.value and not one.name.endswith("_created")
    }
    return [f"{router} counts requests of {label!r}" for router, label in sorted(found) if label not in known]
