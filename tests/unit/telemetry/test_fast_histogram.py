"""The per-token histogram renders like prometheus_client's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from baton.telemetry.fast.fast_histogram import FastHistogram, observe_each

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


@given(steps=st.lists(st.tuples(st.sampled_from(["split", "local"]), st.floats(0.0, 20.0)), max_size=30))
def test_observations_of_several_children_count_as_each_alone(steps: list[tuple[str, float]]):
    together, alone = CollectorRegistry(), CollectorRegistry()
    one, other = (FastHistogram("x_seconds", "X.", ["path"], BOUNDS, each) for each in (together, alone))
    observe_each([(one.labels(path), value) for path, value in steps])
    for path, value in steps:
        other.labels(path).observe(value)
    assert samples(together) == samples(alone)


def samples(registry: CollectorRegistry) -> dict[str, float]:
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if "_created" not in line}


def test_an_exemplar_stays_on_its_bucket_until_the_next_one():
    ours = CollectorRegistry()
    histogram = FastHistogram("x_seconds", "X.", ["path"], BOUNDS, ours).labels("split")
    histogram.observe(0.05, {"request_id": "a"})
    histogram.observe(0.5, {"request_id": "b"})
    histogram.observe(0.6, {"request_id": "c"}, 1_790_000_000.0)
    histogram.observe(0.7)
    [family] = ours.collect()
    exemplars = {each.labels["le"]: each.exemplar for each in family.samples if each.exemplar is not None}
    shown = {bound: (each.labels["request_id"], each.value, each.timestamp) for bound, each in exemplars.items()}
    assert shown == {"0.1": ("a", 0.05, None), "1.0": ("c", 0.6, 1_790_000_000.0)}


def test_one_without_labels_shows_its_series_from_the_start():
    ours = CollectorRegistry()
    histogram = FastHistogram("x_seconds", "X.", [], BOUNDS, ours)
    assert samples(ours)["x_seconds_count"] == 0.0
    histogram.observe(0.5)
    assert samples(ours)["x_seconds_sum"] == 0.5


def test_labels_must_fit():
    with pytest.raises(ValueError, match="has labels"):
        FastHistogram("x_seconds", "X.", ["path"], BOUNDS, CollectorRegistry()).labels("a", "b")
