"""Arrival schedules: exact end, shape, and jitter of quantised stamps."""

import math
import random
import statistics
from itertools import pairwise

import pytest

from baton.services.cli.bench.workload.arrivals import gamma_arrivals, jitter, rescale, stamp_resolution


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 8.0])
def test_the_last_arrival_is_exactly_the_number_over_the_rate(burstiness):
    arrivals = gamma_arrivals(37, 2.5, burstiness, random.Random(3))
    assert len(arrivals) == 37
    assert arrivals[-1] == 37 / 2.5
    assert arrivals == sorted(arrivals)
    assert arrivals[0] > 0.0


def test_burstiness_is_the_shape_of_the_gaps():
    """A gamma's coefficient of variation is one over the root of its shape."""
    for burstiness in (0.5, 1.0, 4.0):
        arrivals = gamma_arrivals(20_000, 10.0, burstiness, random.Random(1))
        gaps = [after - before for before, after in pairwise([0.0, *arrivals])]
        variation = statistics.pstdev(gaps) / statistics.fmean(gaps)
        assert variation == pytest.approx(burstiness**-0.5, rel=0.05)


def test_the_same_seed_gives_the_same_arrivals():
    assert gamma_arrivals(9, 1.0, 1.0, random.Random(5)) == gamma_arrivals(9, 1.0, 1.0, random.Random(5))
    assert gamma_arrivals(9, 1.0, 1.0, random.Random(5)) != gamma_arrivals(9, 1.0, 1.0, random.Random(6))


def test_an_infinite_rate_sends_everything_at_once():
    assert gamma_arrivals(3, math.inf, 1.0, random.Random(0)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)])
def test_an_invalid_rate_or_burstiness_is_refused(rate, burstiness):
    with pytest.raises(ValueError, match="over 0"):
        gamma_arrivals(1, rate, burstiness, random.Random(0))


def test_rescaling_keeps_the_pattern():
    assert rescale([1.0, 2.0, 4.0], 2.0) == [0.5, 1.0, 2.0]
    assert rescale([0.0, 0.0], 2.0) == [0.0, 0.0]
    assert rescale([], 2.0) == []


def test_the_resolution_of_shared_stamps_is_found():
    assert stamp_resolution([0, 0, 3000, 3000, 3000, 5999, 9000, 9000, 9000]) == 3000
    assert stamp_resolution([0, 40, 277, 277, 529]) == 0.0
    assert stamp_resolution([0, 0, 0]) == 0.0


def test_jitter_stays_inside_the_slot_and_keeps_the_order():
    stamps = [0.0] * 50 + [3.0] * 50
    moved = jitter(stamps, 3.0, random.Random(2))
    assert moved == sorted(moved)
    assert all(0.0 <= after - before < 3.0 for before, after in zip(stamps, moved, strict=True))
    assert len(set(moved)) == 100
    assert statistics.fmean(moved[:50]) == pytest.approx(1.5, abs=0.4)


def test_stamps_without_a_slot_do_not_move():
    assert jitter([0.0, 0.5, 2.0], 0.0, random.Random(0)) == [0.0, 0.5, 2.0]
