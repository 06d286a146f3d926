"""Adds recently placed attempts to the loads that workers announce. Owned by `workers`; pure, time is an argument.

An announced load is up to a heartbeat old. Without the correction, a burst between two heartbeats would go to the
worker that was idle at the first.
"""

from __future__ import annotations

from typing import NamedTuple

from baton.domain.arithmetic import ceil_div
from baton.domain.ids import AttemptId, Incarnation
from baton.domain.worker import WorkerRecord
from baton.services.router.dispatch.placement.pair import Pair


class _Placement(NamedTuple):
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
        self._forget_old(now)
        incarnation, page_size = record.incarnation, record.page_size
        num_prompts = prompt_tokens = num_rows = num_pages = 0
        for placement in self._placements.values():
            if placement.prefill == incarnation:
                num_prompts += 1
                prompt_tokens += placement.num_tokens - placement.num_cached
            if placement.decode == incarnation:
                num_rows += 1
                num_pages += ceil_div(placement.num_tokens + 1, page_size)
        if not num_prompts and not num_rows:
            return record
        return record.with_load(record.load.with_work(num_prompts, prompt_tokens, num_rows, num_pages))

    def _forget_old(self, now: float) -> None:
        """Removes the attempts that were placed before the window. The oldest come first."""
        while self._placements:
            id, oldest = next(iter(self._placements.items()))
            if now - oldest.placed_at <= self._window_s:
                break
            del self._placements[id]
