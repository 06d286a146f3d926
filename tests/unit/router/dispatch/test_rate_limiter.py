"""Rates of tenants: reserved, given back, shared by routers, and kept while the store is away."""

from __future__ import annotations

import hashlib

import pytest

from baton.domain.ids import OwnerId, RequestId
from baton.domain.request import OutputToken, SamplingParams, StopParams
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.services.router.admission.admission_queue import AdmissionLimits, AdmissionQueue
from baton.services.router.admission.slot import SlotSpec
from baton.services.router.admission.tenants import TenantLimits, TenantTable
from baton.services.router.dispatch.rate_limiter import RateLimited, RateLimiter
from baton.services.router.dispatch.service_sync import ServiceSync
from baton.services.router.generation import SequenceSpec
from baton.store.tenants.memory_tenant_store import MemoryTenantStore
from baton.store.tenants.pseudonym import pseudonyms

TENANTS = TenantTable(by_name={"alice": TenantLimits(requests_per_minute=6, tokens_per_minute=600)})


class Clock:
    """A clock that is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def limiter(store: MemoryTenantStore, clock: Clock, tenants: TenantTable = TENANTS) -> RateLimiter:
    return RateLimiter(store, tenants, pseudonyms(OPEN_CLUSTER), clock)


def asked(name: str, max_tokens: int = 90, *, tenant: str = "alice", emitted: int = 0) -> SequenceSpec:
    tokens = tuple(OutputToken(index, 5) for index in range(emitted))
    stop, attempt = StopParams(max_tokens), 1001 if emitted else 1
    prompt = tuple(range(10))
    return SequenceSpec(RequestId(name), prompt, SamplingParams(), stop, "", 9.0, attempt, tokens, tenant=tenant)


async def refused_after(rates: RateLimiter, *sequences: SequenceSpec) -> float:
    with pytest.raises(RateLimited) as refusal:
        await rates.reserve("alice", sequences)
    return refusal.value.retry_after_s or 0.0


async def test_tokens_are_reserved_whole_and_the_rest_is_given_back():
    clock = Clock()
    rates = limiter(MemoryTenantStore(clock), clock)
    asks = [asked(f"r{n}", 190) for n in range(3)]
    for ask in asks:
        await rates.reserve("alice", [ask])
    assert await refused_after(rates, asked("r3", 190)) == pytest.approx(20.0)
    for ask in asks:
        rates.settle(ask, 100)
        rates.settle(ask, 100)  # twice is once
    await rates.flush()
    await rates.reserve("alice", [asked("r4", 290)])
    assert await refused_after(rates, asked("r5", 0)) == pytest.approx(1.0)


async def test_requests_are_limited_and_refill():
    clock = Clock()
    rates = limiter(MemoryTenantStore(clock), clock)
    for n in range(6):
        await rates.reserve("alice", [asked(f"r{n}", 1)])
    assert await refused_after(rates, asked("r6", 1)) == pytest.approx(10.0)
    clock.now = 10.0
    await rates.reserve("alice", [asked("r6", 1)])
    await rates.reserve("bob", [asked("b", 10_000, tenant="bob")])


async def test_sequences_that_are_not_admitted_give_everything_back():
    clock = Clock()
    rates = limiter(MemoryTenantStore(clock), clock)
    asks = [asked(f"r-{n}", 190) for n in range(3)]
    await rates.reserve("alice", asks)
    rates.settle(asks[0], 200)
    rates.forgo(asks)
    rates.forgo(asks)
    await rates.flush()
    await rates.reserve("alice", [asked("next", 390)])
    assert await refused_after(rates, asked("late")) > 1.0


async def test_a_sequence_that_was_taken_over_pays_for_what_it_used_here():
    clock = Clock()
    rates = limiter(MemoryTenantStore(clock), clock)
    rates.settle(asked("r", emitted=5), 600)
    await rates.flush()
    assert await refused_after(rates, asked("next")) == pytest.approx(10.0)


async def test_two_routers_share_one_bucket():
    clock = Clock()
    store = MemoryTenantStore(clock)
    both = [limiter(store, clock), limiter(store, clock)]
    for n in range(6):
        await both[n % 2].reserve("alice", [asked(f"r{n}", 1)])
    await refused_after(both[0], asked("a"))
    await refused_after(both[1], asked("b"))


async def test_without_the_store_a_router_grants_its_part():
    clock = Clock()
    store = MemoryTenantStore(clock)
    rates = limiter(store, clock)
    rates.num_routers = 3
    await store.close()
    for n in range(2):
        await rates.reserve("alice", [asked(f"r{n}", 1)])
    assert await refused_after(rates, asked("r2", 1)) == pytest.approx(30.0)


async def test_the_store_holds_no_name_of_a_tenant():
    names = {
        pseudonyms(trust)("alice") for trust in (OPEN_CLUSTER, ClusterTrust(b"one" * 16), ClusterTrust(b"two" * 16))
    }
    assert len(names) == 3
    assert not any("alice" in name for name in names)
    assert hashlib.sha256(b"alice").hexdigest()[:32] in names


async def test_deltas_of_other_routers_are_added_once():
    clock = Clock()
    store = MemoryTenantStore(clock)
    queues = [AdmissionQueue(AdmissionLimits(1)) for _ in range(2)]
    syncs = [
        ServiceSync(store, OwnerId(f"router-{n}/1"), queue, limiter(store, clock)) for n, queue in enumerate(queues)
    ]
    for queue in queues:
        for tenant in ("alice", "bob"):
            queue.release(queue.admit(SlotSpec(tenant, 10, 1), 0.0), 0.0)
    for sync in (*syncs, *syncs):
        await sync.exchange()  # what was served before the first sight does not count
    before = queues[1].tenant("alice").service, queues[1].tenant("bob").service
    running = queues[0].admit(SlotSpec("alice", 100, 1), 0.0)
    queues[0].on_tokens(running, 7, 0, 0.0)
    for _ in range(3):
        for sync in syncs:
            await sync.exchange()
    assert queues[1].tenant("alice").service == before[0] + 114
    assert queues[1].tenant("bob").service == before[1]
    assert queues[0].charges() == {"alice": 124.0, "bob": 10.0}, "what others served is no charge of this router"


def served_router() -> tuple[MemoryTenantStore, AdmissionQueue, ServiceSync]:
    """A router that has served alice and bob, its store, and what exchanges its totals."""
    clock = Clock()
    store = MemoryTenantStore(clock)
    queue = AdmissionQueue(AdmissionLimits(1))
    for tenant in ("alice", "bob"):
        queue.release(queue.admit(SlotSpec(tenant, 10, 1), 0.0), 0.0)
    sync = ServiceSync(store, OwnerId("here/1"), queue, limiter(store, clock))
    return store, queue, sync


async def test_a_restarted_router_starts_its_totals_anew():
    store, queue, sync = served_router()
    name = pseudonyms(OPEN_CLUSTER)("alice")
    service = queue.tenant("alice").service
    for owner, total in [("there/1", 500.0), ("there/2", 20.0), ("there/2", 50.0)]:
        await store.share_service(OwnerId(owner), {name: total})
        await sync.exchange()
    assert queue.tenant("alice").service == service + 30.0


async def test_a_total_that_no_router_serves_is_not_counted():
    store, queue, sync = served_router()
    name = pseudonyms(OPEN_CLUSTER)("alice")
    service = queue.tenant("alice").service
    for total in (0.0, 1.7e308, -1.7e308, 5.0, 8.0):
        await store.share_service(OwnerId("mallory/1"), {name: total})
        await sync.exchange()
    assert queue.tenant("alice").service == service + 3.0
