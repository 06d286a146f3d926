"""What the book is told of calls, and who hears that an attempt was overtaken."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.domain.errors import Broken, Cancelled, DeadlineExceeded, Overloaded, Superseded
from baton.domain.ids import AttemptId, OwnerId, RequestId
from baton.domain.request import SamplingParams, StopParams
from baton.state.base import CallRecord, CallStatus
from baton.state.memory import MemoryBook
from baton.state.writer import BookWriter
from services.router.api.calls import ValidChat
from services.router.api.custody import Custody, Posting
from services.router.api.fence import Fence
from services.router.api.validation import Origin
from services.router.generation import GenerationJob

ID = RequestId("call")
JOB = GenerationJob(ID, (1, 2), SamplingParams(), StopParams(4), "", 10.0)
CALL = ValidChat(ID, "m", 7, ((1, 2),), (JOB,), 1, (), True, False, None)
POSTING = Posting("/v1/chat/completions", b"{}", Origin(ID, 7, 99, "ada"))


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
async def test_how_a_call_ended_is_what_the_book_says(error, status):
    book = MemoryBook()
    async with BookWriter(book) as writer:
        custody = Custody(writer, OwnerId("r/1"))
        charge = custody.open(replace(CALL, jobs=()), POSTING)
        assert await charge.durable()
        assert custody.holds(ID)
        charge.over(error)
        charge.over(Broken("later ends do not count"))
        assert custody.holds(ID), "the book does not know the end yet"
        await writer.flush(1.0)
        assert custody.holds(ID) is (status is CallStatus.OPEN)
    expected = CallRecord(ID, OwnerId("r/1"), 1, status, POSTING.endpoint, b"{}", "ada", 7, 99, ())
    assert await book.get_call(ID) == expected


async def test_a_call_that_is_refused_at_the_door_costs_the_book_nothing():
    book = MemoryBook()
    async with BookWriter(book) as writer:
        charge = Custody(writer, OwnerId("r/1")).open(CALL, POSTING)
        charge.over(Overloaded("full"))
        assert writer.num_pending == 0
        await writer.flush(1.0)
    assert await book.get_call(ID) is None


async def test_a_call_too_large_for_the_book_is_not_durable():
    async with BookWriter(MemoryBook()) as writer:
        large = replace(POSTING, body=b" " * (256 * 1024 + 1))
        assert not await Custody(writer, OwnerId("r/1")).open(CALL, large).durable()


async def test_a_call_is_durable_once_the_book_has_it():
    book = MemoryBook()
    writer = BookWriter(book)  # not started: nothing is written yet
    charge = Custody(writer, OwnerId("r/1")).open(CALL, POSTING)
    asking = asyncio.create_task(charge.durable())
    await asyncio.wait([asking], timeout=0.05)
    assert not asking.done(), "it is not in the book"
    async with writer:
        assert await asking
        assert await book.get_call(ID) is not None


async def test_a_book_that_is_slow_makes_a_call_not_durable():
    charge = Custody(BookWriter(MemoryBook()), OwnerId("r/1")).open(CALL, POSTING)
    async with asyncio.timeout(10):
        assert not await charge.durable()


def test_only_the_attempt_that_runs_here_is_broken_off():
    fence, heard = Fence(), list[Superseded]()
    with fence.watching([replace(JOB, attempt=3)], heard.append):
        fence.superseded(AttemptId(ID, 2))  # an earlier life of it
        fence.superseded(AttemptId(RequestId("other"), 9))
        assert heard == []
        fence.superseded(AttemptId(ID, 4))
        assert len(heard) == 1
    fence.superseded(AttemptId(ID, 4))
    assert len(heard) == 1


def test_who_watches_later_is_not_forgotten_with_who_watched_before():
    fence, first, second = Fence(), list[Superseded](), list[Superseded]()
    outer = fence.watching([JOB], first.append)
    with outer:
        inner = fence.watching([replace(JOB, attempt=2)], second.append)
        inner.__enter__()
    fence.superseded(AttemptId(ID, 2))
    assert (len(first), len(second)) == (0, 1)
    inner.__exit__(None, None, None)
