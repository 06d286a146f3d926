"""Proof that the pages of one import hold what the source published. Pure; kept by `kv_import`.

There are three proofs, see `docs/protocol.md`. V1: the source answers that its pins were held. V2: each read ended
within a granted lease. V3: each page matches its digest. V2 and V3 hold per page, so they also decide which pages of
a failed import may stay cached. V1 holds for a whole import and is not recorded here.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.domain.ids import PageId


class ProofKind(enum.Enum):
    """Proof by which an import was validated; the label of `baton_commit`."""

    PINS = "v1"
    LEASE = "v2"
    DIGESTS = "v3"


@dataclass(slots=True)
class ImportProof:
    """Reads that ended, and the end of the lease, on this worker's clock."""

    lease_ends_at: float | None = None
    _matched: set[PageId] = field(default_factory=set)
    _read_at: dict[PageId, float] = field(default_factory=dict)

    def record_read(self, pages: Iterable[PageId], now: float, matched: bool) -> None:
        """Records reads into local `pages` that ended at `now` at the latest. `matched`: their digests matched."""
        for page in pages:
            self._read_at[page] = now
            if matched:
                self._matched.add(page)

    def extend_lease(self, lease_ends_at: float) -> None:
        """Extends the lease. An older answer that arrives late does not shorten it."""
        self.lease_ends_at = max(lease_ends_at, self.lease_ends_at or lease_ends_at)

    def covers(self, page: PageId) -> bool:
        """True if a digest (V3) or a lease (V2) proves the page."""
        return page in self._matched or self._within_lease(page)

    def _within_lease(self, page: PageId) -> bool:
        read_at = self._read_at.get(page)
        return read_at is not None and self.lease_ends_at is not None and read_at < self.lease_ends_at
