"""Confidence of a ratio: the median of per-rotation ratios with a bootstrap interval. Used by experiments in `bench/`.

On a noisy machine only ratios inside one run are meaningful, because both arms of a rotation share its disturbances.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from baton.services.cli.bench.results.distribution import percentile

NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and its confidence bounds."""

    median: float
    low: float
    high: float


def bootstrap_median(
    values: Sequence[float], *, seed: int = 0, confidence: float = 0.95, num_resamples: int = NUM_RESAMPLES
) -> Interval:
    """The median of `values` with its percentile-bootstrap interval (Efron, 1979). Raises `ValueError` for none."""
    if not values:
        raise ValueError("no values, no interval")
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(num_resamples))
    tail = 100.0 * (1.0 - confidence) / 2.0
    return Interval(statistics.median(values), percentile(medians, tail), percentile(medians, 100.0 - tail))


def is_steady(before: float, after: float, *, max_drift: float = 0.15) -> bool:
    """True if two readings of one probe around a block agree to `max_drift`."""
    return abs(after - before) <= max_drift * max(before, after)
