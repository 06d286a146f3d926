"""A router's series carry its model, whatever prometheus_client makes of them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.telemetry.metrics import render
from baton.telemetry.series.model_label import ModelRegistry


def test_own_series_get_the_model_and_others_stay():
    registry = CollectorRegistry()
    Counter("baton_requests", "X.", ["outcome"], registry=registry).labels("failed").inc()
    Gauge("baton_ready_pairs", "X.", ["model"], registry=registry).labels("theirs").set(2)
    Gauge("process_threads", "X.", registry=registry).set(3)
    shown = ModelRegistry(registry, "ours")
    assert shown.get_sample_value("baton_requests_total", {"outcome": "failed", "model": "ours"}) == 1
    assert shown.get_sample_value("baton_ready_pairs", {"model": "theirs"}) == 2
    assert shown.get_sample_value("process_threads") == 3
    assert registry.get_sample_value("baton_requests_total", {"outcome": "failed"}) == 1, "the registry itself stays"


def test_exemplars_stay_on_their_buckets():
    registry = CollectorRegistry()
    seconds = Histogram("baton_ttft_seconds", "X.", ["path"], buckets=(0.1, 1.0), registry=registry)
    seconds.labels("split").observe(0.5, {"request_id": "cmpl-1"})
    text, _ = render("application/openmetrics-text; version=1.0.0", ModelRegistry(registry, 'a "quoted" name'))
    (line,) = [line for line in text.decode().splitlines() if "cmpl-1" in line]
    assert line.startswith("baton_ttft_seconds_bucket{")
    assert 'le="1.0"' in line
    assert r'model="a \"quoted\" name"' in line
