"""The registry of workers: who holds an id, and what wakes its readers. One suite for every store."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.worker import LinkRecord, WorkerBudgets, WorkerLoad, WorkerStatus
from baton.store.options import StoreOptions
from baton.store.store import StateStore, WorkerIdInUse
from tests.contract.stores import WORKER, OpenStore, listening

BRISK = StoreOptions(heartbeat_s=0.02, worker_ttl_s=0.1, retention_s=0.1, timeout_s=5.0)


async def test_changes_yield_on_join_status_and_leave(store: StateStore) -> None:
    async with listening(store) as changes:
        await anext(changes)
        await store.announce(WORKER)
        await anext(changes)
        await store.announce(replace(WORKER, status=WorkerStatus.DRAINING))
        await anext(changes)
        await store.withdraw(WORKER.id, WORKER.incarnation)
        await anext(changes)
        await store.announce(replace(WORKER, incarnation=Incarnation(5)))
        await anext(changes)


async def test_changes_yield_on_links(store: StateStore) -> None:
    """A router that waits for a pair uses a new link at once. A heartbeat comes after a minute here."""
    link = LinkRecord(WorkerId("prefill-0"), Incarnation(2**63 - 5), "stream", 1e9, 8)
    other = replace(link, prefill_id=WorkerId("prefill-1"), prefill_incarnation=Incarnation(7))
    async with listening(store) as changes:
        await anext(changes)
        await store.announce(WORKER)
        await anext(changes)
        for links in ((link,), (link, other), (other,), ()):
            await store.announce(replace(WORKER, links=links))
            await anext(changes)


async def test_changes_yield_on_budgets(store: StateStore) -> None:
    """A router stops sending prompts to a worker at once when its budget becomes 0."""
    async with listening(store) as changes:
        await anext(changes)
        await store.announce(WORKER)
        await anext(changes)
        for budgets in (WorkerBudgets(64, 8), WorkerBudgets(0, 8), WorkerBudgets(0, 4), WorkerBudgets(0, 4, 2)):
            await store.announce(replace(WORKER, budgets=budgets))
            await anext(changes)


async def test_neither_load_nor_the_order_of_links_is_a_change(store: StateStore) -> None:
    link = LinkRecord(WorkerId("prefill-0"), Incarnation(2**63 - 5), "stream", 1e9, 8)
    other = replace(link, prefill_id=WorkerId("prefill-1"), prefill_incarnation=Incarnation(7))
    linked = replace(WORKER, links=(link, other))
    async with listening(store) as changes:
        await anext(changes)
        await store.announce(linked)
        await anext(changes)
        await store.announce(replace(linked, links=(other, replace(link, bandwidth_bytes_per_s=2e9))))
        await store.announce(replace(linked, load=WorkerLoad(waiting_requests=1)))
        changed = asyncio.ensure_future(anext(changes))
        assert not (await asyncio.wait([changed], timeout=0.2))[0]  # nothing is heard
        await store.withdraw(WORKER.id, WORKER.incarnation)
        await changed


async def test_changes_yield_every_heartbeat_and_end_when_the_store_closes(open_store: OpenStore) -> None:
    store = await open_store(BRISK)
    num_beats = 0
    async with listening(store) as changes:
        async for _ in changes:
            num_beats += 1
            if num_beats == 3:
                await store.close()
    assert num_beats == 3


async def test_a_live_worker_is_never_displaced(store: StateStore) -> None:
    second = replace(WORKER, incarnation=Incarnation(5))
    assert await store.announce(WORKER)
    for _ in range(3):
        with pytest.raises(WorkerIdInUse):
            await store.announce(second)
        assert await store.announce(WORKER), "an attempt of another process fences nothing"
    assert await store.workers() == [WORKER]
    await store.withdraw(WORKER.id, WORKER.incarnation)
    assert await store.announce(second)
    assert not await store.announce(WORKER)
    assert await store.workers() == [second]
