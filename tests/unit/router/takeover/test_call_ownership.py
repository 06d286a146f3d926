"""Records of call ends, and aborts of superseded attempts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.domain.errors import Broken, Cancelled, DeadlineExceeded, Overloaded, Superseded
from baton.domain.ids import AttemptId, OwnerId, RequestId
from baton.domain.request import SamplingParams, StopParams
from baton.services.router.generation import SequenceSpec
from baton.services.router.openai.request_parser import RawRequest
from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.openai.validation import RequestMetadata
from baton.services.router.takeover.call_ownership import CallOwnership
from baton.services.router.takeover.prompt_digest import PromptReplaced, check_prompt
from baton.services.router.takeover.supersede_listener import SupersedeListener
from baton.store.memory_store import MemoryStore
from baton.store.store import CallRecord, CallStatus, Durability
from baton.store.write_behind.flusher import WriterOptions
from baton.store.write_behind.writer import StoreWriter

ID = RequestId("call")
SEQUENCE = SequenceSpec(ID, (1, 2), SamplingParams(), StopParams(4), "", 10.0)
REQUEST = ValidRequest(ID, "m", 7, ((1, 2),), (SEQUENCE,), 1, (), True, False, None)
RAW = RawRequest("/v1/chat/completions", b"{}", RequestMetadata(ID, 7, 99, "ada"))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, CallStatus.ENDED),
        (DeadlineExceeded(""), CallStatus.ENDED),
        (ValueError(), CallStatus.ENDED),
        (Cancelled(""), CallStatus.ABANDONED),
        (asyncio.CancelledError(), CallStatus.OPEN),
    ],
)
async def test_the_store_records_how_a_call_ended(error, status):
    store = MemoryStore()
    async with StoreWriter(store) as writer:
        ownership = CallOwnership(writer, OwnerId("r/1"), lambda: Durability.RESTART)
        handle = ownership.open(replace(REQUEST, sequences=()), RAW)
        assert await handle.durability() is Durability.RESTART
        assert ownership.holds(ID)
        handle.end(error)
        handle.end(Broken("later ends do not count"))
        assert ownership.holds(ID), "the store does not know the end yet"
        await writer.flush(1.0)
        assert ownership.holds(ID) is (status is CallStatus.OPEN)
    expected = CallRecord(ID, OwnerId("r/1"), 1, status, RAW.endpoint, b"{}", "ada", 7, 99, ())
    record = await store.get_call(ID)
    assert record is not None
    assert replace(record, prompt_digest="") == expected
    check_prompt(REQUEST, record)
    for prompts in (((1, 3),), ((1,), (2,)), ((1, 2), ()), ((1, 2), (1, 2))):
        with pytest.raises(PromptReplaced):
            check_prompt(replace(REQUEST, prompts=prompts), record)


async def test_a_refused_call_writes_nothing():
    store = MemoryStore()
    async with StoreWriter(store) as writer:
        handle = CallOwnership(writer, OwnerId("r/1")).open(REQUEST, RAW)
        handle.end(Overloaded("full"))
        assert writer.num_pending == 0
        await writer.flush(1.0)
    assert await store.get_call(ID) is None


async def test_a_call_too_large_for_the_store_is_not_durable():
    async with StoreWriter(MemoryStore()) as writer:
        large = replace(RAW, body=b" " * (256 * 1024 + 1))
        ownership = CallOwnership(writer, OwnerId("r/1"), lambda: Durability.HOST)
        assert await ownership.open(REQUEST, large).durability() is Durability.NONE


async def test_a_call_is_durable_once_the_store_has_it():
    store = MemoryStore()
    writer = StoreWriter(store)  # not started: nothing is written yet
    handle = CallOwnership(writer, OwnerId("r/1"), lambda: Durability.ROUTER).open(REQUEST, RAW)
    asking = asyncio.create_task(handle.durability())
    await asyncio.wait([asking], timeout=0.05)
    assert not asking.done(), "it is not in the store"
    async with writer:
        assert await asking is Durability.ROUTER
        assert await store.get_call(ID) is not None


async def test_the_headers_do_not_wait_for_workers():
    """A new call waits for its workers to be written with them; whoever waits for the store has it written at once."""
    options = WriterOptions(journal_interval_s=3600.0, opening_s=3600.0)
    async with StoreWriter(MemoryStore(), options) as writer, asyncio.timeout(10):
        await asyncio.sleep(0)  # it waits for work
        handle = CallOwnership(writer, OwnerId("r/1"), lambda: Durability.HOST).open(REQUEST, RAW)
        await asyncio.sleep(0)
        assert await handle.durability() is Durability.HOST


async def test_a_slow_store_makes_a_call_not_durable():
    ownership = CallOwnership(StoreWriter(MemoryStore()), OwnerId("r/1"), lambda: Durability.HOST)
    async with asyncio.timeout(10):
        assert await ownership.open(REQUEST, RAW).durability() is Durability.NONE


def test_only_the_superseded_attempt_is_aborted():
    listener, heard = SupersedeListener(), list[Superseded]()
    with listener.listening([replace(SEQUENCE, attempt=3)], heard.append):
        listener.on_superseded(AttemptId(ID, 2))  # an earlier attempt
        listener.on_superseded(AttemptId(RequestId("other"), 9))
        assert heard == []
        listener.on_superseded(AttemptId(ID, 4))
        assert len(heard) == 1
    listener.on_superseded(AttemptId(ID, 4))
    assert len(heard) == 1


def test_a_later_listener_outlives_an_earlier_one():
    listener, first, second = SupersedeListener(), list[Superseded](), list[Superseded]()
    outer = listener.listening([SEQUENCE], first.append)
    with outer:
        inner = listener.listening([replace(SEQUENCE, attempt=2)], second.append)
        inner.__enter__()
    listener.on_superseded(AttemptId(ID, 2))
    assert (len(first), len(second)) == (0, 1)
    inner.__exit__(None, None, None)
