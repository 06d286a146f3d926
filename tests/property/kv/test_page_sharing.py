"""Page sharing between two caches: no wrong page, no leak and no wait beyond its bound, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from baton.domain.errors import Broken
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, PageKey
from baton.engine.handoff.cached_exports import CachedExports
from baton.engine.handoff.page_imports import PageImport, PageImports
from baton.transfer.base import PullEvent
from tests.property.machines.page_sharing_machine import PageSharingMachine
from tests.tiny_workers import PLANTED_BUG_SETTINGS, REPEATABLE_SETTINGS


def test_page_sharing():
    run_state_machine_as_test(PageSharingMachine, settings=REPEATABLE_SETTINGS)


class AdoptsUnprovenPages(PageImports):
    """Enters pages into the cache that no digest has proven."""

    def _enter(self, one: PageImport) -> None:
        one.proven |= set(one.pages)
        super()._enter(one)


class FreesPagesUnderReads(PageImports):
    """Releases the pages of a read in flight when an import ends."""

    def _end(self, one: PageImport, effect: object = None) -> None:
        one.in_flight.clear()
        super()._end(one, effect)  # type: ignore[arg-type]


class WaitsForEver(PageImports):
    """Knows no deadline."""

    def expire(self, now: float) -> None:
        pass


class ForgetsTheLease(CachedExports):
    """Never ends an export that nobody commits."""

    def open(self, id: AttemptId, keys: list[PageKey], first_page: int, now: float) -> PublishedChunk:  # type: ignore[override]
        return super().open(id, keys, first_page, now + 1e9)


class ForgetsReads(PageImports):
    """Loses count of a read that ends after its import."""

    def on_pull_event(self, event: PullEvent, now: float) -> None:
        if event.pull.id in self._by_pull and self._by_pull[event.pull.id].is_over:
            self._by_pull.pop(event.pull.id)
        super().on_pull_event(event, now)


@pytest.mark.parametrize(
    ("attribute", "planted"),
    [
        ("page_imports", AdoptsUnprovenPages),
        ("page_imports", FreesPagesUnderReads),
        ("page_imports", WaitsForEver),
        ("page_imports", ForgetsReads),
        ("cached_exports", ForgetsTheLease),
    ],
)
def test_a_planted_bug_is_found(attribute: str, planted: type[object]):
    machine = type("Planted", (PageSharingMachine,), {attribute: planted})
    with pytest.raises((AssertionError, Broken, KeyError)):
        run_state_machine_as_test(machine, settings=PLANTED_BUG_SETTINGS)
