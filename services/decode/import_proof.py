"""ImportProof: what proves the bytes of one import's pages. Pure; kept by `kv_import`, asked by `import_policy`.

Three proofs, see `docs/protocol.md`: the source says that its pins were held (V1), every read was over inside a lease
that the source granted (V2), every page matched its digest (V3). V2 and V3 speak for single pages, so they also say
what may be kept of an import that failed; V1 speaks for a whole import and is not recorded here.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.domain.ids import PageId


class ProofKind(enum.Enum):
    """By what an import was validated. The values are those of `baton_commit`'s label."""

    PINS = "v1"
    LEASE = "v2"
    DIGESTS = "v3"


@dataclass(slots=True)
class ImportProof:
    """Reads that ended and the lease they may be held against, on this worker's own clock."""

    lease_ends_at: float | None = None
    _matched: set[PageId] = field(default_factory=set)
    _read_at: dict[PageId, float] = field(default_factory=dict)

    def record_read(self, pages: Iterable[PageId], now: float, matched: bool) -> None:
        """Reads into `pages` (of our pool) are over, at `now` at the latest; `matched`: so did their digests."""
        for page in pages:
            self._read_at[page] = now
            if matched:
                self._matched.add(page)

    def extend_lease(self, lease_ends_at: float) -> None:
        """The source holds its pins until then, whatever happens. Messages may overtake each other."""
        self.lease_ends_at = max(lease_ends_at, self.lease_ends_at or lease_ends_at)

    def covers(self, page: PageId) -> bool:
        """Whether what the page holds is what the source published (V3 or V2)."""
        return page in self._matched or self._within_lease(page)

    def _within_lease(self, page: PageId) -> bool:
        read_at = self._read_at.get(page)
        return read_at is not None and self.lease_ends_at is not None and read_at < self.lease_ends_at
