"""Bounds, order and Retry-After times of the admission queue."""

from __future__ import annotations

import math

import pytest

from baton.domain.errors import Overloaded
from services.router.dispatch.admission_queue import AdmissionLimits, AdmissionQueue, Slot

ONE_AT_A_TIME = AdmissionLimits(max_running_requests=1, max_queued_requests=2, max_queued_tokens=100)


def refused_after(queue: AdmissionQueue, num_tokens: int, now: float, deadline_s: float = math.inf) -> float | None:
    with pytest.raises(Overloaded) as refusal:
        queue.admit(num_tokens, now, deadline_s)
    return refusal.value.retry_after_s


def run_one_by_one(queue: AdmissionQueue, service_time_s: float, num: int) -> Slot:
    """Runs `num` requests one after the other, with one always waiting; returns the running one."""
    running = queue.admit(1, now=0.0)
    for n in range(num):
        waiting = queue.admit(10, now=n * service_time_s)
        assert queue.release(running, now=(n + 1) * service_time_s) == waiting
        running = waiting
    return running


def test_a_prompt_larger_than_the_queue_still_runs_when_nobody_is_running():
    queue = AdmissionQueue(ONE_AT_A_TIME)
    assert queue.is_running(queue.admit(1000, now=0.0))


def test_the_queue_is_bounded_in_tokens_before_it_is_bounded_in_requests():
    queue = AdmissionQueue(ONE_AT_A_TIME)
    queue.admit(1, now=0.0)
    queue.admit(60, now=0.0)
    assert refused_after(queue, 41, now=0.0) == 1.0
    queue.admit(40, now=0.0)
    assert queue.num_waiting_tokens == 100


@pytest.mark.parametrize(("num_tokens", "num_blocking"), [(10, 1), (60, 2), (101, 3)])
def test_retry_after_covers_the_requests_ahead(num_tokens, num_blocking):
    queue = AdmissionQueue(ONE_AT_A_TIME)
    run_one_by_one(queue, 10.0, 3)
    queue.admit(50, now=30.0)
    queue.admit(50, now=30.0)
    assert refused_after(queue, num_tokens, now=30.0) == pytest.approx(num_blocking * 10.0)


def test_retry_after_times_are_spread():
    queue = AdmissionQueue(ONE_AT_A_TIME)
    run_one_by_one(queue, 10.0, 3)
    queue.admit(1, now=30.0)
    queue.admit(1, now=30.0)
    assert [refused_after(queue, 1, now=30.0) for _ in range(3)] == [10.0, 21.0, 32.0]
    assert refused_after(queue, 1, now=35.0) == 38.0
    assert [refused_after(queue, 1, now=35.0) for _ in range(20)][-1] == 120.0
    assert refused_after(queue, 1, now=160.0) == 65.0, "a spread in the past has no effect"


def test_retry_after_grows_within_bounds_while_none_leaves():
    for now, expected in [(0.5, 1.0), (30.0, 30.0), (60.0, 60.0), (10_000.0, 120.0)]:
        queue = AdmissionQueue(ONE_AT_A_TIME)
        for _ in range(3):
            queue.admit(1, now=0.0)
        assert refused_after(queue, 1, now=now) == expected


def test_a_standstill_raises_the_estimate():
    queue = AdmissionQueue(ONE_AT_A_TIME)
    run_one_by_one(queue, 1.0, 64)
    queue.admit(1, now=64.0)
    queue.admit(1, now=64.0)
    assert refused_after(queue, 1, now=164.0) == pytest.approx(50.0)


def test_service_times_outlive_an_idle_hour():
    queue = AdmissionQueue(ONE_AT_A_TIME)
    queue.release(run_one_by_one(queue, 10.0, 4), now=50.0)
    for _ in range(3):
        queue.admit(1, now=3600.0)
    assert refused_after(queue, 1, now=3600.0) == pytest.approx(10.0)


def test_a_late_request_is_refused_before_the_queue_is_full():
    queue = AdmissionQueue(AdmissionLimits(1, 100, 1000, max_ttft_s=25.0))
    run_one_by_one(queue, 10.0, 4)
    queue.admit(1, now=40.0)  # its turn comes in 10 s
    queue.admit(1, now=40.0)  # and this one's in 20 s
    assert refused_after(queue, 1, now=40.0) == pytest.approx(5.0)
    assert queue.num_waiting == 2


def test_the_estimate_includes_the_first_token_and_the_deadline():
    queue = AdmissionQueue(AdmissionLimits(1, 100, 1000))
    running = run_one_by_one(queue, 10.0, 4)
    queue.on_first_token(running, now=44.0)
    queue.on_first_token(running, now=49.0)  # not its first
    assert refused_after(queue, 1, now=44.0, deadline_s=13.0) == pytest.approx(1.0)
    queue.admit(1, now=44.0, deadline_s=14.5)


def test_a_full_queue_refuses_before_the_prompt_is_known():
    queue = AdmissionQueue(ONE_AT_A_TIME)
    queue.admit(1, now=0.0)
    queue.refuse_if_full(now=0.0)
    queue.admit(50, now=0.0)
    queue.admit(50, now=0.0)
    with pytest.raises(Overloaded):
        queue.refuse_if_full(now=0.0)


def test_a_forced_request_is_never_refused():
    queue = AdmissionQueue(ONE_AT_A_TIME)
    for _ in range(3):
        queue.admit(50, now=0.0)
    assert not queue.is_running(queue.admit(100, now=0.0, force=True))
    assert queue.num_waiting == 3


def test_running_slots_never_exceed_the_rows():
    queue = AdmissionQueue(AdmissionLimits(max_running_requests=3, max_queued_requests=9, max_queued_tokens=100))
    assert queue.resize(1, now=0.0) == []
    slots = [queue.admit(1, now=0.0) for _ in range(5)]
    assert [queue.is_running(slot) for slot in slots] == [True, False, False, False, False]
    assert queue.resize(2, now=1.0) == [slots[1]]
    assert queue.resize(9, now=1.0) == [slots[2]], "the setting bounds it"
    assert queue.resize(1, now=1.0) == []
    assert queue.release(slots[0], now=2.0) is None, "two still run where one may"
    assert queue.resize(None, now=2.0) == [slots[3]]
