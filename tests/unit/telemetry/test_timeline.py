"""The stages of a request add up, whatever moments came, in whatever order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.telemetry.metrics import REGISTRY
from baton.telemetry.timeline import Moment, Timeline, observe

BEFORE_FIRST = (Moment.TOKENISED, Moment.ADMITTED, Moment.PROMISED, Moment.PREFILL_ACCEPTED, Moment.SEALED)


def split_request() -> Timeline:
    timeline = Timeline(arrived_s=100.0)
    for moment, at in zip(BEFORE_FIRST, (100.001, 100.002, 100.01, 100.011, 100.2), strict=True):
        timeline.stamp(moment, at)
    timeline.token(100.201)
    timeline.stamp(Moment.LANDED, 100.23)
    timeline.token(100.25)
    timeline.token(100.26)
    timeline.finish(100.261)
    return timeline


def test_a_split_request_has_every_stage():
    timeline = split_request()
    stages = timeline.stages_ns()
    assert stages == {
        "tokenise": 1_000_000,
        "admit": 1_000_000,
        "queue": 8_000_000,
        "dispatch": 1_000_000,
        "prefill": 189_000_000,
        "send": 1_000_000,
        "land": 29_000_000,
        "decode": 31_000_000,
    }
    assert timeline.ttft_ns == 201_000_000
    assert timeline.e2e_ns == sum(stages.values())
    assert timeline.gaps_ns() == [49_000_000, 10_000_000]
    assert timeline.path == "split"


def test_a_local_request_has_no_prefill_stage_and_still_adds_up():
    timeline = Timeline(0.0)
    timeline.stamp(Moment.ADMITTED, 1.0)
    timeline.stamp(Moment.PROMISED, 2.0)
    timeline.token(5.0)
    timeline.finish(6.0)
    assert timeline.stages_ns() == {
        name: ns * 10**9 for name, ns in (("admit", 1), ("queue", 1), ("send", 3), ("decode", 1))
    }
    assert timeline.path == "local"


def test_a_lost_attempt_before_the_first_token_is_a_stage():
    timeline = Timeline(0.0)
    timeline.stamp(Moment.ADMITTED, 1.0)
    timeline.stamp(Moment.PROMISED, 2.0)
    timeline.stamp(Moment.PREFILL_ACCEPTED, 3.0)
    timeline.retry(10.0)
    timeline.stamp(Moment.PROMISED, 11.0)
    timeline.token(12.0)
    assert timeline.stages_ns() == {
        name: ns * 10**9 for name, ns in (("admit", 1), ("retry", 9), ("queue", 1), ("send", 1))
    }


def test_a_lost_attempt_after_the_first_token_is_a_gap():
    timeline = split_request()
    before = timeline.stages_ns()
    timeline.retry(200.0)
    timeline.stamp(Moment.PROMISED, 201.0)
    assert timeline.stages_ns() == before


def test_a_request_without_a_token_has_no_ttft():
    timeline = Timeline(0.0)
    timeline.stamp(Moment.ADMITTED, 1.0)
    timeline.finish(4.0)
    assert timeline.ttft_ns is None
    assert timeline.stages_ns() == {"admit": 10**9, "no_token": 3 * 10**9}
    assert timeline.num_tokens == 0


times = st.floats(0.0, 1e6, allow_nan=False)


@given(
    arrived=times,
    delays=st.dictionaries(st.sampled_from([*BEFORE_FIRST, Moment.LANDED]), times),
    first=times,
    rest=times,
)
def test_stages_add_up_to_ttft_and_e2e_exactly(arrived, delays, first, rest):
    timeline = Timeline(arrived)
    for moment, delay in delays.items():
        timeline.stamp(moment, arrived + delay)
    timeline.token(arrived + first)
    timeline.finish(arrived + first + rest)
    stages = timeline.stages_ns()
    assert min(stages.values()) >= 0
    assert sum(stages.values()) == timeline.e2e_ns
    names = list(stages)
    assert sum(stages[name] for name in names[: names.index("send") + 1]) == timeline.ttft_ns


def test_observing_records_every_latency_once():
    def sample(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, labels) or 0.0

    def state() -> list[float]:
        return [
            sample("baton_ttft_seconds_sum", path="split"),
            sample("baton_e2e_seconds_sum", path="split"),
            sample("baton_itl_seconds_count", path="split"),
            sample("baton_first_itl_seconds_sum", path="split"),
            sample("baton_request_stage_seconds_sum", stage="prefill"),
        ]

    before = state()
    observe(split_request())
    grown = [after - earlier for after, earlier in zip(state(), before, strict=True)]
    assert grown == pytest.approx([0.201, 0.261, 2, 0.049, 0.189])
