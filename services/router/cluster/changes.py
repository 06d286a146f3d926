"""Finds what changed between two readings of the registry, and remembers workers that left. Pure.

not known -> joined -> draining -> left
               |`---> lost: it was not draining
               `---> restarted: another process has the id
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.worker import LinkRecord, WorkerRecord, WorkerStatus
from baton.services.router.cluster.event_log import ClusterEventLog
from baton.services.router.cluster.source import KnownWorker

SHOWN_LOST_S = 60.0
"""Time for which a worker that left is shown."""
MAX_LOST = 16
SLOW_PATHS = frozenset({"tcp"})
GB = 1e9


@dataclass(frozen=True, slots=True)
class LostWorker:
    """A worker that is gone. `lost`: it did not drain before."""

    record: WorkerRecord
    at_s: float
    lost: bool


class ClusterChanges:
    """Owned by one view. `observe` is called after every reading of the registry."""

    def __init__(self, events: ClusterEventLog) -> None:
        self._events = events
        self._known: dict[WorkerId, KnownWorker] | None = None  # None before the first reading
        self._breakers: dict[tuple[Incarnation, Incarnation], str] = {}
        self._degraded: frozenset[str] = frozenset()
        self._lost: dict[WorkerId, LostWorker] = {}

    def lost(self, now: float) -> list[LostWorker]:
        """Workers that left lately and are not back, newest first."""
        lost = [worker for worker in self._lost.values() if now - worker.at_s < SHOWN_LOST_S]
        return sorted(lost, key=lambda worker: -worker.at_s)[:MAX_LOST]

    def observe(
        self, workers: Sequence[KnownWorker], breakers: Mapping[tuple[Incarnation, Incarnation], str], now: float
    ) -> None:
        """Adds the events of one reading. The first one adds none: everything was there before this router."""
        current = {worker.record.id: worker for worker in workers}
        before, self._known = self._known, current
        if before is not None:
            for id, worker in current.items():
                self._compare(before.get(id), worker)
            for id in before.keys() - current.keys():
                self._leave(before[id].record, now)
        for id in current.keys() & self._lost.keys():
            del self._lost[id]
        self._lost = {worker.record.id: worker for worker in self.lost(now)}
        self._compare_breakers(breakers)

    def observe_degraded(self, components: Sequence[str]) -> None:
        """Adds an event for each component that is away or back."""
        before, self._degraded = self._degraded, frozenset(components)
        for name in sorted(self._degraded - before):
            self._events.add("degraded", "warn", f"{name} is away: running requests go on, new ones are not durable")
        for name in sorted(before - self._degraded):
            self._events.add("recovered", "good", f"{name} is back")

    def _compare(self, before: KnownWorker | None, worker: KnownWorker) -> None:
        record = worker.record
        if before is None or before.record.incarnation != record.incarnation:
            how = "joined" if before is None else "restarted"
            self._add(how, "good", f"{record.id} {how} as {record.role.value} worker", record)
            before = None
        elif record.status is WorkerStatus.DRAINING and before.record.status is WorkerStatus.READY:
            self._add("draining", "warn", f"{record.id} drains: it finishes its requests and takes no new ones", record)
        if before is not None and worker.absence != before.absence and worker.absence:
            self._add(worker.absence, "bad", f"{record.id} is {worker.absence}: {_WHY[worker.absence]}", record)
        self._compare_links(() if before is None else before.record.links, record)

    def _compare_links(self, before: Sequence[LinkRecord], record: WorkerRecord) -> None:
        known = {(link.prefill_id, link.prefill_incarnation): link for link in before}
        for link in record.links:
            name, old = f"{link.prefill_id} > {record.id}", known.get((link.prefill_id, link.prefill_incarnation))
            path = link.path or link.transport
            if old is None:
                speed = f"{link.bandwidth_bytes_per_s / GB:.1f} GB/s"
                self._add("link_up", "good", f"link {name} is up: {path}, {speed} in its probe", record)
            elif path != (old.path or old.transport):
                level = "warn" if path in SLOW_PATHS else "info"
                self._add("link_path", level, f"link {name} went from {old.path or old.transport} to {path}", record)

    def _leave(self, record: WorkerRecord, now: float) -> None:
        drained = record.status is WorkerStatus.DRAINING
        self._lost[record.id] = LostWorker(record, now, lost=not drained)
        if drained:
            self._add("left", "info", f"{record.id} left after its drain", record)
        else:
            self._add("lost", "bad", f"{record.id} is lost: no announcement, or it was replaced", record)

    def _compare_breakers(self, breakers: Mapping[tuple[Incarnation, Incarnation], str]) -> None:
        names = {worker.record.incarnation: worker.record.id for worker in (self._known or {}).values()}
        for link in breakers.keys() - self._breakers.keys():
            self._events.add("link_open", "bad", f"link {_name(link, names)} failed: it gets no requests for a while")
        for link in self._breakers.keys() - breakers.keys():
            if names.keys() >= set(link):
                self._events.add("link_closed", "good", f"link {_name(link, names)} works again")
        self._breakers = dict(breakers)

    def _add(self, kind: str, level: str, text: str, record: WorkerRecord) -> None:
        self._events.add(kind, level, text, worker=record.id)


_WHY = {
    "silent": "no heartbeat arrives",
    "suspected": "a call to it failed",
    "stuck": "its engine has been in one step for too long",
}


def _name(link: tuple[Incarnation, Incarnation], names: Mapping[Incarnation, WorkerId]) -> str:
    return " > ".join(names.get(incarnation, WorkerId("?")) for incarnation in link)
