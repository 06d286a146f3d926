"""Bounds, order and Retry-After times of the admission queue."""

from __future__ import annotations

import math

import pytest

from baton.domain.errors import Overloaded
from baton.services.router.admission.admission_queue import AdmissionLimits, AdmissionQueue
from baton.services.router.admission.slot import SLOT_BYTES, TOKEN_BYTES, Slot, SlotSpec
from baton.services.router.admission.tenants import TenantLimits, TenantTable

ONE_AT_A_TIME = AdmissionLimits(max_running_requests=1, max_ttft_s=25.0)
SPEC = SlotSpec(num_tokens=8, max_tokens=1)
"""Charged 10 tokens."""


def refused_after(
    queue: AdmissionQueue, now: float, deadline_s: float = math.inf, spec: SlotSpec = SPEC
) -> float | None:
    with pytest.raises(Overloaded) as refusal:
        queue.admit(spec, now, deadline_s)
    return refusal.value.retry_after_s


def end(queue: AdmissionQueue, slot: Slot, now: float) -> list[Slot]:
    queue.on_tokens(slot, 1, 0, slot.started_at or 0.0)
    return queue.release(slot, now)


def run_one_by_one(queue: AdmissionQueue, service_time_s: float, num: int) -> Slot:
    """Runs `num` requests one after the other, with one always waiting; returns the running one."""
    running = queue.admit(SPEC, now=0.0)
    for n in range(num):
        waiting = queue.admit(SPEC, now=n * service_time_s)
        assert end(queue, running, now=(n + 1) * service_time_s) == [waiting]
        running = waiting
    return running


def test_the_queue_is_bounded_by_the_wait_and_not_by_a_count():
    """600 requests of 13 ms each wait less than the 25 s that are allowed."""
    queue = AdmissionQueue(ONE_AT_A_TIME)
    run_one_by_one(queue, 0.013, 64)
    for _ in range(600):
        queue.admit(SPEC, now=0.833)
    assert queue.num_waiting == 600
    assert queue.ttft_s(SPEC, 0.833) == pytest.approx(601 * 0.013, rel=0.01)


def test_retry_after_is_the_excess_over_the_allowed_wait():
    queue = AdmissionQueue(ONE_AT_A_TIME)
    run_one_by_one(queue, 10.0, 3)
    queue.admit(SPEC, now=30.0)
    queue.admit(SPEC, now=30.0)
    assert refused_after(queue, now=30.0) == pytest.approx(5.0)
    assert refused_after(queue, now=30.0, deadline_s=3.0, spec=SlotSpec("other")) == pytest.approx(7.0)


def test_who_returns_after_retry_after_is_admitted():
    queue = AdmissionQueue(ONE_AT_A_TIME)
    running = run_one_by_one(queue, 10.0, 3)
    for _ in range(2):
        queue.admit(SPEC, now=30.0)
    assert refused_after(queue, now=30.0) == pytest.approx(5.0)
    (running,) = end(queue, running, now=35.0)  # sooner than the mean, for once
    queue.admit(SPEC, now=35.0)


def test_retry_after_times_are_spread_at_the_rate_of_the_tenant():
    queue = AdmissionQueue(ONE_AT_A_TIME)
    run_one_by_one(queue, 10.0, 3)
    queue.admit(SPEC, now=30.0)
    queue.admit(SPEC, now=30.0)
    times = [refused_after(queue, now=30.0) for _ in range(3)]
    assert times == pytest.approx([5.0, 16.0, 27.0])
    assert [refused_after(queue, now=30.0) for _ in range(20)][-1] == 120.0
    other = SlotSpec("other", 8, 1)
    assert refused_after(queue, 30.0, 9.0, other) == pytest.approx(1.0), "the refusals of others do not count"


def test_retry_after_grows_within_bounds_while_none_leaves():
    for now, expected in [(0.5, 1.0), (30.0, 35.0), (60.0, 95.0), (10_000.0, 120.0)]:
        queue = AdmissionQueue(ONE_AT_A_TIME)
        for _ in range(2):
            queue.admit(SPEC, now=0.0)
        assert refused_after(queue, now=now, deadline_s=min(25.0, now)) == pytest.approx(expected, abs=1.0)


def test_a_standstill_raises_the_estimate():
    queue = AdmissionQueue(ONE_AT_A_TIME)
    run_one_by_one(queue, 1.0, 64)
    assert queue.ttft_s(SPEC, now=64.0) == pytest.approx(1.0)
    assert queue.ttft_s(SPEC, now=164.0) == pytest.approx(50.0)


def test_service_times_outlive_an_idle_hour():
    queue = AdmissionQueue(ONE_AT_A_TIME)
    end(queue, run_one_by_one(queue, 10.0, 4), now=50.0)
    for _ in range(2):
        queue.admit(SPEC, now=3600.0)
    assert queue.ttft_s(SPEC, now=3600.0) == pytest.approx(20.0)


def test_the_estimate_includes_the_first_token_and_the_deadline():
    queue = AdmissionQueue(ONE_AT_A_TIME)
    running = run_one_by_one(queue, 10.0, 4)  # four first tokens came at once
    queue.on_tokens(running, 1, 0, now=44.0)  # and this one's after 4 s
    queue.on_tokens(running, 1, 0, now=49.0)  # not its first
    ttft_s = 10.0 + 4.0 / 5
    assert refused_after(queue, now=44.0, deadline_s=ttft_s - 2.0) == pytest.approx(2.0)
    queue.admit(SPEC, now=44.0, deadline_s=ttft_s + 0.1)


def test_a_forced_request_is_never_refused():
    queue = AdmissionQueue(AdmissionLimits(1, 0.1, SLOT_BYTES))
    for _ in range(3):
        assert queue.admit(SPEC, now=0.0, force=True).refusal is None
    assert queue.shed(now=0.0) == [], "nor does it leave for want of memory"
    assert queue.num_waiting == 2


def test_running_slots_never_exceed_the_rows():
    queue = AdmissionQueue(AdmissionLimits(max_running_requests=3))
    assert queue.resize(1, now=0.0) == []
    slots = [queue.admit(SPEC, now=0.0) for _ in range(5)]
    assert [queue.is_running(slot) for slot in slots] == [True, False, False, False, False]
    assert queue.resize(2, now=1.0) == [slots[1]]
    assert queue.resize(9, now=1.0) == [slots[2]], "the setting bounds it"
    assert queue.resize(1, now=1.0) == []
    assert queue.release(slots[0], now=2.0) == [], "two still run where one may"
    assert queue.resize(None, now=2.0) == [slots[3]]


def test_full_memory_drops_the_newest_of_the_longest_queue():
    one = SLOT_BYTES + TOKEN_BYTES * SPEC.num_tokens
    queue = AdmissionQueue(AdmissionLimits(1, max_queued_bytes=4 * one))
    flood, steady = SlotSpec("flood", 8, 1), SlotSpec("steady", 8, 1)
    queue.admit(SPEC, now=0.0)
    flooded = [queue.admit(flood, now=float(n)) for n in range(4)]
    with pytest.raises(Overloaded):
        queue.admit(flood, now=5.0)
    newcomer = queue.admit(steady, now=5.0)
    assert queue.shed(now=5.0) == [flooded[3]]
    assert flooded[3].refusal is not None
    assert 1.0 <= (flooded[3].refusal.retry_after_s or 0.0) <= 120.0
    assert newcomer.refusal is None
    assert queue.num_waiting_bytes == 4 * one


def test_a_tenant_gets_no_more_places_than_its_own_limit():
    tenants = TenantTable(by_name={"capped": TenantLimits(max_slots=1)})
    queue = AdmissionQueue(AdmissionLimits(3), tenants)
    capped = [queue.admit(SlotSpec("capped", 8, 1), now=0.0) for _ in range(2)]
    free = [queue.admit(SlotSpec("free", 8, 1), now=0.0) for _ in range(2)]
    assert [queue.is_running(slot) for slot in (*capped, *free)] == [True, False, True, True]
    assert queue.release(free[0], now=1.0) == []
    assert queue.release(capped[0], now=1.0) == [capped[1]]


def test_a_flood_fills_its_own_horizon_only():
    queue = AdmissionQueue(AdmissionLimits(1, max_ttft_s=25.0))
    run_one_by_one(queue, 10.0, 4)
    flood = SlotSpec("flood", 8, 1)
    for _ in range(2):
        queue.admit(flood, now=40.0)
    with pytest.raises(Overloaded):
        queue.admit(flood, now=40.0)
    assert queue.ttft_s(SlotSpec("steady", 8, 1), now=40.0) <= 20.0
    queue.admit(SlotSpec("steady", 8, 1), now=40.0)


def test_cached_prompt_tokens_are_given_back_once():
    queue = AdmissionQueue(AdmissionLimits(1))
    slot = queue.admit(SlotSpec("t", 100, 9), now=0.0)
    assert queue.tenant("t").service == 100
    queue.on_tokens(slot, 1, 96, now=1.0)
    queue.on_tokens(slot, 2, 96, now=2.0)
    assert queue.tenant("t").service == 4 + 2 * 3
    queue.release(slot, now=3.0)
    queue.on_tokens(slot, 2, 0, now=4.0)
    assert queue.charges() == {"t": 10.0}
