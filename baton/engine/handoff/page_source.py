"""The worker that a prompt's leading pages may come from, and what importing them should cost. Pure.

Import pays if it should take less than `PAYS_SHARE` of the time to compute the same tokens. Its time: the source's
answers lately, and bytes by the link's bandwidth, which begins with the probe's and follows the reads. Without a
prediction of the computation it is taken to pay: moving KV is far cheaper than computing it on every machine measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.worker import WorkerRole
from baton.settings.choices import PageSharingKind

PAYS_SHARE = 0.8
MAX_WAIT_S = 2.0
"""Longest time that a prompt waits for pages of another worker."""
MIN_WAIT_S = 0.05
LATE_FACTOR = 1.5
"""An import is given up when it takes this many times its estimate, and computing would have taken no longer."""
REST_S = 10.0
"""Time for which a source is not asked after an import from it failed."""
MIN_IMPORT_PAGES = 2
"""Pages worth asking for. One is computed sooner than the answer comes."""
_NEWEST_SHARE = 0.3
"""Weight of the newest sample in a moving average."""


@dataclass(frozen=True, slots=True)
class PageSource:
    """A linked worker that has the first `num_pages` pages of a prompt. `bandwidth`: of the link, as probed, in B/s."""

    worker_id: WorkerId
    incarnation: Incarnation
    role: WorkerRole
    num_pages: int
    bandwidth: float


@dataclass(slots=True)
class _SourceProfile:
    """What one source's imports cost lately. `answer_s`: from the question to the announced pages."""

    bandwidth: float
    answer_s: float = 0.0
    rests_until: float = float("-inf")


class ImportCostModel:
    """Predicts the cost of imports. Time is an argument."""

    def __init__(self, policy: PageSharingKind, page_bytes: int, compute_s: Callable[[int, int], float]) -> None:
        """`compute_s(num_pages, first)`: predicted seconds to compute pages after the first `first`; 0.0: unknown."""
        self._policy = policy
        self._page_bytes = page_bytes
        self._compute_s = compute_s
        self._sources: dict[WorkerId, _SourceProfile] = {}

    def wait_s(self, source: PageSource, num_pages: int, first: int, now: float) -> float | None:
        """Longest wait for `num_pages` pages after the first `first`; None if they should be computed."""
        costs = self._sources.setdefault(source.worker_id, _SourceProfile(source.bandwidth))
        if self._policy is PageSharingKind.OFF or num_pages < MIN_IMPORT_PAGES or now < costs.rests_until:
            return None
        if self._policy is PageSharingKind.ALWAYS:
            return MAX_WAIT_S
        compute_s = self._compute_s(num_pages, first)
        import_s = costs.answer_s + (num_pages * self._page_bytes / costs.bandwidth if costs.bandwidth > 0 else 0.0)
        if not compute_s:
            return MAX_WAIT_S
        if import_s >= PAYS_SHARE * compute_s:
            return None
        return min(MAX_WAIT_S, max(MIN_WAIT_S, LATE_FACTOR * import_s, PAYS_SHARE * compute_s))

    def on_answer(self, source: WorkerId, seconds: float) -> None:
        """A source has announced its pages after `seconds`."""
        costs = self._sources[source]
        costs.answer_s += _NEWEST_SHARE * (seconds - costs.answer_s)

    def on_read(self, source: WorkerId, num_bytes: int, seconds: float) -> None:
        """A read of `num_bytes` has ended well after `seconds`."""
        costs = self._sources[source]
        if seconds > 0 and num_bytes:
            costs.bandwidth += _NEWEST_SHARE * (num_bytes / seconds - costs.bandwidth)

    def on_failure(self, source: WorkerId, now: float) -> None:
        """An import failed at its source or its link: the source rests."""
        self._sources[source].rests_until = now + REST_S
