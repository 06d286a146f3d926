"""Two owners on one store: when one dies, the other claims its calls within moments."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from baton.domain.ids import OwnerId, RequestId, owner_tag
from baton.store.ownership import OwnerLease
from baton.store.store import CallRecord, CallStatus
from tests.contract.stores import DEADLINE_S, RARE, OpenStore

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
