"""Every figure, from rows with known figures."""

import pytest

from baton.services.cli.bench.results.distribution import Distribution, percentile
from baton.services.cli.bench.results.intervals import bootstrap_median, is_steady
from baton.services.cli.bench.results.objectives import LatencyMetric, LatencyObjective, is_good, parse_objectives
from baton.services.cli.bench.results.records import Delivery, RequestRow, inter_token_gaps
from baton.services.cli.bench.results.summary import lag_verdict, summarize
from baton.settings.base import SettingsError


def row(
    index: int = 0,
    *times: float,
    ended: float | None = None,
    tokens: int | None = None,
    failure: str | None = None,
    sent: float = 0.0,
    due: float = 0.0,
) -> RequestRow:
    """A request whose tokens arrive one by one at `times` after sending."""
    return RequestRow(
        index=index,
        arrival_s=0.0,
        due_s=due,
        sent_s=sent,
        ended_s=times[-1] if ended is None else ended,
        max_tokens=8,
        num_prompt_tokens=10,
        num_output_tokens=len(times) if tokens is None else tokens,
        deliveries=tuple(Delivery(at, 1) for at in times),
        finish_reason=None if failure else "length",
        failure=failure,
    )


def test_percentiles_interpolate_between_neighbours():
    values = [1.0, 2.0, 4.0, 8.0]
    assert [percentile(values, p) for p in (0, 25, 50, 99, 100)] == [1.0, 1.75, 3.0, pytest.approx(7.88), 8.0]
    assert percentile([5.0], 99) == 5.0


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 101), ([1.0], -1)])
def test_percentiles_of_nothing_are_refused(values, percent):
    with pytest.raises(ValueError, match="no percentile"):
        percentile(values, percent)


def test_a_distribution_sorts_and_an_empty_one_is_none():
    values = Distribution.of([4.0, 2.0, 6.0])
    assert values is not None
    assert (values.mean, values.percentile(50), values.percentile(100)) == (4.0, 4.0, 6.0)
    assert values.std == pytest.approx((8 / 3) ** 0.5)
    assert Distribution.of([]) is None


def test_gaps_of_a_bundled_event_are_divided_by_its_tokens():
    events = (Delivery(1.0, 1), Delivery(1.5, 1), Delivery(2.5, 4))
    assert inter_token_gaps(events) == [0.5, 0.25, 0.25, 0.25, 0.25]
    assert inter_token_gaps((Delivery(1.0, 3),)) == []


def test_times_of_one_request():
    answered = row(0, 0.5, 0.7, 1.5)
    assert (answered.ttft_s, answered.e2el_s, answered.tpot_s) == (0.5, 1.5, 0.5)
    assert answered.itls_s == [pytest.approx(0.2), pytest.approx(0.8)]
    assert row(0, 0.5).tpot_s is None


def test_the_end_may_come_after_the_last_token():
    assert row(0, 1.0, 2.0, ended=3.0).tpot_s == 2.0


def test_good_requests_meet_all_objectives():
    objectives = parse_objectives(["ttft:500", "tpot:100", "e2el:1000"])
    assert objectives == (
        LatencyObjective(LatencyMetric.TTFT, 0.5),
        LatencyObjective(LatencyMetric.TPOT, 0.1),
        LatencyObjective(LatencyMetric.E2EL, 1.0),
    )
    assert is_good(row(0, 0.5, 0.6), objectives)
    assert not is_good(row(0, 0.51, 0.6), objectives)
    assert not is_good(row(0, 0.5, 0.61), objectives)
    assert not is_good(row(0, 0.5, 0.6, ended=1.1, tokens=100), objectives)
    assert is_good(row(0, 0.5), objectives)
    assert not is_good(row(0, 0.1, failure="HTTP 503: full"), objectives)


@pytest.mark.parametrize("word", ["ttft", "itl:3", "ttft:x", "ttft:0", "ttft:-1", "ttft:nan"])
def test_other_objectives_are_refused(word):
    with pytest.raises(SettingsError, match=word):
        parse_objectives([word])


def test_figures_of_a_run():
    rows = [
        row(0, 1.0, 2.0, 3.0),
        row(1, 2.0, 2.5, sent=1.0),
        row(2, 1.0, ended=9.0, sent=1.0, failure="HTTP 429: full"),
        row(3, ended=0.5, sent=1.0, failure="HTTP 429: full"),
    ]
    figures = summarize(rows, parse_objectives(["ttft:1500"]))
    assert (figures.num_requests, figures.num_answered) == (4, 2)
    assert figures.failures == (("HTTP 429: full", 2),)
    assert figures.wall_s == 10.0
    assert (figures.num_input_tokens, figures.num_output_tokens) == (20, 5)
    assert (figures.requests_per_s, figures.output_tokens_per_s, figures.total_tokens_per_s) == (0.2, 0.5, 2.5)
    assert figures.goodput is not None
    assert (figures.goodput.num_good, figures.goodput.per_s, figures.goodput.attainment) == (1, 0.1, 0.25)
    assert figures.ttft == Distribution((1.0, 2.0))
    assert figures.tpot == Distribution((0.5, 1.0))
    assert figures.itl == Distribution((0.5, 1.0, 1.0))
    assert figures.e2el == Distribution((2.5, 3.0))


def test_a_run_of_failures_has_no_times():
    figures = summarize([row(0, ended=1.0, failure="gone")], ())
    assert (figures.ttft, figures.itl, figures.goodput) == (None, None, None)
    assert figures.requests_per_s == 0.0


def test_a_late_client_is_refused_by_its_own_lateness():
    prompt = [row(n, 0.1, sent=1.004, due=1.0) for n in range(99)]
    late = [row(99, 0.1, sent=1.5, due=1.0), row(100, 0.1, sent=1.5, due=1.0)]
    assert lag_verdict(prompt, is_scheduled=True) is None
    assert "late" in str(lag_verdict(prompt + late, is_scheduled=True))
    assert lag_verdict(prompt + late, is_scheduled=False) is None


def test_a_bootstrap_interval_holds_its_median():
    interval = bootstrap_median([1.0, 2.0, 3.0, 4.0, 100.0], seed=1)
    assert interval.median == 3.0
    assert 1.0 <= interval.low <= 3.0 <= interval.high <= 100.0
    assert bootstrap_median([2.0] * 5) == bootstrap_median([2.0] * 9)
    with pytest.raises(ValueError, match="no values"):
        bootstrap_median([])


def test_more_rotations_make_a_narrower_interval():
    few = bootstrap_median([1.0, 2.0, 3.0] * 2, seed=1)
    many = bootstrap_median([1.0, 2.0, 3.0] * 60, seed=1)
    assert many.high - many.low < few.high - few.low


def test_drifting_probes_are_not_steady():
    assert is_steady(100.0, 86.0)
    assert not is_steady(100.0, 84.0)
