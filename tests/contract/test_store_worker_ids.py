"""Worker ids in every state store: who announces in time keeps the id."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.ids import Incarnation
from baton.store.store import StateStore, WorkerIdInUse
from tests.contract.stores import WORKER


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
