"""The steps of a prefill loop that were started and are not committed. Owned by the engine thread.

A step's pages get their digests before it is committed, in another thread if there is a `PageDigester`: while those of
step n are computed, n+1 runs and n+2 is started behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.domain.errors import Broken
from baton.domain.ids import PageId
from baton.engine.batch import Batch, StepInFlight, StepOutput
from baton.engine.overlap.digest_thread import PageDigester, PendingDigests
from baton.engine.overlap.started_step import StartedStep
from baton.engine.step_metrics import StepMetrics, monotonic_s
from baton.services.prefill.overlap.scheduler import OverlapPrefillScheduler
from baton.services.prefill.scheduler import PrefillEffect


@dataclass(frozen=True, slots=True)
class _FinishedStep:
    """A step that has run, and the pages whose digests it waits for."""

    batch: Batch
    output: StepOutput
    pages: Sequence[PageId]
    digests: PendingDigests


class StepQueue:
    """Steps of an asynchronous runner in the order of their start."""

    def __init__(
        self,
        scheduler: OverlapPrefillScheduler,
        start: Callable[[Batch], StepInFlight],
        metrics: StepMetrics,
        digester: PageDigester | None = None,
    ) -> None:
        """`start` returns before the step is done, and the device runs steps in their order.

        `digester` None: pages are hashed in the engine thread, or not at all.
        """
        self._scheduler = scheduler
        self._start = start
        self._metrics = metrics
        self._digester = digester
        self._running: deque[StartedStep] = deque()
        self._finished: _FinishedStep | None = None
        self._result_at = 0.0  # when the last result was taken

    def __len__(self) -> int:
        return len(self._running) + (self._finished is not None)

    @property
    def num_running(self) -> int:
        """Steps whose results were not taken."""
        return len(self._running)

    def start(self, batch: Batch) -> None:
        """Starts the batch that was scheduled last, perhaps without some of its rows."""
        started_at = self._metrics.step_started_at = monotonic_s()
        self._running.append(StartedStep(batch, self._start(batch), started_at))
        self._scheduler.on_started(batch)

    def settle(self) -> list[PrefillEffect]:
        """Waits for the digests of the step that has run and commits it; nothing without one."""
        if self._finished is None:
            return []
        finished, self._finished = self._finished, None
        if not self._running:
            self._metrics.step_started_at = monotonic_s()  # a wait that does not end shows as a step that does not
        digests = dict(zip(finished.pages, finished.digests.wait(), strict=True))
        if not self._running:
            self._metrics.step_started_at = None
        self._scheduler.keep_digests(finished.batch, digests)
        return self._scheduler.commit(finished.batch, finished.output, monotonic_s())

    def take(self) -> list[PrefillEffect]:
        """Waits for the oldest step that was started, if any, and commits it, or has its pages digested first.

        Raises `Broken` if the one before waits for its digests: the caller calls `settle` first.
        """
        if self._finished is not None:
            raise Broken("steps are committed in the order of their start")
        if not self._running:
            return []
        asked_at, started = monotonic_s(), self._running.popleft()
        output = started.step.result()
        now, since = monotonic_s(), max(started.started_at, self._result_at)
        self._result_at = now
        self._metrics.observe_overlapped(started.batch, now - since, now - asked_at)
        if not self._running:
            self._metrics.step_started_at = None
        if self._digester is None:
            return self._scheduler.commit(started.batch, output, now)
        pages = self._scheduler.filled_pages(started.batch)
        self._finished = _FinishedStep(started.batch, output, pages, self._digester.start(pages))
        return []
