"""Arrival times of requests. Used by `plan`; knows no clock.

The schedule is that of `vllm bench serve`: gamma-distributed gaps, with the cumulative schedule rescaled so that the
last arrival is exactly N/rate. So two runs at one rate have the same load for any seed.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence


def gamma_arrivals(num_requests: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Seconds from the start, ascending; the last is exactly `num_requests / rate`.

    `burstiness` is the gamma's shape: 1 is Poisson, less is burstier, more is more even. An infinite rate: all at 0.
    Raises `ValueError` for a rate or burstiness that is not positive.
    """
    if rate <= 0.0 or burstiness <= 0.0:
        raise ValueError("rate and burstiness must be over 0")
    if math.isinf(rate):
        return [0.0] * num_requests
    gaps = [rng.gammavariate(burstiness, 1.0 / (rate * burstiness)) for _ in range(num_requests)]
    return rescale(list(itertools.accumulate(gaps)), num_requests / rate)


def rescale(arrivals: Sequence[float], last_s: float) -> list[float]:
    """The same pattern, ending exactly at `last_s`."""
    if not arrivals or arrivals[-1] == 0.0:
        return list(arrivals)
    factor = last_s / arrivals[-1]
    return [arrival * factor for arrival in arrivals[:-1]] + [last_s]


def stamp_resolution(stamps: Sequence[float]) -> float:
    """Resolution of a trace's rounded stamps; 0 unless on average two or more requests share a stamp.

    Computed as the median gap between different stamps. `stamps` ascending, in any unit.
    """
    distinct = sorted(set(stamps))
    if len(distinct) < 2 or len(stamps) < 2 * len(distinct):
        return 0.0
    gaps = sorted(after - before for before, after in itertools.pairwise(distinct))
    return gaps[len(gaps) // 2]


def jitter(stamps: Sequence[float], slot: float, rng: random.Random) -> list[float]:
    """Moves every stamp uniformly inside its slot, in ascending order, so a quantised trace is no series of bursts.

    Requests of one slot keep their order, so a later message of a dialogue does not overtake an earlier one.
    """
    moved: list[float] = []
    for stamp, group in itertools.groupby(stamps):
        moved += sorted(stamp + rng.uniform(0.0, slot) for _ in group)
    return list(itertools.accumulate(moved, max))
