"""Fairness over two routers that exchange what they have served, on a virtual clock: Jain's index over the tenants."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from baton.domain.ids import OwnerId
from baton.domain.trust import OPEN_CLUSTER
from baton.services.router.admission.tenants import TenantTable
from baton.services.router.dispatch.rate_limiter import RateLimiter
from baton.services.router.dispatch.service_sync import ServiceSync
from baton.store.tenants.memory_tenant_store import MemoryTenantStore
from baton.store.tenants.pseudonym import pseudonyms
from tests.property.tenant_world import Offer, TenantWorld, jain

PLACES = 16
SECONDS = 120
BUSY = Offer("both", backlog=40)


@dataclass(slots=True)
class Cluster:
    """Two routers with places of their own, which exchange once a second, or never."""

    offers: tuple[list[Offer], list[Offer]]
    exchanges: bool = True
    seed: int = 0
    worlds: list[TenantWorld] = field(init=False)

    def __post_init__(self) -> None:
        self.worlds = [
            TenantWorld(offers, PLACES, max_ttft_s=1e9, seed=self.seed + number)
            for number, offers in enumerate(self.offers)
        ]

    async def run(self) -> None:
        store, names = MemoryTenantStore(lambda: self.worlds[0].now), pseudonyms(OPEN_CLUSTER)
        syncs = []
        for number, world in enumerate(self.worlds):
            rates = RateLimiter(store, TenantTable(), names, lambda: self.worlds[0].now)
            syncs.append(ServiceSync(store, OwnerId(f"router-{number}/1"), world.queue, rates))
            world.schedule(SECONDS)
        for second in range(1, SECONDS + 1):
            for world in self.worlds:
                world.advance(float(second))
            for sync in syncs if self.exchanges else ():
                await sync.exchange()

    def served(self, first: int, last: int) -> dict[str, float]:
        """Tokens charged to each tenant on both routers between two seconds."""
        total: dict[str, float] = {}
        for world in self.worlds:
            for name, outcomes in world.outcomes.items():
                total[name] = total.get(name, 0.0) + outcomes.served[last - 1] - outcomes.served[first - 1]
        return total


def served(offers: tuple[list[Offer], list[Offer]], **options: bool | int) -> list[dict[str, float]]:
    """The service in two windows of 50 s, once the routers know of each other."""
    cluster = Cluster(offers, **options)  # type: ignore[arg-type]
    asyncio.run(cluster.run())
    return [cluster.served(20, 70), cluster.served(70, 120)]


@pytest.mark.parametrize("seed", range(3))
def test_a_tenant_of_two_routers_gets_no_more_than_one_of_a_single_router(seed: int):
    """One tenant asks at both routers, the other one at the first only: alone there, it would get half of it."""
    offers = ([BUSY, Offer("single", backlog=40)], [BUSY])
    for window in served(offers, seed=seed):
        assert jain(list(window.values())) >= 0.95, window
    for window in served(offers, seed=seed, exchanges=False):
        assert jain(list(window.values())) < 0.85, window


@pytest.mark.parametrize("seed", range(3))
def test_unlike_tenants_of_two_routers_get_equal_service(seed: int):
    """Short and long outputs, long prompts: by requests they would get far from equal service."""
    long = Offer("long", backlog=40, prompt_tokens=(10, 30), output_tokens=(300, 500))
    prompts = Offer("prompts", backlog=40, prompt_tokens=(800, 1200), output_tokens=(10, 30))
    offers = ([BUSY, long], [replace(BUSY, tenant="short", output_tokens=(20, 40)), prompts, long])
    for window in served(offers, seed=seed):
        assert jain(list(window.values())) >= 0.95, window
