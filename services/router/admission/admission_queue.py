"""Decides which requests run, which wait and which are refused. Owned by `dispatch.admission`; pure.

At most as many requests run as the workers have rows. `FairQueue` chooses the next one. The queue is bounded in time: a
request whose first token would come too late is refused at once. It is bounded in memory too: when it is full, the
newest requests of the tenant with the longest queue leave it. The caller wakes a request that may run.

    admit --> waiting --(a running one leaves)--> running --> release
      |          |----------------------------------------------^
      |          |-> shed (memory)                              |
      |          `-> suspended, from running, too: its workers are gone. `resume` lets it wait again
      `-> Overloaded(retry_after_s)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from baton.domain.errors import Overloaded
from baton.services.router.admission.fair_queue import FairQueue, TenantQueue
from baton.services.router.admission.slot import OUTPUT_CHARGE, Slot, SlotSpec, order_of
from baton.services.router.admission.tenants import TenantTable
from baton.services.router.admission.wait_estimate import RetryAfterSpread, WaitEstimator, fair_wait_s

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 120.0


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of the running and the waiting requests.

    `max_ttft_s`: largest estimated time to the first token of a request that may wait. `max_queued_bytes`: memory of
    all waiting requests.
    """

    max_running_requests: int
    max_ttft_s: float = math.inf
    max_queued_bytes: int = 256 * 1024 * 1024


class AdmissionQueue:
    """Slots of all admitted requests. One waits only while all places, or all of its tenant's, are taken."""

    def __init__(self, limits: AdmissionLimits, tenants: TenantTable | None = None) -> None:
        self._limits = limits
        self._tenants = tenants or TenantTable()
        self._num_places = limits.max_running_requests
        self._fair_queue = FairQueue(self._tenants)
        self._running: set[Slot] = set()
        self._wait_estimator = WaitEstimator()
        self._spreads: dict[str, RetryAfterSpread] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._fair_queue)

    @property
    def num_waiting_tokens(self) -> int:
        return self._fair_queue.num_tokens

    @property
    def num_waiting_bytes(self) -> int:
        """Memory of the waiting requests, as `SlotSpec` counts it."""
        return self._fair_queue.num_bytes

    @property
    def mean_prompt_tokens(self) -> float:
        """Mean prompt of the requests that were admitted lately, in tokens; 0 before the first one."""
        return self._fair_queue.mean_prompt_tokens

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_suspended(self) -> int:
        return self._fair_queue.num_suspended

    def tenant(self, name: str) -> TenantQueue:
        """The waiting requests and the service of one tenant. Read only."""
        return self._fair_queue.tenant(name)

    def charges(self) -> dict[str, float]:
        """Tokens charged on this router, by tenant, since its start."""
        return {name: tenant.total_charge for name, tenant in self._fair_queue.tenants()}

    def add_remote(self, tenant: str, charge: float) -> None:
        """Adds tokens that another router has served to a tenant since the last call for that router."""
        self._fair_queue.add_remote(tenant, charge)

    def ttft_s(self, spec: SlotSpec, now: float) -> float:
        """Estimated time to the first token of a request that arrives now; 0 plus its prefill if it need not wait."""
        spec = self._clamped(spec)
        first_token_s = self._wait_estimator.first_token_s()
        return first_token_s if self._starts_at_once(spec) else self._wait_s(spec, now) + first_token_s

    def resize(self, num_rows: int | None, now: float) -> list[Slot]:
        """Sets the rows of all workers (None: unknown) and returns the slots that start because of it."""
        most = self._limits.max_running_requests
        self._num_places = most if num_rows is None else max(1, min(num_rows, most))
        return self._start_next(now)

    def refuse_if_full(self, spec: SlotSpec, now: float, deadline_s: float = math.inf) -> None:
        """Raises `Overloaded` if the request cannot be admitted now. `deadline_s`: the time that it has."""
        self._refuse_if_full(self._clamped(spec), now, deadline_s)

    def _refuse_if_full(self, spec: SlotSpec, now: float, deadline_s: float) -> None:
        """`spec`: clamped."""
        if self._starts_at_once(spec):
            return
        ttft_s = self.ttft_s(spec, now)
        excess_s = ttft_s - min(deadline_s, self._limits.max_ttft_s)
        memory_full = self.num_waiting_bytes + spec.num_bytes > self._limits.max_queued_bytes
        if excess_s > 0 or (memory_full and self._fair_queue.holds_most(spec)):
            own = self.tenant(spec.tenant)
            queue = f"{len(own.waiting)} requests with {own.num_tokens} prompt tokens are waiting"
            why = f"{queue}, and a first token would probably take {ttft_s:.1f} s"
            raise Overloaded(why, retry_after_s=self._retry_after_s(spec, max(0.0, excess_s), now))

    def admit(self, spec: SlotSpec, now: float, deadline_s: float = math.inf, *, force: bool = False) -> Slot:
        """Returns a slot, running or waiting. Raises `Overloaded`, unless `force`. Then call `shed`."""
        spec = self._clamped(spec)
        if not force:
            self._refuse_if_full(spec, now, deadline_s)
        slot = Slot(spec, order_of(spec.priority, now), force)
        if not self.num_waiting and self._starts_at_once(spec):
            self._fair_queue.start(slot, now)
            self._begin(slot, now)
        else:
            self._fair_queue.push(slot, now)
            self._start_next(now)
        return slot

    def shed(self, now: float) -> list[Slot]:
        """Removes the newest slots of the longest queues until the rest fits into memory, and returns them."""
        removed: list[Slot] = []
        while self.num_waiting_bytes > self._limits.max_queued_bytes:
            slot = self._fair_queue.last_of_longest()
            if slot is None:
                break
            self._fair_queue.discard(slot)
            why = "the queue is full, and this tenant holds the most of it"
            slot.refusal = Overloaded(why, retry_after_s=self._retry_after_s(slot.spec, 0.0, now))
            removed.append(slot)
        return removed

    def is_running(self, slot: Slot) -> bool:
        """True unless the slot waits, is suspended or was released."""
        return slot in self._running

    def is_waiting(self, slot: Slot) -> bool:
        """True if the slot waits for its place."""
        return slot in self._fair_queue

    def suspend(self, slot: Slot, now: float) -> list[Slot]:
        """Takes out a slot that runs or waits, and that nothing can serve, until `resume`. Returns those that start.

        It keeps its order and its charges. No newcomer makes it leave after that: its client may have tokens.
        """
        if slot in self._running and slot.started_at is not None:
            self._running.remove(slot)
            self._wait_estimator.on_suspend(slot.started_at)
        elif slot not in self._fair_queue:
            return []
        self._fair_queue.suspend(slot)
        slot.forced = True
        if slot.suspended_at is None:  # it may wait since it was resumed: all that is one gap
            slot.suspended_at = now
        return self._start_next(now)

    def resume(self, slot: Slot) -> None:
        """Lets a suspended slot wait for a place again, before later ones of its tenant. `resize` starts what may run.

        Not this: the number of places follows once all are known that wait, and so do shares and priorities.
        """
        self._fair_queue.resume(slot)

    def on_tokens(self, slot: Slot, num_tokens: int, num_cached_tokens: int, now: float) -> None:
        """Charges output tokens. The first call gives back the prompt tokens that were cached."""
        if slot not in self._running or slot.started_at is None:
            return
        charge = OUTPUT_CHARGE * num_tokens
        if not slot.has_first_token:
            slot.has_first_token = True
            self._wait_estimator.on_first_token(slot.started_at, now)
            charge -= min(num_cached_tokens, slot.spec.num_tokens)
            slot.first_token_at = now
        slot.last_tokens_at = now
        slot.num_output_tokens += num_tokens
        self._fair_queue.charge(slot, charge)

    def release(self, slot: Slot, now: float) -> list[Slot]:
        """Frees a slot, in any state, and returns the slots that start because of it. Idempotent."""
        if slot in self._running and slot.started_at is not None:
            self._running.remove(slot)
            self._fair_queue.leave(slot)
            self._wait_estimator.on_release(slot.started_at, slot.expected_charge, now)
            return self._start_next(now)
        self._fair_queue.discard(slot)
        return []

    def _clamped(self, spec: SlotSpec) -> SlotSpec:
        priority = self._tenants.limits_of(spec.tenant).clamp(spec.priority)
        return spec if priority == spec.priority else replace(spec, priority=priority)

    def _starts_at_once(self, spec: SlotSpec) -> bool:
        own = self.tenant(spec.tenant)
        return len(self._running) < self._num_places and not own.is_capped

    def _start_next(self, now: float) -> list[Slot]:
        started: list[Slot] = []
        while len(self._running) < self._num_places and (slot := self._fair_queue.pop()) is not None:
            self._begin(slot, now)
            started.append(slot)
        return started

    def _begin(self, slot: Slot, now: float) -> None:
        """Gives its place to a slot that has left the queue."""
        self._running.add(slot)
        if slot.started_at is None:
            slot.started_at, slot.suspended_at = now, None
            expected_output = (slot.expected_charge - slot.spec.num_tokens) / OUTPUT_CHARGE
            self._wait_estimator.on_start(now, expected_output)
        else:
            self._wait_estimator.on_resume(slot.start_again(now))

    def _wait_s(self, spec: SlotSpec, now: float) -> float:
        """Time until the request gets its slot, which it must wait for."""
        if self._wait_estimator.is_cold:
            self._wait_estimator.token_s = self._token_s()
        estimator, expected = self._wait_estimator, self._fair_queue.expected_charge(spec)
        own, others = self._fair_queue.backlogs(spec, order_of(spec.priority, now), now)
        next_slot = estimator.mean_charge(expected)
        wait_s = fair_wait_s(own, others, estimator.rate(len(self._running), expected, now), next_slot)
        max_slots = self.tenant(spec.tenant).limits.max_slots
        if max_slots is not None:  # its own places bound its rate
            wait_s = max(wait_s, fair_wait_s(own, (), estimator.rate(max_slots, expected, now), next_slot))
        return wait_s

    def _token_s(self) -> float:
        """Mean time between tokens of the running requests; 0 before there is one."""
        streaming = [slot for slot in self._running if slot.has_first_token]
        num_tokens = sum(slot.num_output_tokens - 1 for slot in streaming)
        return sum(slot.last_tokens_at - slot.first_token_at for slot in streaming) / num_tokens if num_tokens else 0.0

    def _retry_after_s(self, spec: SlotSpec, excess_s: float, now: float) -> float:
        """Spread over the departures of the tenant's share."""
        own = self.tenant(spec.tenant)
        weight = own.limits.weight
        share = weight / (self._fair_queue.total_weight() + (0.0 if own.waiting else weight))
        gap_s = self._wait_estimator.service_time_s(now) / (share * max(1, len(self._running)))
        spread = self._spreads.setdefault(spec.tenant, RetryAfterSpread(MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S))
        return spread.assign(excess_s, gap_s, now)
