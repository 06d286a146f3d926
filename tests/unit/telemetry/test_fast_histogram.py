"""The per-token histogram renders like prometheus_client's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from baton.telemetry.fast_histogram import FastHistogram

BOUNDS = (0.1, 1.0, 10.0)


@given(values=st.lists(st.one_of(st.sampled_from(BOUNDS), st.floats(0.0, 20.0)), max_size=30))
def test_it_is_rendered_like_a_histogram(values: list[float]):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    fast = FastHistogram("x_seconds", "X.", ["path"], BOUNDS, ours).labels("split")
    slow = Histogram("x_seconds", "X.", ["path"], buckets=BOUNDS, registry=theirs).labels("split")
    for value in values:
        fast.observe(value)
        slow.observe(value)
    assert samples(ours) == pytest.approx(samples(theirs))


def samples(registry: CollectorRegistry) -> dict[str, float]:
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if "_created" not in line}


def test_labels_must_fit():
    with pytest.raises(ValueError, match="has labels"):
        FastHistogram("x_seconds", "X.", ["path"], BOUNDS, CollectorRegistry()).labels("a", "b")
