"""Mean, deviation and percentiles of a sample. Used by `summary`; units are the caller's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Percentile of an ascending sample, interpolated linearly between neighbours (numpy's default, Hyndman and Fan's
    type 7).

    Raises `ValueError` for an empty sample or a percentage outside [0, 100].
    """
    if not ordered or not 0.0 <= percent <= 100.0:
        raise ValueError(f"no percentile {percent} of {len(ordered)} values")
    rank = (len(ordered) - 1) * percent / 100.0
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sample, ascending and never empty."""

    ordered: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """None when there are no values."""
        return cls(tuple(sorted(values))) if values else None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.ordered)

    @property
    def std(self) -> float:
        """Standard deviation of the population."""
        return statistics.pstdev(self.ordered)

    def percentile(self, percent: float) -> float:
        """Raises `ValueError` outside [0, 100]."""
        return percentile(self.ordered, percent)
