"""After a reset of the store, the writer puts again what is under way."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from baton.domain.ids import AttemptId, OwnerId, RequestId
from baton.store.memory_store import MemoryStore
from baton.store.store import CallStatus
from tests.property.store.faulty_store import OPTIONS, Fault, FaultyStore
from tests.property.store.test_store_journal import check, decoding, new_call, new_writer


async def test_after_a_reset_everything_is_put_again_without_further_tokens() -> None:
    store = FaultyStore()
    async with asyncio.timeout(10), new_writer(store) as writer:
        sequence = await decoding(store, writer)
        sequence.emit(5)
        assert await writer.flush(10) == 0
        store.inner = MemoryStore(OPTIONS)  # the server loses everything, and nobody notices
        num_calls = store.num_calls
        writer.put_again()
        assert await writer.flush(10) == 0
        assert store.num_calls == num_calls + 2  # the call; the sequence and its journal
        await check(store, sequence, may_forget=False)
        call = await store.inner.get_call(RequestId("c"))
        assert call is not None
        assert (call.status, call.body) == (CallStatus.OPEN, b"{}")


async def test_after_a_reset_an_end_whose_answer_was_lost_stays() -> None:
    store = FaultyStore()
    async with asyncio.timeout(10), new_writer(store) as writer:
        sequence = await decoding(store, writer)
        sequence.emit(2)
        assert await writer.flush(10) == 0
        store.shut = True
        sequence.end()
        await store.release_one()  # the end of the journal
        store.faults = [Fault.ANSWER_LOST]
        await store.release_one()  # the end of the record
        writer.put_again()
        store.open()
        assert await writer.flush(10) == 0
        await check(store, sequence, may_forget=False)


async def test_a_call_of_a_higher_ballot_is_left_to_its_owner() -> None:
    store, heard = FaultyStore(), list[AttemptId]()
    async with asyncio.timeout(10), new_writer(store, on_superseded=heard.append) as writer:
        await decoding(store, writer)
        store.inner = MemoryStore(OPTIONS)  # the server loses everything, and another router enters its copy first
        theirs = replace(new_call("a"), owner=OwnerId("other/1"), epoch=2, owner_tag=9)
        await store.inner.put_call(theirs)
        writer.put_again()
        assert await writer.flush(10) == 0
    assert heard == [AttemptId(RequestId("a"), 1)]
    assert await store.inner.get_call(RequestId("c")) == theirs
