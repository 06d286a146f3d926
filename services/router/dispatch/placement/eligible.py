"""The workers that take requests now. Owned by `workers`; pure, time is an argument."""

from __future__ import annotations

from collections.abc import Mapping

from baton.domain.ids import Incarnation
from baton.domain.liveness import Liveness
from baton.domain.worker import WorkerRecord
from baton.services.router.dispatch.placement.pair import placeable
from baton.services.router.dispatch.placement.worker_filter import WorkerFilter


class EligibleWorkers:
    """Those of `records` that are present, of this router's model, ready and not stuck in a step.

    Each request asks several times, and the answer changes with a reading of the registry. So it is kept until
    `changed`, unless time alone may end the presence of a worker: one that is not announced has a grace period.
    """

    def __init__(
        self,
        records: Mapping[Incarnation, WorkerRecord],
        liveness: Liveness,
        worker_filter: WorkerFilter,
        max_step_age_s: float,
    ) -> None:
        """Reads `records` and `liveness` whenever it is asked. The owner calls `changed` after it has changed them."""
        self._records = records
        self._liveness = liveness
        self._filter = worker_filter
        self._max_step_age_s = max_step_age_s
        self._kept: list[WorkerRecord] | None = None

    def changed(self) -> None:
        """Records, or what is known of their presence, may be others now."""
        self._kept = None

    def all(self, now: float) -> list[WorkerRecord]:
        """The workers, in the order of `records`. Do not change the list."""
        if self._kept is not None:
            return self._kept
        found = [record for record in self._records.values() if self._takes(record, now)]
        if all(map(self._liveness.is_announced, self._records)):
            self._kept = found
        return found

    def _takes(self, record: WorkerRecord, now: float) -> bool:
        is_present = self._liveness.is_present(record.incarnation, now)
        return is_present and self._filter.serves(record) and placeable(record, self._max_step_age_s)
