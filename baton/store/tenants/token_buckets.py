"""Token buckets by the generic cell rate algorithm (GCRA). Pure; the rules of `take_tokens.lua`.

A bucket is one time, in whole microseconds: when it will be full again. With seconds, a sum and its parts differ by a
rounding that grows with the clock, and a full bucket refused all that it has. Used by `MemoryTenantStore`, and by a
router whose store is away.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.store.tenants.tenant_store import PERIOD_S, RateTake


class TokenBuckets:
    """Buckets by name. A full one takes no memory."""

    def __init__(self) -> None:
        self._full_at: dict[str, int] = {}  # us

    def take(self, takes: Sequence[RateTake], now: float, *, overdraw: bool = False) -> float:
        """See `TenantStore.take`."""
        now_us, period_us, wait_us = _microseconds(now), _microseconds(PERIOD_S), 0
        full_at: list[int] = []
        for take in takes:
            cost_us = _microseconds(take.cost_s)
            full_at.append(max(now_us, max(now_us, self._full_at.get(take.bucket, now_us)) + cost_us))
            wait_us = max(wait_us, full_at[-1] - now_us - max(period_us, cost_us))
        if wait_us > 0 and not overdraw:
            return wait_us / 1e6
        for at, take in zip(full_at, takes, strict=True):
            self._full_at[take.bucket] = at
        for bucket in [bucket for bucket, at in self._full_at.items() if at <= now_us]:
            del self._full_at[bucket]
        return 0.0


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
