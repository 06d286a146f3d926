"""Default worker ids are unique, and a second process with an id ends before it loads a model."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from baton.store.store import StoreUnavailable, WorkerIdInUse
from baton.worker.identity.worker_id import default_worker_id, require_free_id

ID = WorkerId("decode-0")
RECORD = WorkerRecord(ID, WorkerRole.DECODE, Incarnation(1), "10.0.0.7:50052", "m", "f", 16, 100, 100)
BRISK = StoreOptions(worker_ttl_s=60.0, heartbeat_s=0.01)
WATCH_S = 0.05


def test_workers_of_one_service_differ_by_their_host():
    ids = [default_worker_id(WorkerRole.DECODE, 50052, 50052, host) for host in ("node-1", "node-2")]
    assert ids == ["decode-node-1", "decode-node-2"]


def test_workers_of_one_host_differ_by_role_and_port():
    same = [default_worker_id(role, port, 50052, "a") for role in WorkerRole for port in (50052, 50062, 0, 0)]
    assert len(set(same)) == len(same)
    assert default_worker_id(WorkerRole.DECODE, 50062, 50052, "a") == "decode-a-50062"


@pytest.mark.parametrize(("host", "part"), [("näme of/host", "n-me-of-host"), ("...", "host"), ("x" * 300, "x" * 63)])
def test_a_strange_host_name_gives_a_usable_id(host: str, part: str):
    assert default_worker_id(WorkerRole.PREFILL, 1, 1, host) == f"prefill-{part}"


def test_an_id_that_is_announced_again_is_taken():
    async def run() -> None:
        store = MemoryStore(BRISK)
        await store.announce(replace(RECORD, announcement=1))

        async def heartbeat() -> None:
            for number in range(2, 1000):
                await store.announce(replace(RECORD, announcement=number))
                await asyncio.sleep(0.005)  # a heartbeat

        beating = asyncio.create_task(heartbeat())
        with pytest.raises(WorkerIdInUse, match=r"decode-0 is held by 10\.0\.0\.7:50052\. Start with another"):
            await require_free_id(store, ID, watch_s=10.0)
        beating.cancel()

    asyncio.run(run())


def test_a_free_id_and_a_silent_predecessor_are_no_reason_to_stop():
    async def run() -> None:
        store = MemoryStore(BRISK)
        await require_free_id(store, ID, WATCH_S)
        await store.announce(replace(RECORD, announcement=7))
        await require_free_id(store, ID, WATCH_S)
        await require_free_id(store, WorkerId("decode-1"), WATCH_S)

    asyncio.run(run())


def test_a_store_that_does_not_answer_is_not_waited_for():
    class Away(MemoryStore):
        async def workers(self) -> list[WorkerRecord]:
            raise StoreUnavailable("redis is starting")

    asyncio.run(require_free_id(Away(BRISK), ID, watch_s=60.0))
