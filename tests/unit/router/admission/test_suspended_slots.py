"""Suspended slots: they leave their places to others, keep order and charges, and come back."""

from __future__ import annotations

import pytest

from baton.domain.errors import Overloaded
from baton.services.router.admission.admission_queue import AdmissionLimits, AdmissionQueue
from baton.services.router.admission.slot import SLOT_BYTES, Slot, SlotSpec
from baton.services.router.admission.tenants import TenantLimits, TenantTable

SPEC = SlotSpec(num_tokens=8, max_tokens=4)
ONE_PLACE = AdmissionLimits(max_running_requests=1)


def resumed(queue: AdmissionQueue, slot: Slot, now: float) -> list[Slot]:
    """Slots that start as `slot` is resumed in a reading that changes nothing else."""
    queue.resume(slot)
    return queue.resize(None, now)


def test_a_suspended_slot_leaves_its_place_and_is_the_next_when_it_is_back():
    queue = AdmissionQueue(ONE_PLACE)
    first, second, third = (queue.admit(SPEC, float(n)) for n in range(3))
    assert queue.suspend(first, 3.0) == [second]
    assert (queue.num_running, queue.num_waiting, queue.num_suspended) == (1, 1, 1)
    assert resumed(queue, first, 4.0) == []
    assert (queue.num_waiting, queue.num_suspended) == (2, 0)
    assert queue.release(second, 5.0) == [first], "it came first"
    assert queue.release(first, 6.0) == [third]


def test_a_free_place_is_taken_at_once():
    queue = AdmissionQueue(ONE_PLACE)
    slot = queue.admit(SPEC, 0.0)
    queue.suspend(slot, 1.0)
    assert queue.ttft_s(SPEC, 1.0) == 0.0, "a newcomer need not wait"
    assert resumed(queue, slot, 2.0) == [slot]


def test_a_waiting_slot_that_is_suspended_is_no_work_before_others():
    queue = AdmissionQueue(AdmissionLimits(1, max_ttft_s=5.0))
    queue.admit(SPEC, 0.0)
    gone = [queue.admit(SPEC, 0.0, force=True) for _ in range(50)]
    with pytest.raises(Overloaded):
        queue.refuse_if_full(SPEC, 1.0)
    for slot in gone:
        assert queue.suspend(slot, 1.0) == []
    queue.refuse_if_full(SPEC, 1.0)
    assert (queue.num_waiting, queue.num_waiting_tokens, queue.num_suspended) == (0, 0, 50)


def test_nothing_is_charged_twice_and_the_rest_is_what_is_expected():
    queue = AdmissionQueue(ONE_PLACE)
    slot = queue.admit(SPEC, 0.0)
    queue.on_tokens(slot, 2, 0, 1.0)
    before, expected = queue.charges(), slot.remaining_charge
    queue.suspend(slot, 2.0)
    blocking = queue.admit(SPEC, 2.0)
    charged = queue.charges()[""] - before[""]
    resumed(queue, slot, 3.0)
    assert queue.tenant("").work == pytest.approx(expected)
    assert queue.release(blocking, 4.0) == [slot]
    assert queue.charges()[""] == before[""] + charged
    queue.on_tokens(slot, 1, 0, 5.0)
    queue.release(slot, 5.0)
    assert slot.num_served_tokens == SPEC.num_tokens + 3
    assert (queue.tenant("").work, queue.tenant("").running) == (0.0, set())


def test_the_time_without_a_place_is_no_service_time():
    queue = AdmissionQueue(ONE_PLACE)
    slot = queue.admit(SPEC, 0.0)
    queue.on_tokens(slot, 1, 0, 1.0)
    queue.suspend(slot, 2.0)
    assert resumed(queue, slot, 502.0) == [slot]
    queue.release(slot, 503.0)
    queue.admit(SPEC, 503.0)
    assert queue.ttft_s(SPEC, 503.0) == pytest.approx(3.0 + 1.0), "three seconds in its place, one to its first token"


def test_a_place_of_its_tenant_is_free_meanwhile():
    queue = AdmissionQueue(AdmissionLimits(4), TenantTable(by_name={"a": TenantLimits(max_slots=1)}))
    first, second = queue.admit(SlotSpec("a", 8, 4), 0.0), queue.admit(SlotSpec("a", 8, 4), 0.0)
    assert not queue.is_running(second)
    assert queue.suspend(first, 1.0) == [second]
    assert resumed(queue, first, 2.0) == []
    assert queue.release(second, 3.0) == [first]


@pytest.mark.parametrize("was_running", [True, False])
def test_the_end_of_a_suspended_slot_leaves_nothing(was_running):
    queue = AdmissionQueue(ONE_PLACE)
    slot = queue.admit(SPEC, 0.0)
    if not was_running:
        slot = queue.admit(SPEC, 0.0)
    queue.suspend(slot, 1.0)
    num_running = queue.num_running
    assert queue.release(slot, 2.0) == queue.release(slot, 2.0) == resumed(queue, slot, 2.0) == []
    assert queue.suspend(slot, 3.0) == []
    assert (queue.num_suspended, queue.num_waiting_bytes, queue.num_running) == (0, 0, num_running)


def test_suspending_and_resuming_twice_changes_nothing():
    queue = AdmissionQueue(ONE_PLACE)
    slot, other = queue.admit(SPEC, 0.0), queue.admit(SPEC, 0.0)
    assert queue.suspend(slot, 1.0) == [other]
    assert queue.suspend(slot, 2.0) == []
    assert resumed(queue, slot, 3.0) == resumed(queue, slot, 3.0) == resumed(queue, other, 3.0) == []
    assert (queue.num_waiting, queue.num_waiting_bytes) == (1, slot.spec.num_bytes)


def test_no_newcomer_makes_a_slot_leave_that_had_begun():
    small = SlotSpec(num_tokens=0)
    queue = AdmissionQueue(AdmissionLimits(1, max_queued_bytes=2 * SLOT_BYTES))
    begun = [queue.admit(small, 0.0) for _ in range(3)]
    for slot in begun:
        queue.suspend(slot, 1.0)
    assert queue.num_waiting_bytes == 0, "as of running ones"
    later = [queue.admit(small, 2.0) for _ in range(3)]
    for slot in begun:
        resumed(queue, slot, 3.0)
    assert queue.shed(3.0) == [later[2], later[1]], "the newest that no client has begun to read"
    assert queue.shed(3.0) == []


def test_those_that_come_back_start_in_as_many_places_as_there_are_then():
    queue = AdmissionQueue(AdmissionLimits(16))
    gone = [queue.admit(SPEC, 0.0) for _ in range(16)]
    for slot in gone:
        queue.suspend(slot, 1.0)
    for slot in gone:
        queue.resume(slot)
    assert queue.resize(2, 2.0) == gone[:2]
    assert (queue.num_running, queue.num_waiting) == (2, 14)


def test_the_order_within_a_tenant_decides_which_of_them_start():
    queue = AdmissionQueue(AdmissionLimits(8))
    low, high = (queue.admit(SlotSpec("a", 8, 4, priority=each), 0.0) for each in (0, 5))
    for slot in (low, high):
        queue.suspend(slot, 5.0)
    for slot in (low, high):
        queue.resume(slot)
    assert queue.resize(1, 6.0) == [high]


def test_a_second_gap_is_one_with_the_first_where_nothing_ran_between():
    queue = AdmissionQueue(ONE_PLACE)
    slot = queue.admit(SPEC, 0.0)
    queue.suspend(slot, 1.0)
    queue.admit(SPEC, 1.0)
    assert resumed(queue, slot, 300.0) == []
    queue.suspend(slot, 301.0)
    queue.release(next(iter(queue.tenant("").running)), 302.0)
    assert resumed(queue, slot, 302.0) == [slot]
    assert slot.started_at == 301.0, "it ran for one second"
