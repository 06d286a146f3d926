"""The exchange: nothing is shared unless somebody watches, and a store that is away costs other routers' rows only."""

from __future__ import annotations

import asyncio

import pytest

from baton.domain.ids import OwnerId
from baton.services.router.cluster.feed import ClusterFeed
from baton.services.router.cluster.peers.exchange import PeerExchange
from baton.store.store import StoreUnavailable
from baton.store.views.memory_view_store import MemoryViewStore
from tests.unit.router.cluster.peers.views import ViewWorld, open_request

pytestmark = pytest.mark.timeout(30)


class CountedStore(MemoryViewStore):
    """Counts bytes; `away` makes every call fail; `called` is set after each."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.away = False
        self.called = asyncio.Event()

    async def exchange(self, owner: OwnerId, payload: bytes, *, watching: bool):
        self.called.set()
        if self.away:
            raise StoreUnavailable("away")
        self.num_bytes += len(payload)
        return await super().exchange(owner, payload, watching=watching)


class Routers:
    """Routers a and b on one store."""

    def __init__(self) -> None:
        self.store = CountedStore()
        self.a, self.b = ViewWorld("a"), ViewWorld("b")
        self.feeds = [ClusterFeed(world.view) for world in (self.a, self.b)]
        self.exchanges = [
            PeerExchange(self.store, world.owner, feed, interval_s=0.01)
            for world, feed in zip((self.a, self.b), self.feeds, strict=True)
        ]

    async def round(self) -> None:
        for exchange in self.exchanges:
            await exchange.exchange()


async def test_nothing_is_shared_until_somebody_watches():
    routers = Routers()
    routers.b.open = [open_request("1")]
    for _ in range(3):
        await routers.round()
    assert routers.store.num_bytes == 0
    routers.feeds[0].snapshot(None)
    for _ in range(2):
        await routers.round()
    assert routers.store.num_bytes > 0
    assert [row.id for row in routers.a.view.snapshot().requests] == ["1"]
    assert [row.id for row in routers.b.view.snapshot().requests] == ["1"], "b shows its own"


async def test_a_reader_wakes_it_and_a_store_that_is_back_is_used():
    routers = Routers()
    routers.b.open = [open_request("1")]
    for exchange in routers.exchanges:
        exchange.start()
    async with asyncio.timeout(20):
        routers.store.away = True
        for _ in range(3):
            routers.store.called.clear()
            await routers.store.called.wait()
        assert [row.id for row in routers.a.view.snapshot().routers] == ["a"], "the own view goes on"
        routers.store.away = False
        while not routers.a.view.snapshot().requests:
            routers.feeds[0].snapshot(None)
            routers.store.called.clear()
            await routers.store.called.wait()
        await routers.exchanges[1].close()
        await routers.exchanges[1].close()
        while len(routers.a.view.snapshot().routers) > 1:
            routers.store.called.clear()
            await routers.store.called.wait()
    await routers.exchanges[0].close()
