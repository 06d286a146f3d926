"""The counter of every request renders like prometheus_client's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from baton.telemetry.fast.fast_counter import FastCounter

NAMES = ("kind", "tenant")


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["", "x\n"]), st.integers(0, 1000)), max_size=20))
def test_it_is_rendered_like_a_counter(steps: list[tuple[str, str, int]]):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    fast = FastCounter("x", "X.", NAMES, ours)
    slow = Counter("x", "X.", NAMES, registry=theirs)
    for kind, tenant, amount in steps:
        fast.labels(kind, tenant).inc(amount)
        slow.labels(kind, tenant).inc(amount)
    for render in (generate_latest, generate_openmetrics):
        shown, expected = (
            [line for line in render(registry).decode().splitlines() if "_created" not in line]
            for registry in (ours, theirs)
        )
        assert shown == expected


def test_a_child_is_one_and_is_shown_from_its_first_use():
    registry = CollectorRegistry()
    counter = FastCounter("x", "X.", NAMES, registry)
    assert registry.get_sample_value("x_total", {"kind": "a", "tenant": ""}) is None
    counter.labels("a", "").inc()
    counter.labels("a", "").inc(2)
    assert registry.get_sample_value("x_total", {"kind": "a", "tenant": ""}) == 3.0


def test_labels_must_fit():
    with pytest.raises(ValueError, match="has labels"):
        FastCounter("x", "X.", NAMES, CollectorRegistry()).labels("a")
