"""Rates from totals, latencies from traces: against sums that are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.ids import Incarnation
from baton.services.router.cluster.rates import GIB, ClusterRates
from baton.services.router.cluster.snapshot import ServiceWindow
from baton.services.router.cluster.window import WINDOW_S, RequestWindow, summarize
from baton.telemetry.fast.fast_histogram import quantile
from baton.telemetry.request_trace import Outcome, RequestTrace
from tests.unit.router.cluster.worker_records import link, record, worked

PREFILL = record("prefill-0", 1)
TWO = Incarnation(2)


def trace(outcome: Outcome = Outcome.FINISHED, ttft_us: int | None = 1000) -> RequestTrace:
    return RequestTrace("id", "r", "m", "/v1", 0, outcome, 5000, ttft_us=ttft_us)


def test_a_worker_has_a_rate_from_its_second_heartbeat_on():
    rates = ClusterRates()
    rates.observe([record("decode-0", 2, load=worked(100))], 10.0)
    assert rates.tokens_per_s(TWO) is None
    rates.observe([record("decode-0", 2, load=worked(150))], 10.1)  # the same heartbeat, or too close to it
    assert rates.tokens_per_s(TWO) is None
    rates.observe([record("decode-0", 2, load=worked(300))], 12.0)
    assert rates.tokens_per_s(TWO) == pytest.approx(100.0)
    rates.observe([], 13.0)
    assert rates.tokens_per_s(TWO) is None, "forgotten with its worker"


def test_the_hit_ratio_is_that_of_the_latest_prompts():
    rates, idle = ClusterRates(), record("prefill-0", 1)
    assert rates.hit_ratio(idle) is None
    rates.observe([replace(idle, load=worked(0, 100, 0))], 1.0)
    now = replace(idle, load=worked(0, 200, 75))
    rates.observe([now], 2.0)
    assert rates.hit_ratio(now) == pytest.approx(0.75)
    alone = record("prefill-1", 7, load=worked(0, 400, 100))
    assert rates.hit_ratio(alone) == pytest.approx(0.25), "since its start, before a second heartbeat"


def test_a_link_is_as_fast_as_its_pulls_not_as_busy():
    rates = ClusterRates()
    for at_s, moved, pull_us in ((1.0, 0, 0), (11.0, GIB, 500_000)):
        decode = record("decode-0", 2, links=(link(PREFILL, "cma", moved, pull_us),))
        rates.observe([PREFILL, decode], at_s)
    assert rates.gib_per_s(decode.links[0], decode.incarnation) == pytest.approx(2.0)
    rates.observe([PREFILL], 12.0)
    assert rates.gib_per_s(decode.links[0], decode.incarnation) is None


def summary(window: RequestWindow, itl_counts: tuple[int, ...], now: float) -> ServiceWindow:
    return summarize([window.totals(0, itl_counts, now)], (0.01, 0.1))


def test_the_window_counts_outcomes_and_forgets_them():
    window = RequestWindow()
    for outcome in (Outcome.FINISHED, Outcome.FINISHED, Outcome.FAILED, Outcome.REFUSED):
        window.add(trace(outcome), 1.0)
    seen = summary(window, (), 2.0)
    assert (seen.requests, seen.failed, seen.refused) == (4, 1, 1)
    assert seen.error_ratio == pytest.approx(1 / 3)
    later = summary(window, (), 2.0 + WINDOW_S)
    assert (later.requests, later.error_ratio, later.ttft_p95_ms) == (0, 0.0, None)


def test_output_tokens_a_second_are_those_of_the_last_seconds():
    window = RequestWindow()
    for at_s, total in ((0.0, 0), (1.0, 100), (2.0, 100), (3.0, 100)):
        window.observe(total, (), at_s)
    assert window.output_tokens_per_s(160, 4.0) == pytest.approx(30.0)


def test_the_itl_quantile_is_that_of_the_window():
    window = RequestWindow()
    window.observe(0, (1000, 0, 0), 0.0)  # before the window's requests
    assert summary(window, (1000, 100, 0), 1.0).itl_p99_ms == pytest.approx(99.1)
    assert summary(window, (1000, 0, 0), 1.0).itl_p99_ms is None


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=60))
def test_ttft_p95_is_one_of_the_values_and_above_most(values: list[int]):
    window = RequestWindow()
    for value in values:
        window.add(trace(ttft_us=value), 1.0)
    p95 = summary(window, (), 1.0).ttft_p95_ms
    assert p95 is not None
    assert round(p95 * 1000) in values
    assert sum(value <= p95 * 1000 + 0.5 for value in values) >= 0.95 * len(values)


@given(st.lists(st.lists(st.integers(1, 10**6), max_size=20), min_size=1, max_size=4))
def test_windows_of_several_routers_are_as_one_window_of_all_requests(routers: list[list[int]]):
    windows, whole = [RequestWindow() for _ in routers], RequestWindow()
    for window, values in zip(windows, routers, strict=True):
        for value in values:
            window.add(trace(Outcome.FAILED if value % 7 == 0 else Outcome.FINISHED, ttft_us=value), 1.0)
            whole.add(trace(Outcome.FAILED if value % 7 == 0 else Outcome.FINISHED, ttft_us=value), 1.0)
    totals = [window.totals(0, (0, len(of), 1), 1.0) for window, of in zip(windows, routers, strict=True)]
    merged = summarize(totals, (0.01, 0.1))
    gaps = (0, sum(map(len, routers)), len(routers))
    assert merged == summary(whole, gaps, 1.0)


@given(st.lists(st.integers(0, 50), min_size=3, max_size=3), st.floats(0.0, 1.0))
def test_a_quantile_lies_in_the_bucket_of_its_rank(counts: list[int], fraction: float):
    bounds = (1.0, 2.0)
    found = quantile(bounds, counts, fraction)
    if not sum(counts):
        assert found is None
        return
    assert found is not None
    below = sum(count for bound, count in zip(bounds, counts, strict=False) if bound < found)
    assert below <= fraction * sum(counts) + 1e-9
