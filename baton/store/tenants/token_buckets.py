"""Token buckets by the generic cell rate algorithm (GCRA). Pure; the rules of `take_tokens.lua`.

A bucket is one time: when it will be full again. Used by `MemoryTenantStore`, and by a router whose store is away.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.store.tenants.tenant_store import PERIOD_S, RateTake


class TokenBuckets:
    """Buckets by name. A full one takes no memory."""

    def __init__(self) -> None:
        self._full_at: dict[str, float] = {}

    def take(self, takes: Sequence[RateTake], now: float, *, overdraw: bool = False) -> float:
        """See `TenantStore.take`."""
        full_at = [max(now, max(now, self._full_at.get(take.bucket, now)) + take.cost_s) for take in takes]
        wait_s = max(
            (at - now - max(PERIOD_S, take.cost_s) for at, take in zip(full_at, takes, strict=True)), default=0.0
        )
        if wait_s > 0 and not overdraw:
            return wait_s
        for at, take in zip(full_at, takes, strict=True):
            self._full_at[take.bucket] = at
        for bucket in [bucket for bucket, at in self._full_at.items() if at <= now]:
            del self._full_at[bucket]
        return 0.0
