"""Rows that go back to the router: why, and what is done for their next attempt. Pure; time is an argument.

The next attempt starts on other workers. Its prefill worker asks this one for the pages that the row has left in the
prefix cache (`baton.engine.handoff.page_imports`). Until then preempted rows do not come back into those pages. Rows
that grow take them all the same: an attempt that lacks pages computes them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton.domain.ids import AttemptId, PageKey, RequestId
from baton.kv.prefix_cache import PrefixCache
from baton.services.decode.kv_import import DecodeRow

KEEP_S = 1.0
"""Time for the next attempt to ask. One that finds room elsewhere at once asks within a round trip or two."""


class SendBackReason(enum.StrEnum):
    """Why a row was sent back to the router."""

    NO_MEMORY = "no_memory"
    DAMAGED_COPY = "damaged_copy"


@dataclass(frozen=True, slots=True)
class _KeptPages:
    """Cached pages of one row; all but the first `num_shared` were its own."""

    cache: PrefixCache
    keys: tuple[PageKey, ...]
    num_shared: int
    until: float

    @property
    def num_pages(self) -> int:
        return max(0, self.cache.num_matching(self.keys) - self.num_shared)


class SentBackPages:
    """Pages that wait for the next attempts of rows that were sent back. Owned by a scheduler."""

    def __init__(self) -> None:
        self._kept: dict[RequestId, _KeptPages] = {}
        self.num_given = 0
        """Rows whose pages were asked for in time."""

    def keep(self, row: DecodeRow, now: float) -> None:
        """Caches the full pages of a row that is about to release them, and keeps those that an export can give.

        Those are the leading ones with all their parts: none if the first one is windowless. Forgets the pages of rows
        that waited in vain.
        """
        self._kept = {id: one for id, one in self._kept.items() if now < one.until}
        table = row.table
        table.cache_full_pages(row.tokens, row.num_filled)  # those of a row that came back are not cached yet
        num_whole = table.cache.num_givable(table.pages[: len(table.cached_keys)])
        keys = tuple(table.cached_keys[:num_whole])
        num_shared = len(keys) - table.cache.pool.num_held_once(table.pages[: len(keys)])
        if num_shared < len(keys):
            self._kept[row.request.id.request_id] = _KeptPages(table.cache, keys, num_shared, now + KEEP_S)

    def num_pages(self, now: float) -> int:
        """Pages that are kept: cached, and held by nothing."""
        self._kept = {id: one for id, one in self._kept.items() if now < one.until}
        return sum(one.num_pages for one in self._kept.values())

    def is_next_attempt(self, id: AttemptId, now: float) -> bool:
        """True if the pages of an earlier attempt of the same request are kept for `id`."""
        kept = self._kept.get(id.request_id)
        return kept is not None and now < kept.until

    def on_given(self, id: AttemptId) -> None:
        """The pages are pinned for `id`, or are not wanted."""
        self.num_given += self._kept.pop(id.request_id, None) is not None
