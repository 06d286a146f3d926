"""What a scheduler asks of a tier below the pool. `baton.engine.file_tier` has the implementation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.domain.ids import PageKey
from baton.kv.quarantine import Quarantine


@dataclass(slots=True)
class TierUse:
    """What a waiting prompt does with the tier. `keys`, `tokens`: of its full pages that may be matched."""

    keys: Sequence[PageKey]
    tokens: Sequence[int] = ()
    waits_since: float | None = None
    gave_up: bool = False

    def tokens_of(self, first: int, end: int) -> Sequence[int]:
        """Tokens of pages [first, end)."""
        size = len(self.tokens) // max(1, len(self.keys))
        return self.tokens[first * size : end * size]


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

    def on_admitted(self, keys: Sequence[PageKey]) -> int:
        """Counts a request that matched `keys`; returns how many of them the tier had read and no other has used."""
        ...

    def on_filled(self, keys: Sequence[PageKey], num_matched: int) -> None:
        """Tells that the cached pages of a chain are filled; those after the first `num_matched` were computed."""
        ...

    def next_wakeup(self) -> float | None:
        """Time of the next deadline of a read."""
        ...
