"""Limits of tenants: weight, places, rates, priority. Read from a file by `tenants_file`; values only.

Without API keys every request belongs to the tenant "".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MIN_PRIORITY, MAX_PRIORITY = -3, 3


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of one tenant. None: no limit.

    `weight`: share of the tokens served while tenants compete. `max_slots`: most running requests on one router.
    The rates hold over all routers. `max_priority`: larger priorities of its requests are clamped to it.
    """

    weight: float = 1.0
    max_slots: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_priority: int = MAX_PRIORITY

    def clamp(self, priority: int) -> int:
        """`priority` within what the tenant may ask for."""
        return min(max(priority, MIN_PRIORITY), self.max_priority)


_UNLIMITED = TenantLimits()


@dataclass(frozen=True, slots=True)
class TenantTable:
    """Limits by tenant; `default` holds for all others."""

    default: TenantLimits = _UNLIMITED
    by_name: Mapping[str, TenantLimits] = field(default_factory=dict)

    def limits_of(self, tenant: str) -> TenantLimits:
        """The limits of `tenant`."""
        return self.by_name.get(tenant, self.default)

    def rate_headers(self, tenant: str) -> Mapping[str, str]:
        """Response headers with the rates a minute that hold for `tenant`; nothing without a limit."""
        limits = self.limits_of(tenant)
        rates = (
            ("x-ratelimit-limit-requests", limits.requests_per_minute),
            ("x-ratelimit-limit-tokens", limits.tokens_per_minute),
        )
        headers: dict[str, str] = {}
        for name, rate in rates:
            if rate is not None:
                headers[name] = f"{rate:g}" if rate % 1 else str(int(rate))
        return headers
