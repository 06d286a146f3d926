"""Pages of the pool whose bytes are not what they settled with, and the attempts that used them. Pure.

Matched pages of a reservation are checked in later turns, `CHECK_BYTES` a turn. `PageScrub` checks idle pages. A wrong
page is quarantined with everything computed from it. A linked prefill worker's quarantined keys are taken out here as
well: decode may hold children that were computed from the wrong page, with good digests. The import policy ends the
attempts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from baton.domain.ids import AttemptId, PageId, PageKey, WorkerId
from baton.kv.keys import page_keys
from baton.kv.page_checks import PageChecks
from baton.kv.prefix_cache import PrefixCache
from baton.kv.quarantine import Quarantine
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import KvImport
from baton.services.decode.scheduler import DecodeScheduler

CHECK_BYTES = 16 * 1024 * 1024
"""Matched pages that one turn checks: about 1 ms."""


@dataclass(frozen=True, slots=True)
class CheckedAttempts:
    """Attempts whose last matched page was checked, and attempts that hold a wrong page or its descendants."""

    ready: list[AttemptId] = field(default_factory=list)
    ruined: list[AttemptId] = field(default_factory=list)


class PageFaults:
    """Checks of one decode worker's pool. Owned by the engine thread."""

    def __init__(
        self,
        cache: PrefixCache,
        imports: ImportTable,
        scheduler: DecodeScheduler,
        checks: PageChecks,
        page_size: int,
        page_bytes: int,
    ) -> None:
        self._cache = cache
        self._imports = imports
        self._scheduler = scheduler
        self._checks = checks
        self._page_size = page_size
        self._max_pages = max(1, CHECK_BYTES // page_bytes)
        self._waiting: deque[AttemptId] = deque()  # imports with unchecked pages, in order of reservation
        self.quarantine = Quarantine(cache)

    def on_reserved(self, id: AttemptId) -> None:
        """Queues the matched pages of a reservation. The import is not ready before all of them were checked."""
        kv_import = self._imports.get(id)
        if kv_import is not None and not kv_import.checks_queued:
            kv_import.checks_queued = True
            kv_import.unchecked = self._checks.select(kv_import.table.pages)
            if kv_import.unchecked:
                self._waiting.append(id)

    def check(self, now: float) -> CheckedAttempts:
        """Checks one turn's share of matched pages."""
        num_left, ready = self._max_pages, []
        wrong: dict[PageId, None] = {}  # two imports may share a page
        while self._waiting and num_left > 0:
            kv_import = self._imports.get(self._waiting[0])
            if kv_import is not None:
                part, kv_import.unchecked = kv_import.unchecked[:num_left], kv_import.unchecked[num_left:]
                num_left -= len(part)
                wrong |= dict.fromkeys(self._checks.mismatches(part))
                if kv_import.unchecked:
                    break
                ready.append(kv_import.id)
            self._waiting.popleft()
        return CheckedAttempts(ready, self.take_out(list(wrong), now))

    def check_at_once(self, id: AttemptId, now: float) -> list[AttemptId]:
        """Checks all matched pages of one reservation, whose prompt starts here. Returns the ruined attempts."""
        kv_import = self._imports.get(id)
        if kv_import is None:
            return []
        pages, kv_import.unchecked = kv_import.unchecked, []
        return self.take_out(self._checks.mismatches(pages), now)

    def on_keys_quarantined(self, source: WorkerId, keys: Collection[PageKey]) -> list[AttemptId]:
        """Takes out what a source quarantined. Returns the ruined attempts.

        Pages of an import in progress, of a preempted row and of one that came back are not cached, so their tokens'
        keys decide. An import from another source is not touched, unless it holds a page that was taken out.
        """
        self.quarantine.add_keys(keys)
        return self._ruined(frozenset(keys), source)

    @property
    def is_waiting(self) -> bool:
        """True if the next turn has pages to check."""
        return bool(self._waiting)

    def take_out(self, wrong: Sequence[PageId], now: float) -> list[AttemptId]:
        """Quarantines pages that differ from their digests. Returns the ruined attempts."""
        if not wrong:
            return []
        self.quarantine.add_pages(wrong, now)
        return self._ruined()

    def _ruined(self, keys: frozenset[PageKey] = frozenset(), source: WorkerId | None = None) -> list[AttemptId]:
        ruined: list[AttemptId] = []
        for one in [one for id in self._imports.ids() if (one := self._imports.get(id)) is not None]:
            first = self._first_wrong(one, keys, source)
            for page in [] if first is None else one.table.pages[first:]:
                self._cache.pool.condemn(page)  # else its proven pages would enter the cache when it ends
            if first is not None or one.table.holds_condemned():
                ruined.append(one.id)
        return ruined + self._scheduler.ruined_ids(keys)

    def _first_wrong(self, kv_import: KvImport, keys: frozenset[PageKey], source: WorkerId | None) -> int | None:
        """Index of the first page of an import from `source` that has one of `keys`; None if it has none."""
        request = kv_import.request
        if request is None or source is None or kv_import.source != source:
            return None
        own = page_keys(request.tokens, self._page_size, request.salt, request.media)
        return next((index for index, key in enumerate(own) if key in keys), None)
