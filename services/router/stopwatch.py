"""Keeps a `Timeline` a sequence and counts how each ends: the router's latencies come from here. Built by `app`.

Listens to both halves of the router: to the upper one as its `observer.Observer`, to the lower one as its
`journey.Witness`. A sequence that was refused before it arrived has no timeline, only an end.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.domain.ids import RequestId
from baton.telemetry.metrics import REQUESTS_TOTAL
from baton.telemetry.timeline import Moment, Timeline, observe
from services.router.api.observer import Outcome


class Stopwatch:
    """Owned by one event loop. `clock` is the one that arrivals are given on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._timelines: dict[RequestId, Timeline] = {}

    @property
    def num_open(self) -> int:
        """Sequences that have arrived and not ended."""
        return len(self._timelines)

    def on_arrival(self, request_id: RequestId, arrived_s: float) -> None:
        """See `Observer`."""
        timeline = self._timelines[request_id] = Timeline(arrived_s)
        timeline.stamp(Moment.TOKENISED, self._clock())

    def on_moment(self, id: RequestId, moment: Moment) -> None:
        """See `Witness`."""
        if timeline := self._timelines.get(id):
            timeline.stamp(moment, self._clock())

    def on_retry(self, id: RequestId) -> None:
        """See `Witness`."""
        if timeline := self._timelines.get(id):
            timeline.retry(self._clock())

    def on_first_token(self, request_id: RequestId) -> None:
        """See `Observer`."""
        self.on_token(request_id)

    def on_token(self, request_id: RequestId) -> None:
        """See `Observer`."""
        if timeline := self._timelines.get(request_id):
            timeline.token(self._clock())

    def on_finish(self, request_id: RequestId, outcome: Outcome, code: str) -> None:
        """See `Observer`. Latencies are recorded of finished sequences only: an aborted one has no end to measure."""
        REQUESTS_TOTAL.labels(outcome.value, code).inc()
        timeline = self._timelines.pop(request_id, None)
        if timeline is not None and outcome is Outcome.FINISHED:
            timeline.finish(self._clock())
            observe(timeline)
