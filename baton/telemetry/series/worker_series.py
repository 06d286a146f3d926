"""Metrics of the workers that a router knows: how many there are, how many pairs are ready, which were lost.

Owned by the router's `WorkerSet`; one event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.domain.departures import Departures
from baton.domain.worker import WorkerRecord, WorkerRole, WorkerStatus
from baton.telemetry import metrics
from baton.telemetry.logs import get_logger

ABSENT = "absent"
"""Status of a worker that is not announced now, and not lost yet."""

log = get_logger()


class WorkerSeries:
    """Workers of one model. `ttl_s`: life of an announcement."""

    def __init__(self, model: str, ttl_s: float) -> None:
        self._model = model
        self._departures = Departures(ttl_s)

    def start(self) -> None:
        """Starts the counters at 0, so that `increase` sees the first loss."""
        for role in WorkerRole:
            metrics.WORKERS_LOST_TOTAL.labels(self._model, role.value)

    def observe(self, announced: Sequence[WorkerRecord], now: float) -> None:
        """Records one reading of the registry."""
        self._departures.observe(announced, now)

    def show(self, workers: Iterable[tuple[WorkerRecord, bool]], num_pairs: int) -> None:
        """Sets the gauges. `workers`: those that are not lost, with True for those that are announced."""
        statuses = (*(status.value for status in WorkerStatus), ABSENT)
        counts = {(role, status): 0 for role in WorkerRole for status in statuses}
        for record, is_announced in workers:
            counts[record.role, record.status.value if is_announced else ABSENT] += 1
        for (role, status), count in counts.items():
            metrics.WORKERS.labels(self._model, role.value, status).set(count)
        metrics.READY_PAIRS.labels(self._model).set(num_pairs)

    def remove(self, record: WorkerRecord) -> None:
        """Logs that a worker is gone, and counts it as lost if it did not withdraw."""
        if self._departures.has_withdrawn(record.incarnation):
            log.info("worker_left", worker=record.id, incarnation=record.incarnation)
        else:
            log.warning("worker_lost", worker=record.id, incarnation=record.incarnation)
            if record.model == self._model:
                metrics.WORKERS_LOST_TOTAL.labels(self._model, record.role.value).inc()
        self._departures.forget(record.incarnation)
