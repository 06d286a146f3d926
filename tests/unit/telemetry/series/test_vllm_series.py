"""Metrics under vLLM's names have the values of our own."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from baton.engine.drafts.meter import DraftMeter
from baton.engine.drafts.policy import DraftTotals
from baton.telemetry import metrics
from baton.telemetry.series.vllm_series import VllmSeries

LABELS = {"model_name": "m", "engine": "0"}
GAUGES = (metrics.KV_PAGES, metrics.BATCH_ROWS, metrics.WAITING_REQUESTS, metrics.REQUESTS_IN_STATE)


@pytest.fixture(autouse=True)
def no_gauges_of_other_tests():
    """The aliases sum over roles, and workers of other tests may have run in this process."""
    for each in GAUGES:
        each.clear()
    metrics.QUEUED_REQUESTS.set(0)
    yield
    for each in GAUGES:
        each.clear()
    metrics.QUEUED_REQUESTS.set(0)


def scrape(role: str) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(VllmSeries(role, "m"))
    return registry


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(name, {**LABELS, **labels})
    assert found is not None, name
    return found


def test_a_worker_shows_rows_pages_tokens_and_hits():
    for gauge in (metrics.BATCH_ROWS, metrics.WAITING_REQUESTS, metrics.KV_PAGES):
        gauge.clear()  # of engines that other tests of this process ran
    metrics.BATCH_ROWS.labels("decode").set(3)
    metrics.WAITING_REQUESTS.labels("decode").set(2)
    before = {
        name: value(scrape("decode"), f"vllm:{name}_total") for name in ("prefix_cache_queries", "prefix_cache_hits")
    }
    for owner, count in {"free": 10, "cached": 30, "live": 50, "pinned": 10}.items():
        metrics.KV_PAGES.labels(owner).set(count)
    metrics.PROMPT_TOKENS_TOTAL.labels("decode").inc(100)
    metrics.CACHED_TOKENS_TOTAL.labels("decode", "device").inc(25)
    metrics.CACHED_TOKENS_TOTAL.labels("decode", "file").inc(5)
    shown = scrape("decode")
    assert value(shown, "vllm:num_requests_running") == 3
    assert value(shown, "vllm:num_requests_waiting") == 2
    assert value(shown, "vllm:kv_cache_usage_perc") == pytest.approx(0.6)
    assert value(shown, "vllm:prefix_cache_queries_total") == before["prefix_cache_queries"] + 100
    assert value(shown, "vllm:prefix_cache_hits_total") == before["prefix_cache_hits"] + 30


def test_a_worker_shows_what_became_of_drafts():
    """Under the names of vLLM's v1/spec_decode; the worker's own drafter is the only one of a process."""
    metrics.DRAFT_ACCEPTED_POSITION_TOTAL.clear()  # of other tests' drafters
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    before = {name: value(scrape("decode"), f"vllm:spec_decode_{name}_total") for name in names}
    totals = DraftTotals()
    meter = DraftMeter("ngram", totals)
    totals.num_proposals, totals.num_drafts = 2, 9
    totals.accepted_at[:3] = [2, 1, 1]
    meter.publish()
    shown = scrape("decode")
    for name, grown in zip(names, (2, 9, 4), strict=True):
        assert value(shown, f"vllm:spec_decode_{name}_total") == before[name] + grown
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(shown, per_position, position=str(place)) for place in range(4)] == [2, 1, 1, 0]


def test_a_router_shows_requests_by_state_and_why_they_finished():
    metrics.REQUESTS_IN_STATE.clear()
    metrics.REQUESTS_IN_STATE.labels("queued").set(4)
    metrics.REQUESTS_IN_STATE.labels("decoding").set(5)
    metrics.QUEUED_REQUESTS.set(4)
    metrics.REQUESTS_TOTAL.labels("finished", "length").inc(2)
    metrics.REQUESTS_TOTAL.labels("failed", "worker_lost").inc(9)
    own = metrics.REGISTRY.get_sample_value("baton_requests_total", {"outcome": "finished", "code": "length"})
    shown = scrape("router")
    assert value(shown, "vllm:num_requests_running") == 5
    assert value(shown, "vllm:num_requests_waiting") == 4
    assert value(shown, "vllm:request_success_total", finished_reason="length") == own
    names = {each.name for family in shown.collect() for each in family.samples}
    assert "vllm:kv_cache_usage_perc" not in names, "a router has no pages"


def test_histograms_sum_their_children_and_buckets_still_grow():
    def count(le: str) -> float:
        return value(scrape("router"), "vllm:time_to_first_token_seconds_bucket", le=le)

    metrics.TTFT_SECONDS.labels("split").observe(0.2)
    metrics.TTFT_SECONDS.labels("local").observe(0.2)
    before = {le: count(le) for le in ("0.1", "0.25", "+Inf")}
    metrics.TTFT_SECONDS.labels("split").observe(0.2)
    metrics.TTFT_SECONDS.labels("local").observe(200.0)
    assert count("0.1") == before["0.1"]
    assert count("0.25") == before["0.25"] + 1
    assert count("+Inf") == before["+Inf"] + 2
    metrics.ITL_SECONDS.labels("split").observe(0.03)
    assert value(scrape("router"), "vllm:inter_token_latency_seconds_count") >= 1


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_prometheus_reads_what_is_shown(role):
    families = list(text_string_to_metric_families(generate_latest(scrape(role)).decode()))
    assert len(families) >= 7
    assert all(family.name.startswith("vllm:") for family in families)
