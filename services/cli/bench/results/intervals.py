"""How sure a ratio is: the median of per-rotation ratios with a bootstrap interval. Called by experiments in `bench/`.

On a small noisy machine only ratios inside one run mean anything: both arms of a rotation saw the same neighbours.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from services.cli.bench.results.distribution import percentile

NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and the bounds between which it lies with the confidence asked for."""

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
    """Whether two readings of one probe, around a block, say that the machine stayed the same."""
    return abs(after - before) <= max_drift * max(before, after)
