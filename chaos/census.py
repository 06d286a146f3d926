"""What every process holds of the machine, counted again and again, and whether it grows. Used by `soak`.

Counts are taken in lulls: no request is under way and no fault either, so that they can be compared. What grows is
judged over the second half of the time (caches fill in the first) by the Theil-Sen slope, the median of the slopes of
all pairs of counts, which a few outliers do not move (Theil 1950, Sen 1968).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from chaos.processes import Weight

MAX_RSS_GROWTH_BYTES = 16 * 1024 * 1024
MAX_FDS_GROWTH = 4
MAX_THREADS_GROWTH = 2
"""Most that the slope may add up to over the second half."""


@dataclass(frozen=True, slots=True)
class Count:
    """One process in one lull, `at_s` after the beginning. `generation` is its pid: a restarted one starts anew."""

    at_s: float
    name: str
    generation: int
    weight: Weight
    busy_pages: int


@dataclass(frozen=True, slots=True)
class Growth:
    """What one process gained over the second half, by its slope; None: it did not live through it."""

    name: str
    num_counts: int
    rss_bytes: float
    num_fds: float
    num_threads: float
    first: Weight
    last: Weight

    @property
    def problems(self) -> list[str]:
        """Where it is over a bound."""
        grown = (
            ("RSS", self.rss_bytes, MAX_RSS_GROWTH_BYTES),
            ("open files", self.num_fds, MAX_FDS_GROWTH),
            ("threads", self.num_threads, MAX_THREADS_GROWTH),
        )
        return [f"{self.name}: {what} grew by {by:g}, over {most}" for what, by, most in grown if by > most]


def growths(counts: Sequence[Count]) -> list[Growth]:
    """Of every process that lived, under one pid, through the second half."""
    if not counts:
        return []
    middle_s = (counts[0].at_s + counts[-1].at_s) / 2
    late = [count for count in counts if count.at_s >= middle_s]
    moments = {count.at_s for count in late}
    found = []
    for name in dict.fromkeys(count.name for count in late):
        own = [count for count in late if count.name == name]
        if len({count.generation for count in own}) == 1 and len(own) == len(moments) and len(own) > 2:
            found.append(_growth(name, own))
    return found


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Theil-Sen: the median slope over all pairs of points with different x."""
    return median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2) if x2 != x1)


def _growth(name: str, own: Sequence[Count]) -> Growth:
    span_s = own[-1].at_s - own[0].at_s

    def gained(values: Sequence[int]) -> float:
        return slope([(count.at_s, float(value)) for count, value in zip(own, values, strict=True)]) * span_s

    return Growth(
        name,
        len(own),
        gained([count.weight.rss_bytes for count in own]),
        gained([count.weight.num_fds for count in own]),
        gained([count.weight.num_threads for count in own]),
        own[0].weight,
        own[-1].weight,
    )
