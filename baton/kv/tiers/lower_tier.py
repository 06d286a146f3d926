"""What a scheduler asks of a tier below the pool. `baton.engine.tiers` has the implementation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.domain.ids import PageKey
from baton.kv.events.event import PageContents, no_contents
from baton.kv.quarantine import Quarantine


@dataclass(slots=True)
class TierUse:
    """What a waiting prompt does with the tiers. `keys`, `contents`: of its full pages that may be matched.

    `gave_up`: names of the tiers that it expects nothing of.
    """

    keys: Sequence[PageKey]
    contents: PageContents = no_contents
    waits_since: float | None = None
    gave_up: set[str] = field(default_factory=set)


class LowerTier(Protocol):
    """Reads pages into the prefix cache and writes copies of cached ones. Engine thread only."""

    def poll(self, quarantine: Quarantine, now: float) -> None:
        """Takes what has ended since the last turn, and drops copies of quarantined pages."""
        ...

    def prefetch(self, waiting: Iterable[TierUse], now: float) -> None:
        """Starts to read what `waiting` prompts, next first, lack in the prefix cache."""
        ...

    def must_wait(self, use: TierUse, now: float) -> bool:
        """True while the next prompt gets pages sooner from the tier than by computing them."""
        ...

    def on_admitted(self, keys: Sequence[PageKey]) -> Mapping[str, int]:
        """Counts a request that matched `keys`; returns how many of them a tier had read and no other has used.

        By the tier's name, without those that have none.
        """
        ...

    def on_filled(self, keys: Sequence[PageKey], num_matched: int) -> None:
        """Tells that the cached pages of a chain are filled; those after the first `num_matched` were computed."""
        ...

    def on_evict(self, key: PageKey) -> None:
        """Tells that a cached page, which still has its bytes, is evicted now. Changes nothing in the cache."""
        ...

    def next_wakeup(self) -> float | None:
        """Time of the next deadline of a read, or from when on there is more to read."""
        ...
