"""The stages of a request add up, whatever moments came, in whatever order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.telemetry.metrics import REGISTRY
from baton.telemetry.milestones import Milestone, MilestoneTimer, record_latencies

BEFORE_FIRST = (
    Milestone.TOKENISED,
    Milestone.ADMITTED,
    Milestone.RESERVED,
    Milestone.PREFILL_ACCEPTED,
    Milestone.SEALED,
)


def split_request() -> MilestoneTimer:
    timer = MilestoneTimer(arrived_s=100.0)
    for milestone, at in zip(BEFORE_FIRST, (100.001, 100.002, 100.01, 100.011, 100.2), strict=True):
        timer.stamp(milestone, at)
    timer.on_token(100.201)
    timer.stamp(Milestone.IMPORTED, 100.23)
    timer.on_token(100.25)
    timer.on_token(100.26)
    timer.finish(100.261)
    return timer


def test_a_split_request_has_every_stage():
    timer = split_request()
    stages = timer.stages_ns()
    assert stages == {
        "tokenise": 1_000_000,
        "admit": 1_000_000,
        "queue": 8_000_000,
        "dispatch": 1_000_000,
        "prefill": 189_000_000,
        "send": 1_000_000,
        "import": 29_000_000,
        "decode": 31_000_000,
    }
    assert timer.ttft_ns == 201_000_000
    assert timer.e2e_ns == sum(stages.values())
    assert timer.itl_ns() == [49_000_000, 10_000_000]
    assert timer.path == "split"


def test_a_local_request_has_no_prefill_stage_and_still_adds_up():
    timer = MilestoneTimer(0.0)
    timer.stamp(Milestone.ADMITTED, 1.0)
    timer.stamp(Milestone.RESERVED, 2.0)
    timer.on_token(5.0)
    timer.finish(6.0)
    assert timer.stages_ns() == {
        name: ns * 10**9 for name, ns in (("admit", 1), ("queue", 1), ("send", 3), ("decode", 1))
    }
    assert timer.path == "local"


def test_a_lost_attempt_before_the_first_token_is_a_stage():
    timer = MilestoneTimer(0.0)
    timer.stamp(Milestone.ADMITTED, 1.0)
    timer.stamp(Milestone.RESERVED, 2.0)
    timer.stamp(Milestone.PREFILL_ACCEPTED, 3.0)
    timer.on_retry(10.0)
    timer.stamp(Milestone.RESERVED, 11.0)
    timer.on_token(12.0)
    assert timer.stages_ns() == {
        name: ns * 10**9 for name, ns in (("admit", 1), ("retry", 9), ("queue", 1), ("send", 1))
    }


def test_a_lost_attempt_after_the_first_token_is_a_gap():
    timer = split_request()
    before = timer.stages_ns()
    timer.on_retry(200.0)
    timer.stamp(Milestone.RESERVED, 201.0)
    assert timer.stages_ns() == before


def test_a_request_without_a_token_has_no_ttft():
    timer = MilestoneTimer(0.0)
    timer.stamp(Milestone.ADMITTED, 1.0)
    timer.finish(4.0)
    assert timer.ttft_ns is None
    assert timer.stages_ns() == {"admit": 10**9, "no_token": 3 * 10**9}
    assert timer.num_tokens == 0


times = st.floats(0.0, 1e6, allow_nan=False)


@given(
    arrived=times,
    delays=st.dictionaries(st.sampled_from([*BEFORE_FIRST, Milestone.IMPORTED]), times),
    first=times,
    rest=times,
)
def test_stages_add_up_to_ttft_and_e2e_exactly(arrived, delays, first, rest):
    timer = MilestoneTimer(arrived)
    for milestone, delay in delays.items():
        timer.stamp(milestone, arrived + delay)
    timer.on_token(arrived + first)
    timer.finish(arrived + first + rest)
    stages = timer.stages_ns()
    assert min(stages.values()) >= 0
    assert sum(stages.values()) == timer.e2e_ns
    names = list(stages)
    assert sum(stages[name] for name in names[: names.index("send") + 1]) == timer.ttft_ns


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
    record_latencies(split_request())
    grown = [after - earlier for after, earlier in zip(state(), before, strict=True)]
    assert grown == pytest.approx([0.201, 0.261, 2, 0.049, 0.189])
