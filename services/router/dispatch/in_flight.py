"""Adds recently placed attempts to the loads that workers announce. Owned by `workers`; pure, time is an argument.

An announced load is up to a heartbeat old. Without the correction, a burst between two heartbeats would go to the
worker that was idle at the first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.domain.arithmetic import ceil_div
from baton.domain.ids import AttemptId, Incarnation
from baton.domain.worker import WorkerLoad, WorkerRecord
from baton.services.router.dispatch.placement.pair import Pair


@dataclass(frozen=True, slots=True)
class _Placement:
    prefill: Incarnation
    decode: Incarnation
    num_tokens: int
    num_cached: int
    placed_at: float


class InFlight:
    """Attempts placed within the last `window_s` seconds. An announcement arrives sooner than that."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._placements: dict[AttemptId, _Placement] = {}

    def add(self, id: AttemptId, pair: Pair, num_tokens: int, now: float, num_cached: int = 0) -> None:
        """Adds an attempt of `num_tokens` on `pair`. A second placement of it replaces the first.

        `num_cached`: those that prefill probably has cached. They are no load, or a cache would drive its users away.
        """
        self._placements.pop(id, None)
        self._placements[id] = _Placement(*pair.incarnations, num_tokens, num_cached, now)

    def remove(self, id: AttemptId) -> None:
        """Removes an attempt that ended or was refused. Idempotent."""
        self._placements.pop(id, None)

    def adjust(self, record: WorkerRecord, now: float) -> WorkerRecord:
        """Returns `record` with the recent attempts added to its load."""
        prompts: list[int] = []
        rows: list[int] = []
        for id, placement in list(self._placements.items()):
            if now - placement.placed_at > self._window_s:
                del self._placements[id]
                continue
            if placement.prefill == record.incarnation:
                prompts.append(placement.num_tokens - placement.num_cached)
            if placement.decode == record.incarnation:
                rows.append(placement.num_tokens)
        if not prompts and not rows:
            return record
        load = _with_rows(_with_prompts(record.load, prompts), rows, record.page_size)
        return replace(record, load=load)


def _with_prompts(load: WorkerLoad, prompts: list[int]) -> WorkerLoad:
    return replace(
        load,
        waiting_requests=load.waiting_requests + len(prompts),
        waiting_tokens=load.waiting_tokens + sum(prompts),
    )


def _with_rows(load: WorkerLoad, prompts: list[int], page_size: int) -> WorkerLoad:
    num_pages = sum(ceil_div(num_tokens + 1, page_size) for num_tokens in prompts)
    return replace(
        load,
        running_rows=load.running_rows + len(prompts),
        available_pages=max(0, load.available_pages - num_pages),
    )
