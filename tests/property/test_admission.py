"""The admission queue under any sequence of calls: order, bounds, fair shares, and no slot lost."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.domain.errors import Overloaded
from baton.services.router.admission.admission_queue import (
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    AdmissionLimits,
    AdmissionQueue,
)
from baton.services.router.admission.slot import OUTPUT_CHARGE, SLOT_BYTES, Slot, SlotSpec, order_of
from baton.services.router.admission.tenants import TenantLimits, TenantTable

LIMITS = AdmissionLimits(max_running_requests=2, max_queued_bytes=6 * SLOT_BYTES)
TENANTS = TenantTable(by_name={"heavy": TenantLimits(weight=2.0), "capped": TenantLimits(max_slots=1, max_priority=0)})
NAMES = st.sampled_from(["", "heavy", "capped"])


class AdmissionQueueMachine(RuleBasedStateMachine):
    """Compares the queue with plain lists."""

    @initialize(max_ttft_s=st.sampled_from([5.0, 100.0]))
    def start(self, max_ttft_s: float) -> None:
        self.max_ttft_s = max_ttft_s
        limits = AdmissionLimits(LIMITS.max_running_requests, max_ttft_s, LIMITS.max_queued_bytes)
        self.queue = AdmissionQueue(limits, TENANTS)
        self.waiting: list[Slot] = []
        self.running: list[Slot] = []
        self.gone: list[Slot] = []
        self.served: dict[str, float] = {}
        self.now = 0.0
        self.num_places = LIMITS.max_running_requests

    def started(self, granted: list[Slot]) -> None:
        """Checks the order within each tenant, and moves the slots."""
        for slot in granted:
            rivals = [other for other in self.waiting if other.spec.tenant == slot.spec.tenant]
            assert slot.order == min(other.order for other in rivals)
            self.waiting.remove(slot)
            self.running.append(slot)
            self.served[slot.spec.tenant] = self.served.get(slot.spec.tenant, 0.0) + slot.spec.num_tokens

    def is_free(self, tenant: str) -> bool:
        num_own = sum(slot.spec.tenant == tenant for slot in self.running)
        return len(self.running) < self.num_places and num_own < (TENANTS.limits_of(tenant).max_slots or 99)

    @rule(seconds=st.floats(0.0, 1000.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(tenant=NAMES, num_tokens=st.integers(1, 300), priority=st.integers(-5, 5), force=st.booleans())
    def admit(self, tenant: str, num_tokens: int, priority: int, force: bool) -> None:
        starts_at_once, spec = self.is_free(tenant), SlotSpec(tenant, num_tokens, 9, priority)
        ttft_s = self.queue.ttft_s(spec, self.now)
        slot: Slot | None = None
        try:
            slot = self.queue.admit(spec, self.now, force=force)
        except Overloaded as refusal:
            retry_after_s = refusal.retry_after_s
        else:
            retry_after_s = None
        if slot is None:
            assert not starts_at_once
            assert not force
            assert retry_after_s is not None
            assert MIN_RETRY_AFTER_S <= retry_after_s <= MAX_RETRY_AFTER_S
            return
        assert starts_at_once or force or ttft_s <= self.max_ttft_s
        most = min(3, TENANTS.limits_of(tenant).max_priority)
        assert slot.order == order_of(min(max(priority, -3), most), self.now)
        self.waiting.append(slot)
        if starts_at_once:
            self.started([slot])
        for dropped in self.queue.shed(self.now):
            assert dropped.refusal is not None
            self.waiting.remove(dropped)
            self.gone.append(dropped)

    @rule(num_rows=st.none() | st.integers(1, 4))
    def workers_come_and_go(self, num_rows: int | None) -> None:
        self.num_places = min(num_rows or 9, LIMITS.max_running_requests)
        self.started(self.queue.resize(num_rows, self.now))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 5), num_cached=st.integers(0, 400))
    def a_running_one_gives_tokens(self, data: st.DataObject, num_tokens: int, num_cached: int) -> None:
        slot = data.draw(st.sampled_from(self.running))
        if not slot.has_first_token:
            self.served[slot.spec.tenant] -= min(num_cached, slot.spec.num_tokens)
        self.served[slot.spec.tenant] += OUTPUT_CHARGE * num_tokens
        self.queue.on_tokens(slot, num_tokens, num_cached, self.now)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_running_one_leaves(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.running))
        self.running.remove(slot)
        self.gone.append(slot)
        self.started(self.queue.release(slot, self.now))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_waiting_one_leaves(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(slot)
        self.gone.append(slot)
        assert self.queue.release(slot, self.now) == []

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def leaving_twice_changes_nothing(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.gone))
        assert self.queue.release(slot, self.now) == []
        self.queue.on_tokens(slot, 3, 0, self.now)

    @invariant()
    def nobody_is_lost(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert self.queue.num_waiting == len(self.waiting)
        assert self.queue.num_running == len(self.running) <= LIMITS.max_running_requests
        assert self.queue.num_waiting_tokens == sum(slot.spec.num_tokens for slot in self.waiting)
        assert all(self.queue.is_running(slot) for slot in self.running)
        assert not any(self.queue.is_running(slot) for slot in (*self.waiting, *self.gone))

    @invariant()
    def memory_is_bounded(self) -> None:
        if not hasattr(self, "queue"):
            return
        num_bytes = sum(slot.spec.num_bytes for slot in self.waiting)
        assert self.queue.num_waiting_bytes == num_bytes
        assert num_bytes <= LIMITS.max_queued_bytes or all(slot.forced for slot in self.waiting)

    @invariant()
    def the_queue_is_work_conserving(self) -> None:
        if hasattr(self, "queue"):
            assert not any(self.is_free(slot.spec.tenant) for slot in self.waiting)

    @invariant()
    def charges_are_the_tokens_served(self) -> None:
        if hasattr(self, "queue"):
            charges = {name: charge for name, charge in self.queue.charges().items() if charge}
            assert charges == {name: charge for name, charge in self.served.items() if charge}


AdmissionQueueMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestAdmissionQueue = AdmissionQueueMachine.TestCase
