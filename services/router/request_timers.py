"""Keeps a `MilestoneTimer` a sequence and counts how each ends: the router's latencies come from here. Built by `app`.

Listens to both halves of the router: to the upper one as its `timing_sink.TimingSink`, to the lower one as its
`tracked_request.MilestoneSink`. A sequence that was refused before it arrived has no timer, only an end.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.domain.ids import RequestId
from baton.telemetry.metrics import REQUESTS_TOTAL
from baton.telemetry.milestones import Milestone, MilestoneTimer, record_latencies
from services.router.streaming.request_timing import SequenceOutcome


class RequestTimers:
    """Owned by one event loop. `clock` is the one that arrivals are given on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._timers: dict[RequestId, MilestoneTimer] = {}

    @property
    def num_open(self) -> int:
        """Sequences that have arrived and not ended."""
        return len(self._timers)

    def on_arrival(self, request_id: RequestId, arrived_s: float) -> None:
        """See `TimingSink`."""
        timer = self._timers[request_id] = MilestoneTimer(arrived_s)
        timer.stamp(Milestone.TOKENISED, self._clock())

    def on_milestone(self, id: RequestId, milestone: Milestone) -> None:
        """See `TimingSink`."""
        if timer := self._timers.get(id):
            timer.stamp(milestone, self._clock())

    def on_retry(self, id: RequestId) -> None:
        """See `TimingSink`."""
        if timer := self._timers.get(id):
            timer.on_retry(self._clock())

    def on_first_token(self, request_id: RequestId) -> None:
        """See `TimingSink`."""
        self.on_token(request_id)

    def on_token(self, request_id: RequestId) -> None:
        """See `TimingSink`."""
        if timer := self._timers.get(request_id):
            timer.on_token(self._clock())

    def on_finish(self, request_id: RequestId, outcome: SequenceOutcome, code: str) -> None:
        """See `TimingSink`. Latencies are recorded of finished sequences only: an aborted one has no end to measure."""
        REQUESTS_TOTAL.labels(outcome.value, code).inc()
        timer = self._timers.pop(request_id, None)
        if timer is not None and outcome is SequenceOutcome.FINISHED:
            timer.finish(self._clock())
            record_latencies(timer)
