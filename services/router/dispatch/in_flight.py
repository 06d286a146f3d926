"""Adds recently placed attempts to the loads that workers announce. Owned by `workers`; pure, time is an argument.

An announced load is up to a heartbeat old. Without the correction, a burst between two heartbeats would go to the
worker that was idle at the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from baton.domain.arithmetic import ceil_div
from baton.domain.ids import AttemptId, Incarnation
from baton.domain.worker import WorkerRecord
from baton.services.router.dispatch.placement.pair import Pair


class _Placement(NamedTuple):
    prefill: Incarnation
    decode: Incarnation
    prompt_tokens: int
    num_pages: int
    placed_at: float


@dataclass(slots=True)
class _Totals:
    """Of the placements on one worker. A prompt waits at its prefill worker, a row takes pages at its decode worker."""

    num_prompts: int = 0
    prompt_tokens: int = 0
    num_rows: int = 0
    num_pages: int = 0


class InFlight:
    """Attempts placed within the last `window_s` seconds. An announcement arrives sooner than that."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._placements: dict[AttemptId, _Placement] = {}
        self._totals: dict[Incarnation, _Totals] = {}  # of the workers that have placements

    def add(self, id: AttemptId, pair: Pair, num_tokens: int, now: float, num_cached: int = 0) -> None:
        """Adds an attempt of `num_tokens` on `pair`. A second placement of it replaces the first.

        `num_cached`: those that prefill probably has cached. They are no load, or a cache would drive its users away.
        """
        self.remove(id)
        num_pages = ceil_div(num_tokens + 1, pair.decode.page_size)
        placed = self._placements[id] = _Placement(*pair.incarnations, num_tokens - num_cached, num_pages, now)
        self._count(placed, 1)

    def remove(self, id: AttemptId) -> None:
        """Removes an attempt that ended or was refused. Idempotent."""
        placed = self._placements.pop(id, None)
        if placed is not None:
            self._count(placed, -1)

    def adjust(self, record: WorkerRecord, now: float) -> WorkerRecord:
        """Returns `record` with the recent attempts added to its load."""
        self._forget_old(now)
        return self._adjusted(record)

    def adjust_all(self, records: Iterable[WorkerRecord], now: float) -> list[WorkerRecord]:
        """As `adjust`, of several."""
        self._forget_old(now)
        return [self._adjusted(record) for record in records]

    def _adjusted(self, record: WorkerRecord) -> WorkerRecord:
        total = self._totals.get(record.incarnation)
        if total is None:
            return record
        load = record.load.with_work(total.num_prompts, total.prompt_tokens, total.num_rows, total.num_pages)
        return record.with_load(load)

    def _count(self, placed: _Placement, sign: int) -> None:
        """Adds a placement to the totals of its workers, or takes it away."""
        prefill = self._total_of(placed.prefill)
        prefill.num_prompts += sign
        prefill.prompt_tokens += sign * placed.prompt_tokens
        decode = self._total_of(placed.decode)
        decode.num_rows += sign
        decode.num_pages += sign * placed.num_pages
        for worker, total in ((placed.prefill, prefill), (placed.decode, decode)):
            if not total.num_prompts and not total.num_rows:
                self._totals.pop(worker, None)

    def _total_of(self, worker: Incarnation) -> _Totals:
        total = self._totals.get(worker)
        if total is None:
            total = self._totals[worker] = _Totals()
        return total

    def _forget_old(self, now: float) -> None:
        """Removes the attempts that were placed before the window. The oldest come first."""
        while self._placements:
            id, oldest = next(iter(self._placements.items()))
            if now - oldest.placed_at <= self._window_s:
                break
            self.remove(id)
