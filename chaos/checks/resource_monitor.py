"""Samples the resources of every process and measures their growth. Used by `soak`.

Samples are taken in quiet periods without requests and faults, so they are comparable. Growth is measured over the
second half of the time (caches fill in the first) by the Theil-Sen slope, the median of the slopes of
all pairs of samples, which a few outliers do not move (Theil 1950, Sen 1968).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from chaos.testbed.process import ProcessResources

MAX_RSS_GROWTH_BYTES = 16 * 1024 * 1024
MAX_FDS_GROWTH = 4
MAX_THREADS_GROWTH = 2
"""Bounds on the growth over the second half."""


@dataclass(frozen=True, slots=True)
class ResourceSample:
    """One process in one quiet period, `at_s` after the start. `generation`: its pid, which a restart changes."""

    at_s: float
    name: str
    generation: int
    resources: ProcessResources
    busy_pages: int


@dataclass(frozen=True, slots=True)
class ResourceGrowth:
    """Growth of one process over the second half, by its slope; None if it did not live through it."""

    name: str
    num_samples: int
    rss_bytes: float
    num_fds: float
    num_threads: float
    first: ProcessResources
    last: ProcessResources

    @property
    def problems(self) -> list[str]:
        """Resources over their bound."""
        grown = (
            ("RSS", self.rss_bytes, MAX_RSS_GROWTH_BYTES),
            ("open files", self.num_fds, MAX_FDS_GROWTH),
            ("threads", self.num_threads, MAX_THREADS_GROWTH),
        )
        return [f"{self.name}: {what} grew by {by:g}, over {most}" for what, by, most in grown if by > most]


def resource_growths(samples: Sequence[ResourceSample]) -> list[ResourceGrowth]:
    """Growth of every process that lived, under one pid, through the second half."""
    if not samples:
        return []
    middle_s = (samples[0].at_s + samples[-1].at_s) / 2
    late = [sample for sample in samples if sample.at_s >= middle_s]
    moments = {sample.at_s for sample in late}
    found = []
    for name in dict.fromkeys(sample.name for sample in late):
        own = [sample for sample in late if sample.name == name]
        if len({sample.generation for sample in own}) == 1 and len(own) == len(moments) and len(own) > 2:
            found.append(_growth(name, own))
    return found


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Theil-Sen: the median slope over all pairs of points with different x."""
    return median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2) if x2 != x1)


def _growth(name: str, own: Sequence[ResourceSample]) -> ResourceGrowth:
    span_s = own[-1].at_s - own[0].at_s

    def growth_of(values: Sequence[int]) -> float:
        return slope([(sample.at_s, float(value)) for sample, value in zip(own, values, strict=True)]) * span_s

    return ResourceGrowth(
        name,
        len(own),
        growth_of([sample.resources.rss_bytes for sample in own]),
        growth_of([sample.resources.num_fds for sample in own]),
        growth_of([sample.resources.num_threads for sample in own]),
        own[0].resources,
        own[-1].resources,
    )
