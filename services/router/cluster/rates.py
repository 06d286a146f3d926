"""Rates of workers and links from the totals in successive heartbeats. Pure; time is an argument.

A heartbeat that is read twice counts once. A total that fell belongs to a new incarnation, which has its own series.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeVar

from baton.domain.ids import Incarnation
from baton.domain.worker import Activity, LinkRecord, WorkerRecord

MAX_SAMPLES = 30
RATE_SAMPLES = 4
"""Samples that a rate covers: about three heartbeats."""
MIN_INTERVAL_S = 0.5
GIB = 1 << 30

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    totals: tuple[int, ...]


class _TotalsSeries:
    """The latest totals of one thing, at most `MAX_SAMPLES` and not closer than `MIN_INTERVAL_S`."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=MAX_SAMPLES)

    def add(self, totals: tuple[int, ...], now: float) -> None:
        if not self._samples or now - self._samples[-1].at_s >= MIN_INTERVAL_S:
            self._samples.append(_Sample(now, totals))

    def increase(self, num_samples: int = MAX_SAMPLES) -> tuple[float, tuple[int, ...]] | None:
        """Seconds and increases over the last `num_samples`; None with fewer than two."""
        if len(self._samples) < 2:
            return None
        first, last = self._samples[-min(num_samples, len(self._samples))], self._samples[-1]
        return last.at_s - first.at_s, tuple([b - a for a, b in zip(first.totals, last.totals, strict=True)])


class ClusterRates:
    """Series of every worker and link that is there."""

    def __init__(self) -> None:
        self._workers: dict[Incarnation, _TotalsSeries] = {}
        self._links: dict[tuple[Incarnation, Incarnation], _TotalsSeries] = {}

    def observe(self, records: Collection[WorkerRecord], now: float) -> None:
        """Adds one reading of the registry; forgets what is no longer in it."""
        for record in records:
            activity = record.load.activity
            totals = (activity.num_tokens, activity.num_prompt_tokens, activity.num_cached_tokens)
            self._workers.setdefault(record.incarnation, _TotalsSeries()).add(totals, now)
            for link in record.links:
                key = (link.prefill_incarnation, record.incarnation)
                self._links.setdefault(key, _TotalsSeries()).add((link.num_pulled_bytes, link.pull_us), now)
        _retain(self._workers, {record.incarnation for record in records})
        _retain(
            self._links, {(link.prefill_incarnation, record.incarnation) for record in records for link in record.links}
        )

    def tokens_per_s(self, incarnation: Incarnation) -> float | None:
        """Computed tokens a second over the last heartbeats; None before the second one."""
        increase = self._workers[incarnation].increase(RATE_SAMPLES) if incarnation in self._workers else None
        return None if increase is None else increase[1][0] / increase[0]

    def hit_ratio(self, record: WorkerRecord) -> float | None:
        """Share of prompt tokens found in the prefix cache: lately, or since the start; None without a prompt."""
        series = self._workers.get(record.incarnation)
        increase = None if series is None else series.increase()
        if increase is not None and increase[1][1] > 0:
            return increase[1][2] / increase[1][1]
        return _total_hit_ratio(record.load.activity)

    def gib_per_s(self, link: LinkRecord, decode: Incarnation) -> float | None:
        """GiB a second while pulls ran lately; None if none did."""
        series = self._links.get((link.prefill_incarnation, decode))
        increase = None if series is None else series.increase()
        if increase is None or increase[1][1] <= 0:
            return None
        num_bytes, pull_us = increase[1]
        return num_bytes / GIB / (pull_us / 1e6)


def _total_hit_ratio(activity: Activity) -> float | None:
    return activity.num_cached_tokens / activity.num_prompt_tokens if activity.num_prompt_tokens else None


def _retain(table: dict[Key, _TotalsSeries], keys: Collection[Key]) -> None:
    for gone in [key for key in table if key not in keys]:
        del table[gone]
