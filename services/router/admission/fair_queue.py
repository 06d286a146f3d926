"""Chooses the waiting request that starts next. Owned by `AdmissionQueue`; pure.

Weighted virtual token counters (VTC, Sheng et al., OSDI 2024): the tenant with the least service starts. Service is
charged tokens over weight. A tenant that comes back from idle starts at the least service of those that wait: unused
capacity is not owed. Within a tenant `Slot.order` decides.

    push --> waiting --(pop: a place is free)--> running --> leave
              |  ^  `--> discard                    |
              |  `--(resume)-- suspended <----------'
              `-------------------^
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.services.router.admission.slot import OUTPUT_CHARGE, Slot, SlotSpec
from baton.services.router.admission.tenants import TenantLimits, TenantTable
from baton.services.router.admission.wait_estimate import Backlog

DEFAULT_OUTPUT_TOKENS = 128.0
"""Expected output of a request while no request has ended."""

ARRIVAL_WINDOW_S = 20.0
"""Time over which a tenant's arrivals are averaged."""

MIN_ARRIVAL_S = 5.0
"""Least such time: a single request is no rate."""

IDLE_WINDOWS = 3.0
"""A tenant without a request for so many windows begins anew."""

OUTPUT_SMOOTHING = 0.1
"""Weight of the newest request in a tenant's mean output, and in the mean prompt."""


@dataclass(slots=True, eq=False)
class TenantQueue:
    """Waiting requests of one tenant in order, its service, and sums over its waiting requests.

    `work`: their expected charges.
    """

    limits: TenantLimits
    service: float = 0.0
    total_charge: float = 0.0
    num_bytes: int = 0
    num_tokens: int = 0
    work: float = 0.0
    mean_output_tokens: float | None = None
    arrived_charge: float = 0.0  # decaying sum of expected charges, as of `arrived_at`
    arrived_at: float = 0.0
    first_arrived_at: float = 0.0  # since it was idle
    waiting: list[tuple[float, int, Slot]] = field(default_factory=list)
    running: set[Slot] = field(default_factory=set)

    def add_arrival(self, charge: float, now: float) -> None:
        """Counts a request that was admitted."""
        if now - self.arrived_at > IDLE_WINDOWS * ARRIVAL_WINDOW_S or not self.arrived_charge:
            self.first_arrived_at, self.arrived_charge = now, 0.0
        self.arrived_charge = self._decayed(now) + charge
        self.arrived_at = now

    def arrival_rate(self, now: float) -> float:
        """Expected charges a second of the requests admitted lately, also while it has come for less than a window."""
        seen_s = max(MIN_ARRIVAL_S, now - self.first_arrived_at)
        return self._decayed(now) / (ARRIVAL_WINDOW_S * -math.expm1(-seen_s / ARRIVAL_WINDOW_S))

    def _decayed(self, now: float) -> float:
        return self.arrived_charge * math.exp((self.arrived_at - now) / ARRIVAL_WINDOW_S)

    @property
    def is_capped(self) -> bool:
        """True if as many of its requests run as may."""
        return self.limits.max_slots is not None and len(self.running) >= self.limits.max_slots


class FairQueue:
    """All slots by tenant. The caller bounds how many run."""

    def __init__(self, tenants: TenantTable) -> None:
        self._tenants = tenants
        self._by_name: dict[str, TenantQueue] = {}
        self._waiting: dict[str, TenantQueue] = {}  # tenants with waiting slots
        self.num_bytes = 0  # of all waiting slots
        self.num_tokens = 0
        self._entries: dict[Slot, tuple[float, int, Slot]] = {}  # of the waiting slots
        self._suspended: set[Slot] = set()
        self._num_pushed = 0
        self._floor = 0.0  # service of the tenant that started last, before its charge
        self._mean_output_tokens: float | None = None
        self._mean_prompt_tokens: float | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._entries

    @property
    def mean_prompt_tokens(self) -> float:
        """Mean prompt of the requests that came lately; 0 before the first one."""
        return self._mean_prompt_tokens or 0.0

    def tenant(self, name: str) -> TenantQueue:
        """The queue of a tenant, made when first asked for."""
        found = self._by_name.get(name)
        if found is None:
            found = self._by_name[name] = TenantQueue(self._tenants.limits_of(name))
        return found

    def tenants(self) -> Iterable[tuple[str, TenantQueue]]:
        """Every tenant that has asked for a slot."""
        return self._by_name.items()

    @property
    def num_suspended(self) -> int:
        """Counts the slots that neither run nor wait."""
        return len(self._suspended)

    def push(self, slot: Slot, now: float) -> None:
        """Adds a waiting slot, and lifts a tenant that had none."""
        self._count_arrival(slot, now)
        self._insert(slot)

    def start(self, slot: Slot, now: float) -> None:
        """As `push` and then `pop`, of a slot that need not wait: no other one waits, and its tenant is not capped."""
        tenant = self._count_arrival(slot, now)
        tenant.service = self._floor = max(tenant.service, self._floor)
        tenant.running.add(slot)
        self.charge(slot, float(slot.spec.num_tokens))

    def suspend(self, slot: Slot) -> None:
        """Takes out a slot that runs or waits, until `resume` or `discard`."""
        self.tenant(slot.spec.tenant).running.discard(slot)
        self.discard(slot)
        self._suspended.add(slot)

    def resume(self, slot: Slot) -> bool:
        """Lets a suspended slot wait, in its order, and lifts a tenant that had none; False if it is not suspended."""
        if slot not in self._suspended:
            return False
        self._suspended.remove(slot)
        self._insert(slot)
        return True

    def pop(self) -> Slot | None:
        """Starts the first request of the tenant with the least service; None if all that wait are capped."""
        candidates = (tenant for tenant in self._waiting.values() if not tenant.is_capped)
        tenant = min(candidates, key=lambda tenant: (tenant.service, tenant.waiting[0][:2]), default=None)
        if tenant is None:
            return None
        slot = tenant.waiting[0][2]
        self.discard(slot)
        self._floor = tenant.service
        tenant.running.add(slot)
        if slot.started_at is None:
            self.charge(slot, slot.spec.num_tokens)
        return slot

    def discard(self, slot: Slot) -> bool:
        """Removes a waiting or suspended slot; False if it does not wait."""
        self._suspended.discard(slot)
        entry = self._entries.pop(slot, None)
        if entry is None:
            return False
        tenant = self.tenant(slot.spec.tenant)
        del tenant.waiting[bisect.bisect_left(tenant.waiting, entry)]
        if not tenant.waiting:
            del self._waiting[slot.spec.tenant]
        self._add(tenant, slot, -1)
        return True

    def leave(self, slot: Slot) -> None:
        """Removes a running slot. Its output changes the mean."""
        tenant = self.tenant(slot.spec.tenant)
        tenant.running.discard(slot)
        if slot.num_output_tokens:
            tenant.mean_output_tokens = _smoothed(tenant.mean_output_tokens, slot.num_output_tokens)
            self._mean_output_tokens = _smoothed(self._mean_output_tokens, slot.num_output_tokens)

    def charge(self, slot: Slot, charge: float) -> None:
        """Charges tokens served for a slot; negative: gives some back."""
        tenant = self._by_name.get(slot.spec.tenant) or self.tenant(slot.spec.tenant)
        slot.charged += charge
        tenant.total_charge += charge
        tenant.service += charge / tenant.limits.weight

    def add_remote(self, name: str, charge: float) -> None:
        """Adds tokens that another router has served to a tenant."""
        tenant = self.tenant(name)
        tenant.service += charge / tenant.limits.weight

    def expected_charge(self, spec: SlotSpec) -> float:
        """Expected charge of a whole request."""
        mean = self.tenant(spec.tenant).mean_output_tokens or self._mean_output_tokens or DEFAULT_OUTPUT_TOKENS
        return spec.num_tokens + OUTPUT_CHARGE * min(spec.max_tokens, mean)

    def backlogs(self, spec: SlotSpec, order: float, now: float) -> tuple[Backlog, list[Backlog]]:
        """Work before a newcomer of its own tenant, and the work of every other tenant that waits or may come."""
        others = [
            self._backlog(tenant, tenant.work, tenant.arrival_rate(now))
            for name, tenant in self._by_name.items()
            if name != spec.tenant and not tenant.is_capped
        ]
        own = self.tenant(spec.tenant)
        behind = own.waiting[bisect.bisect_right(own.waiting, order, key=_order) :]
        backlog = self._backlog(own, own.work - sum(slot.remaining_charge for _, _, slot in behind))
        return (backlog if own.waiting else backlog.lifted(self._least_service())), others

    def total_weight(self) -> float:
        """Weight of all tenants that wait."""
        return sum(tenant.limits.weight for tenant in self._waiting.values())

    def last_of_longest(self) -> Slot | None:
        """The last slot that may be shed, of the tenant that holds the most memory for its weight."""
        for tenant in sorted(self._waiting.values(), key=_weighted_bytes, reverse=True):
            for _, _, slot in reversed(tenant.waiting):
                if not slot.forced:
                    return slot
        return None

    def holds_most(self, spec: SlotSpec) -> bool:
        """True if with `spec` its tenant would hold the most memory for its weight."""
        own = self.tenant(spec.tenant)
        mine = (own.num_bytes + spec.num_bytes) / own.limits.weight
        return all(_weighted_bytes(tenant) <= mine for tenant in self._waiting.values() if tenant is not own)

    def _backlog(self, tenant: TenantQueue, work: float, arrival_rate: float = 0.0) -> Backlog:
        """Counts what its running requests have still to get as served: it comes before the work that waits."""
        unserved = sum(slot.remaining_charge for slot in tenant.running)
        service = tenant.service + unserved / tenant.limits.weight
        if not tenant.waiting and arrival_rate:
            service = max(service, self._least_service())  # its next request lifts it
        return Backlog(work, tenant.limits.weight, service, arrival_rate)

    def _count_arrival(self, slot: Slot, now: float) -> TenantQueue:
        spec = slot.spec
        slot.expected_charge = self.expected_charge(spec)
        tenant = self.tenant(spec.tenant)
        tenant.add_arrival(slot.expected_charge, now)
        self._mean_prompt_tokens = _smoothed(self._mean_prompt_tokens, spec.num_tokens)
        return tenant

    def _insert(self, slot: Slot) -> None:
        tenant = self.tenant(slot.spec.tenant)
        if not tenant.waiting:
            tenant.service = max(tenant.service, self._least_service())
        self._num_pushed += 1
        entry = self._entries[slot] = (slot.order, self._num_pushed, slot)
        bisect.insort(tenant.waiting, entry)
        self._waiting[slot.spec.tenant] = tenant
        self._add(tenant, slot, 1)

    def _least_service(self) -> float:
        startable = (tenant.service for tenant in self._waiting.values() if not tenant.is_capped)
        return min(startable, default=self._floor)

    def _add(self, tenant: TenantQueue, slot: Slot, sign: int) -> None:
        """Adds a waiting slot to the sums, or takes it out."""
        spec = slot.spec
        tenant.num_bytes += sign * spec.num_bytes
        tenant.num_tokens += sign * spec.num_tokens
        tenant.work = tenant.work + sign * slot.remaining_charge if tenant.waiting else 0.0
        self.num_bytes += sign * spec.num_bytes
        self.num_tokens += sign * spec.num_tokens


def _order(entry: tuple[float, int, Slot]) -> float:
    return entry[0]


def _smoothed(mean: float | None, value: float) -> float:
    return value if mean is None else mean + OUTPUT_SMOOTHING * (value - mean)


def _weighted_bytes(tenant: TenantQueue) -> float:
    return tenant.num_bytes / tenant.limits.weight
