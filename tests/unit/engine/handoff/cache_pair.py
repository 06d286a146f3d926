"""A cache that gives pages and one that imports them, for tests of both sides."""

from __future__ import annotations

from baton.domain.ids import AttemptId, Incarnation, PageKey, RequestId, WorkerId
from baton.domain.worker import WorkerRole
from baton.engine.handoff.cached_exports import CachedExports, ExportLimits
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.handoff.page_source import PageSource
from baton.kv.keys import page_keys
from baton.kv.page_checks import PageChecks
from tests.property.machines.page_sharing_machine import PAGE_SIZE, Cache

SOURCE = WorkerId("decode-0")
TOKENS = list(range(14))
KEYS: list[PageKey] = page_keys(TOKENS, PAGE_SIZE, "")


def attempt(name: str, number: int = 1) -> AttemptId:
    return AttemptId(RequestId(name), number)


def page_source(num_pages: int) -> PageSource:
    return PageSource(SOURCE, Incarnation(1), WorkerRole.DECODE, num_pages, 1e6)


class Giver(Cache):
    """`num_counted_on`: available pages that reservations and rows count on."""

    def __init__(self, max_pages: int = 8, num_window_slots: int | None = None) -> None:
        super().__init__(num_window_slots)
        self.num_counted_on = 0
        self.exports = ExportTable(self.cache.pool, 5.0)
        limits = ExportLimits(max_pages, lambda: self.cache.num_available - self.num_counted_on)
        self.cached = CachedExports(self.cache, self.exports, PageChecks(self.cache), limits)
