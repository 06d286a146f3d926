"""Pages that rows have filled, between the step that filled them and their digests. Owned by a scheduler.

A page enters the prefix cache with its digest only, and the digests of a device's pages are computed beside the engine
thread. So the pages of a step wait here until the next step is committed. A row that ends before leaves its table here:
its pages are neither freed nor written while they are hashed, and enter the cache like those of a row that goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.domain.errors import Broken
from baton.domain.ids import PageId
from baton.engine.overlap.digest_thread import PageDigester, PendingDigests
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold
from baton.services.decode.kv_import import DecodeRow


@dataclass(slots=True, eq=False)
class UnsettledPages:
    """The pages of one row, filled up to the position `end`. `is_ruined`: they must not be cached."""

    row: DecodeRow
    table: PageTable
    pages: Sequence[PageId]
    end: int
    has_ended: bool = False
    is_ruined: bool = False

    def take_table(self, page_size: int) -> None:
        """Keeps the table of a row that ends, which gets an empty one to release."""
        self.has_ended = True
        self.row.table = PageTable(self.table.cache, page_size, self.table.salt, Hold.LIVE)

    def cache(self) -> None:
        """Enters the row's full pages, which have settled, into the prefix cache."""
        if not self.is_ruined:
            self.table.cache_full_pages(self.row.tokens, self.end)


class UnsettledRows:
    """Rows with pages that one step has filled and whose digests are being computed."""

    def __init__(self, digester: PageDigester) -> None:
        self._digester = digester
        self._rows: dict[int, UnsettledPages] = {}  # by arrival number
        self._digests: PendingDigests | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[UnsettledPages]:
        return iter(self._rows.values())

    def find(self, row: DecodeRow) -> UnsettledPages | None:
        """What waits of `row`."""
        return self._rows.get(row.arrival_number)

    def begin(self, filled: Sequence[UnsettledPages]) -> None:
        """Has the pages of a step digested, whose bytes are final. Raises `Broken` before those of the last one are."""
        if self._rows:
            raise Broken("pages of a step were filled before those of the last one had digests")
        if filled:
            self._rows = {one.row.arrival_number: one for one in filled}
            self._digests = self._digester.start([page for one in filled for page in one.pages])

    def take(self) -> list[UnsettledPages]:
        """Waits for the digests, keeps them, and forgets the rows, which it returns in the order of `begin`."""
        if self._digests is None:
            return []
        digests, taken = self._digests.wait(), list(self._rows.values())
        found = dict(zip([page for one in taken for page in one.pages], digests, strict=True))
        self._rows, self._digests = {}, None
        for one in taken:
            kept = one.table.cache.pool.digests
            for page in [] if one.is_ruined else kept.unsettled(one.pages):
                kept.set(page, found[page])
        return taken
