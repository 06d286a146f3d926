"""Tiers below a pool, the fastest first, as one. Each reads on from where the cache and those above it end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from baton.domain.ids import PageKey
from baton.kv.quarantine import Quarantine
from baton.kv.tiers.lower_tier import LowerTier, TierUse


class TierStack:
    """A `LowerTier` of several."""

    def __init__(self, tiers: Sequence[LowerTier]) -> None:
        self._tiers = tuple(tiers)

    def poll(self, quarantine: Quarantine, now: float) -> None:
        """See `LowerTier`."""
        for tier in self._tiers:
            tier.poll(quarantine, now)

    def prefetch(self, waiting: Iterable[TierUse], now: float) -> None:
        """See `LowerTier`."""
        uses = list(waiting)
        for tier in self._tiers:
            tier.prefetch(uses, now)

    def must_wait(self, use: TierUse, now: float) -> bool:
        """See `LowerTier`."""
        return any([tier.must_wait(use, now) for tier in self._tiers])  # each counts how long

    def on_admitted(self, keys: Sequence[PageKey]) -> Mapping[str, int]:
        """See `LowerTier`."""
        return {name: num for tier in self._tiers for name, num in tier.on_admitted(keys).items()}

    def on_filled(self, keys: Sequence[PageKey], num_matched: int) -> None:
        """See `LowerTier`."""
        for tier in self._tiers:
            tier.on_filled(keys, num_matched)

    def on_evict(self, key: PageKey) -> None:
        """See `LowerTier`."""
        for tier in self._tiers:
            tier.on_evict(key)

    def next_wakeup(self) -> float | None:
        """See `LowerTier`."""
        times = [tier.next_wakeup() for tier in self._tiers]
        return min((time for time in times if time is not None), default=None)
