"""Figures of the overload experiment from request rows."""

from __future__ import annotations

import pytest

from baton.services.cli.bench.results.records import Delivery, RequestRow
from bench.router.mock_cluster import DecodeCapacity
from bench.router.overload import OBJECTIVE_S, make_finding


def row(index: int, *, ttft_s: float | None = None, ended_s: float = 1.0, failure: str | None = None) -> RequestRow:
    deliveries = () if ttft_s is None else (Delivery(ttft_s, 1),)
    return RequestRow(index, 0.0, 0.0, 0.0, ended_s, 1, 1, len(deliveries), deliveries, "length", failure)


def test_good_answers_are_in_time_and_refusals_are_no_failures():
    rows = [
        row(0, ttft_s=OBJECTIVE_S),
        row(1, ttft_s=OBJECTIVE_S + 0.1, ended_s=20.0),
        row(2, failure="HTTP 429: {}", ended_s=0.002),
        row(3, failure="HTTP 429: {}", ended_s=0.004),
        row(4, failure="HTTP 503: 429 workers are gone"),
    ]
    finding = make_finding(2.0, 10.0, rows, cpu_s=1.5, rss_bytes=1000)
    assert (finding.num_answered, finding.num_refused) == (2, 2)
    assert finding.other_failures == ("HTTP 503: 429 workers are gone",)
    assert finding.goodput_per_s == pytest.approx(1 / 20.0), "the run lasts until its last answer"
    assert finding.p50_refusal_s == pytest.approx(0.003)
    assert finding.offered_per_s == 0.5


def test_without_refusals_there_is_no_refusal_latency():
    finding = make_finding(1.0, 10.0, [row(0, ttft_s=0.1)], cpu_s=0.0, rss_bytes=0)
    assert finding.p99_refusal_s is None
    assert finding.goodput_per_s == 0.1


def test_the_sustainable_rate_is_rows_over_the_time_of_a_row():
    assert DecodeCapacity(num_rows=8, token_s=0.2).rate(11) == pytest.approx(4.0)
