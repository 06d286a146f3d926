"""Two owners on one store: when one dies, the other claims its calls within moments."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace

from redis.asyncio import Redis

from baton.domain.ids import OwnerId, RequestId, owner_tag
from baton.services.cli.processes.local_redis import LocalRedis
from baton.store.connect import connect
from baton.store.ownership import OwnerLease
from baton.store.store import CallRecord, CallStatus, LeaseState, StateStore
from tests.contract.stores import DEADLINE_S, RARE, OpenStore
from tests.redis_server import ends_within, running_redis

OURS, THEIRS = OwnerId("router-0/a"), OwnerId("router-1/b")
CALL = CallRecord(RequestId("c"), THEIRS, 1, CallStatus.OPEN, "/v1/completions", b"{}", "", int(time.time()), 5, ())


async def test_calls_of_a_dead_owner_are_claimed_in_time(open_store: OpenStore) -> None:
    store = await open_store(replace(RARE, owner_ttl_s=1.0))
    claimed: asyncio.Queue[CallRecord] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(2 * DEADLINE_S), OwnerLease(store, OURS, claimed.put) as ours:
        await store.hold_lease(THEIRS, 1)
        await store.put_call(CALL)
        while not ours.may_claim:
            await store.hold_lease(THEIRS, 1)
            await store.read_journal(CALL.id, 0, 0.05)  # lets time pass
        assert claimed.empty()
        last_sign_at = loop.time()  # the other owner is dead from here on
        await store.hold_lease(THEIRS, 1)
        call = await claimed.get()
        took_s = loop.time() - last_sign_at
    assert call == replace(CALL, owner=OURS, epoch=2, owner_tag=owner_tag(OURS))
    assert 0.9 < took_s < 4.0


async def test_every_renewal_tells_the_same_server(store: StateStore) -> None:
    first = await store.hold_lease(OURS, 1)
    assert first.server
    assert await store.hold_lease(THEIRS, 1) == replace(first, number=0)
    assert await store.hold_lease(OURS, 2) == replace(first, number=1)


async def test_a_server_that_comes_back_with_everything_is_another_one() -> None:
    """Its number fits, as that of a replica does that has lagged since the last renewal."""
    with running_redis(durable=True) as server:
        before = await _renew(server.url, 1)
        assert server.pid is not None
        pid = server.pid
        os.kill(pid, signal.SIGKILL)
        assert ends_within(pid, DEADLINE_S)
        server.start()
        after = await _renew(server.url, 2)
    assert (after.generation, after.number) == (before.generation, 1)
    assert after.server != before.server


async def test_a_server_that_may_not_be_asked_still_renews(server: LocalRedis) -> None:
    admin: Redis = Redis.from_url(server.url)
    try:
        await admin.execute_command("ACL", "SETUSER", "no-info", "on", ">word", "~*", "&*", "+@all", "-info")  # type: ignore[no-untyped-call]
        url = server.url.replace("unix://", "unix://no-info:word@")
        assert (await _renew(url, 1)).server == ""
        assert (await _renew(url, 2)).number == 1
    finally:
        await admin.execute_command("ACL", "DELUSER", "no-info")  # type: ignore[no-untyped-call]
        await admin.aclose()


async def _renew(url: str, number: int) -> LeaseState:
    store = await connect(url, replace(RARE, prefix="test:ownership:"))
    try:
        return await store.hold_lease(OURS, number)
    finally:
        await store.close()
