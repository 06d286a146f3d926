"""Scrubs an engine's pages beside its turns, counts checks and faults, and reports a worker whose memory is unfit.

Owned by the engine thread. The loop quarantines what `run` returns; the rules are those of `baton.kv`.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.domain.ids import PageId
from baton.kv.page_checks import PageChecks, Scrubber
from baton.kv.quarantine import MAX_INCIDENTS, Quarantine
from baton.telemetry import metrics
from baton.telemetry.logs import get_logger

log = get_logger()


class PageScrub:
    """Checks of one engine's idle pages. Calls `on_unfit` once; it must be thread-safe."""

    def __init__(self, checks: PageChecks, page_bytes: int, on_unfit: Callable[[], None] = lambda: None) -> None:
        self._checks = checks
        self._scrubber = Scrubber(checks, page_bytes)
        self._on_unfit = on_unfit
        self._unfit = False
        self._num_checked = self._num_faults = self._num_quarantined = 0

    def next_wakeup(self, other: float | None, now: float) -> float | None:
        """The earlier of the time of the next slice and `other`."""
        at = self._scrubber.next_slice_at(now)
        return min((time for time in (at, other) if time is not None), default=None)

    def run(self, now: float, *, busy: bool) -> list[PageId]:
        """Checks a slice of pages if one is due; returns those that differ from their digests.

        Also returns the damaged ones that the prefix cache met in this turn.
        """
        found = self._checks.take_wrong()
        return found + [page for page in self._scrubber.run_slice(now, busy=busy) if page not in found]

    def report(self, quarantine: Quarantine, now: float) -> None:
        """Updates the metrics. New faults are logged, and make the scrubber look for more; reports an unfit worker."""
        if num_checked := self._checks.num_checked - self._num_checked:
            metrics.PAGE_CHECKS_TOTAL.inc(num_checked)
            self._num_checked += num_checked
        num_new = quarantine.num_faults - self._num_faults
        num_pages = quarantine.num_pages - self._num_quarantined
        if not num_new and not num_pages:
            return
        metrics.INTEGRITY_FAILURES_TOTAL.labels("pool_page").inc(num_new)
        metrics.QUARANTINED_PAGES_TOTAL.inc(num_pages)
        self._num_faults, self._num_quarantined = quarantine.num_faults, quarantine.num_pages
        if num_new:
            self._scrubber.hurry()
            log.error("pages_wrong", pages=num_new, quarantined=num_pages, total=quarantine.num_faults)
        if quarantine.is_unfit(now) and not self._unfit:
            self._unfit = True
            log.error(
                "memory_unfit", incidents=MAX_INCIDENTS, hint="Check the machine's memory; this worker drains and ends."
            )
            self._on_unfit()
