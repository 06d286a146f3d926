"""Evidence: what proves the bytes of one landing's pages. Pure; kept by `landing`, asked by `arrivals`.

Three proofs, see `docs/protocol.md`: the source says that its pins were held (V1), every read was over inside a lease
that the source granted (V2), every page matched its digest (V3). V2 and V3 speak for single pages, so they also say
what may be kept of a landing that failed; V1 speaks for a whole landing and is not recorded here.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.domain.ids import PageId


class Proof(enum.Enum):
    """By what a landing was validated. The values are those of `baton_commit`'s label."""

    PINS = "v1"
    LEASE = "v2"
    DIGESTS = "v3"


@dataclass(slots=True)
class Evidence:
    """Reads that ended and the lease they may be held against, on this worker's own clock."""

    lease_ends_at: float | None = None
    _matched: set[PageId] = field(default_factory=set)
    _read_at: dict[PageId, float] = field(default_factory=dict)

    def read(self, pages: Iterable[PageId], now: float, matched: bool) -> None:
        """Reads into `pages` (of our pool) are over, at `now` at the latest; `matched`: so did their digests."""
        for page in pages:
            self._read_at[page] = now
            if matched:
                self._matched.add(page)

    def renewed(self, lease_ends_at: float) -> None:
        """The source holds its pins until then, whatever happens. Messages may overtake each other."""
        self.lease_ends_at = max(lease_ends_at, self.lease_ends_at or lease_ends_at)

    def proves(self, page: PageId) -> bool:
        """Whether what the page holds is what the source published (V3 or V2)."""
        return page in self._matched or self._within_lease(page)

    def _within_lease(self, page: PageId) -> bool:
        read_at = self._read_at.get(page)
        return read_at is not None and self.lease_ends_at is not None and read_at < self.lease_ends_at
