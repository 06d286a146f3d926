"""Order of the fair queue: least service first, lifts, priorities with ageing, caps."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.services.router.admission.fair_queue import FairQueue
from baton.services.router.admission.slot import Slot, SlotSpec, order_of
from baton.services.router.admission.tenants import TenantLimits, TenantTable
from baton.services.router.admission.wait_estimate import Backlog, work_ahead


def pushed(queue: FairQueue, tenant: str, at: float = 0.0, priority: int = 0, num_tokens: int = 10) -> Slot:
    slot = Slot(SlotSpec(tenant, num_tokens, 1, priority), order_of(priority, at))
    queue.push(slot, at)
    return slot


def tenants_in_order(queue: FairQueue, num: int) -> str:
    slots = [queue.pop() for _ in range(num)]
    return "".join(slot.spec.tenant for slot in slots if slot is not None)


def test_tenants_take_turns_however_much_one_has_queued():
    queue = FairQueue(TenantTable())
    for n in range(6):
        pushed(queue, "a", at=float(n))
    for n in range(3):
        pushed(queue, "b", at=10.0 + n)
    assert tenants_in_order(queue, 9) == "abababaaa"


def test_a_tenant_of_twice_the_weight_gets_twice_the_tokens():
    queue = FairQueue(TenantTable(by_name={"a": TenantLimits(weight=2.0)}))
    for n in range(12):
        pushed(queue, "a", at=float(n))
        pushed(queue, "b", at=float(n))
    assert tenants_in_order(queue, 12).count("a") == 8


def test_long_prompts_count_as_their_tokens():
    queue = FairQueue(TenantTable())
    for n in range(20):
        pushed(queue, "a", at=float(n), num_tokens=10)
        pushed(queue, "b", at=float(n), num_tokens=40)
    assert tenants_in_order(queue, 15).count("b") == 3


def test_sleep_earns_nothing():
    queue = FairQueue(TenantTable())
    for n in range(50):
        pushed(queue, "a", at=float(n))
    assert tenants_in_order(queue, 30) == 30 * "a"
    for n in range(20):
        pushed(queue, "b", at=100.0 + n)
    assert tenants_in_order(queue, 20).count("b") == 10


def test_capacity_that_was_idle_is_not_held_against_a_tenant():
    """Alone for a while, then another tenant comes: both get the same from now on."""
    queue = FairQueue(TenantTable())
    for n in range(30):
        pushed(queue, "a", at=float(n))
        assert queue.pop() is not None
    for n in range(10):
        pushed(queue, "b", at=100.0 + n)
        pushed(queue, "a", at=100.0 + n)
    assert tenants_in_order(queue, 10).count("a") == 5


def state(queue: FairQueue) -> object:
    tenants = {name: dataclasses.asdict(replace(tenant, running=set())) for name, tenant in queue.tenants()}
    sums = queue.num_bytes, queue.num_tokens, len(queue), queue.mean_prompt_tokens, queue.total_weight()
    return tenants, sums, queue._floor


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.booleans()), max_size=20))
def test_a_slot_that_starts_at_once_counts_as_one_that_waited(steps: list[tuple[str, int, bool]]):
    table = TenantTable(by_name={"a": TenantLimits(weight=2.0)})
    waited, started = FairQueue(table), FairQueue(table)
    for number, (tenant, num_tokens, leaves) in enumerate(steps):
        at = float(number)
        one = pushed(waited, tenant, at, num_tokens=num_tokens)
        assert waited.pop() is one
        other = Slot(SlotSpec(tenant, num_tokens, 1, 0), order_of(0, at))
        started.start(other, at)
        assert (one.charged, one.expected_charge) == (other.charged, other.expected_charge)
        for queue, slot in ((waited, one), (started, other)):
            assert slot in queue.tenant(tenant).running
            if leaves:
                queue.leave(slot)
        assert state(waited) == state(started)


def test_a_higher_priority_starts_first_within_its_tenant_only():
    queue = FairQueue(TenantTable())
    late = pushed(queue, "a", at=5.0, priority=1)
    early = pushed(queue, "a", at=0.0)
    other = pushed(queue, "b", at=0.0)
    assert [queue.pop() for _ in range(3)] == [late, other, early]
    queue = FairQueue(TenantTable())
    early, late = pushed(queue, "a", at=0.0), pushed(queue, "a", at=5.0, priority=1)
    assert [queue.pop(), queue.pop()] == [late, early]


def test_a_low_priority_ages_and_does_not_starve():
    queue = FairQueue(TenantTable())
    low = pushed(queue, "a", at=0.0, priority=-3)
    for n in range(100):
        pushed(queue, "a", at=float(n), priority=3)
    position = next(n for n in range(101) if queue.pop() is low)
    assert position == 60


def test_a_capped_tenant_holds_up_no_other():
    queue = FairQueue(TenantTable(by_name={"a": TenantLimits(max_slots=1)}))
    first = pushed(queue, "a")
    for n in range(3):
        pushed(queue, "a", at=1.0 + n)
        pushed(queue, "b", at=1.0 + n)
    assert tenants_in_order(queue, 9) == "abbb"
    queue.leave(first)
    assert tenants_in_order(queue, 1) == "a"


def test_tokens_that_other_routers_served_are_charged_once_by_weight():
    queue = FairQueue(TenantTable(by_name={"a": TenantLimits(weight=2.0)}))
    queue.add_remote("a", 40.0)
    queue.add_remote("b", 40.0)
    assert (queue.tenant("a").service, queue.tenant("b").service) == (20.0, 40.0)
    assert queue.tenant("a").total_charge == 0.0  # our own tokens only: others would count them again


def test_service_of_other_routers_counts():
    queue = FairQueue(TenantTable())
    for n in range(8):
        pushed(queue, "a", at=float(n))
        pushed(queue, "b", at=float(n))
    queue.add_remote("a", 40.0)
    assert tenants_in_order(queue, 4) == "bbbb"


@pytest.mark.parametrize(
    ("own", "others", "ahead"),
    [
        ((30, 1, 0), [], 30),
        ((30, 1, 0), [(100, 1, 0)], 60),
        ((30, 1, 0), [(10, 1, 0)], 40),
        ((30, 1, 0), [(100, 2, 0)], 90),
        ((30, 1, 0), [(100, 1, 20)], 40),
        ((0, 1, 50), [(100, 1, 20)], 30),
        ((0, 1, 0), [(1000, 1, 0)], 0),
    ],
)
def test_work_ahead_is_the_own_queue_and_what_others_get_meanwhile(own, others, ahead):
    assert work_ahead(Backlog(*own), [Backlog(*other) for other in others]) == ahead


def test_who_comes_back_starts_at_the_least_service_of_those_that_wait():
    queue = FairQueue(TenantTable())
    pushed(queue, "behind")
    pushed(queue, "ahead")
    queue.add_remote("behind", 30.0)
    queue.add_remote("ahead", 100.0)
    pushed(queue, "back")
    assert queue.tenant("back").service == 30.0
