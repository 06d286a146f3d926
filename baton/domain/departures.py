"""Tells a worker that withdrew from one that was lost, by what readings of the registry show. Pure; used by the router.

A worker that withdraws is away soon after its last announcement. The record of one that was killed or cut off stays,
unchanged, until it expires. One whose id another incarnation has meanwhile was lost, unless it was draining: a
successor may replace a record before it expires.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.domain.ids import Incarnation
from baton.domain.worker import WorkerRecord, WorkerStatus


class Departures:
    """`ttl_s`: life of an announcement, of which a worker makes at least two in that time."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._latest: dict[Incarnation, tuple[WorkerRecord, float]] = {}  # with the time of its first reading
        self._withdrawn: dict[Incarnation, bool] = {}  # of those that are missing

    def observe(self, announced: Sequence[WorkerRecord], now: float) -> None:
        """Records one reading of the registry."""
        for record in announced:
            self._withdrawn.pop(record.incarnation, None)
            latest = self._latest.get(record.incarnation)
            if latest is None or latest[0].announcement != record.announcement:
                self._latest[record.incarnation] = (record, now)
        present = {record.incarnation for record in announced}
        holders = {record.id: record.incarnation for record in announced}
        for incarnation, (record, changed_at) in self._latest.items():
            if incarnation not in present and incarnation not in self._withdrawn:
                is_fresh = now - changed_at < self._ttl_s / 2
                self._withdrawn[incarnation] = is_fresh or record.status is WorkerStatus.DRAINING
            if holders.get(record.id, incarnation) != incarnation:
                self._withdrawn[incarnation] = record.status is WorkerStatus.DRAINING

    def has_withdrawn(self, incarnation: Incarnation) -> bool:
        """True for a missing process that left of its own accord."""
        return self._withdrawn.get(incarnation, False)

    def forget(self, incarnation: Incarnation) -> None:
        """Removes a process; idempotent."""
        self._latest.pop(incarnation, None)
        self._withdrawn.pop(incarnation, None)
