"""The admission queue under any sequence of calls: order, bounds, and no slot lost."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.domain.errors import Overloaded
from services.router.dispatch.admission_queue import (
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    AdmissionLimits,
    AdmissionQueue,
    Slot,
)

LIMITS = AdmissionLimits(max_running_requests=2, max_queued_requests=3, max_queued_tokens=8)


class AdmissionQueueMachine(RuleBasedStateMachine):
    """Compares the queue with two plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = AdmissionQueue(LIMITS)
        self.waiting: list[Slot] = []
        self.running: list[Slot] = []
        self.gone: list[Slot] = []
        self.now = 0.0
        self.num_slots = LIMITS.max_running_requests
        self.retry_after_s = 0.0

    @rule(seconds=st.floats(0.0, 1000.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(num_tokens=st.integers(1, 10))
    def admit(self, num_tokens: int) -> None:
        starts_at_once = len(self.running) < self.num_slots
        fits = (
            len(self.waiting) < LIMITS.max_queued_requests
            and sum(slot.num_tokens for slot in self.waiting) + num_tokens <= LIMITS.max_queued_tokens
        )
        slot = self._try(num_tokens)
        if slot is None:
            assert not starts_at_once
            assert not fits
            assert MIN_RETRY_AFTER_S <= self.retry_after_s <= MAX_RETRY_AFTER_S
            return
        assert starts_at_once or fits
        (self.running if starts_at_once else self.waiting).append(slot)

    def _try(self, num_tokens: int) -> Slot | None:
        try:
            return self.queue.admit(num_tokens, self.now)
        except Overloaded as refusal:
            self.retry_after_s = refusal.retry_after_s or 0.0
            return None

    @rule(num_rows=st.none() | st.integers(1, 4))
    def workers_come_and_go(self, num_rows: int | None) -> None:
        self.num_slots = min(num_rows or 9, LIMITS.max_running_requests)
        granted = self.queue.resize(num_rows, self.now)
        free = max(0, self.num_slots - len(self.running))
        assert granted == self.waiting[:free], "first come, first served"
        self.running += granted
        del self.waiting[:free]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_running_one_leaves(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.running))
        self.running.remove(slot)
        self.gone.append(slot)
        granted = self.queue.release(slot, self.now)
        is_free = len(self.running) < self.num_slots
        expected = self.waiting.pop(0) if self.waiting and is_free else None
        assert granted == expected, "first come, first served"
        if granted is not None:
            self.running.append(granted)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_waiting_one_leaves(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(slot)
        self.gone.append(slot)
        assert self.queue.release(slot, self.now) is None

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def leaving_twice_changes_nothing(self, data: st.DataObject) -> None:
        assert self.queue.release(data.draw(st.sampled_from(self.gone)), self.now) is None

    @invariant()
    def nobody_is_lost(self) -> None:
        assert self.queue.num_waiting == len(self.waiting) <= LIMITS.max_queued_requests
        assert self.queue.num_running == len(self.running) <= LIMITS.max_running_requests
        tokens = sum(slot.num_tokens for slot in self.waiting)
        assert self.queue.num_waiting_tokens == tokens <= LIMITS.max_queued_tokens
        assert all(self.queue.is_running(slot) for slot in self.running)
        assert not any(self.queue.is_running(slot) for slot in (*self.waiting, *self.gone))

    @invariant()
    def nobody_waits_without_need(self) -> None:
        assert not self.waiting or len(self.running) >= self.num_slots


AdmissionQueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAdmissionQueue = AdmissionQueueMachine.TestCase
