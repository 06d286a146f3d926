"""`BookWriter` always gets there: through slow calls, lost calls, answers and records; and nobody waits for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import AttemptId, RequestId
from baton.domain.lifecycle import TABLE, RequestEvent, RequestState
from baton.state.base import RequestRecord, StateBook
from baton.state.connect import connect
from baton.state.memory import MemoryBook
from baton.state.options import BookOptions
from baton.state.writer import BookWriter
from tests.property.faulty_book import OPTIONS, Fault, FaultyBook
from tests.redis_server import running_redis


def new_request(id: RequestId) -> RequestRecord:
    return RequestRecord(id, 1, RequestState.RECEIVED, "router", "tiny", num_prompt_tokens=3)


def new_writer(book: FaultyBook, heard: list[bool], **bounds: Any) -> BookWriter:
    return BookWriter(cast(StateBook, book), on_degraded=heard.append, retry_s=0.001, **bounds)


FAULTS = st.lists(st.sampled_from([Fault.NONE, Fault.NOT_HEARD, Fault.ANSWER_LOST]), max_size=20)
LET_PASS = st.none()
STEP = st.tuples(st.integers(0, 1), st.integers(0, 4))  # which request, which of the events that it can take


@given(script=st.lists(LET_PASS | STEP, max_size=50), faults=FAULTS, losses=st.lists(st.integers(0, 20), max_size=2))
@settings(max_examples=100, deadline=None)
def test_the_writer_gets_there_through_any_outage(
    script: list[tuple[int, int] | None], faults: list[Fault], losses: list[int]
) -> None:
    for position in losses:
        faults.insert(position, Fault.RECORDS_LOST)
    asyncio.run(_live_through(script, faults, may_forget=bool(losses)))


async def _live_through(script: list[tuple[int, int] | None], faults: list[Fault], *, may_forget: bool) -> None:
    """Lives of two requests; between the steps, sometimes, one call of the writer comes through."""
    book, heard = FaultyBook(faults, shut=True), list[bool]()
    goals = [new_request(RequestId(name)) for name in "ab"]
    async with asyncio.timeout(30), new_writer(book, heard) as writer:
        for goal in goals:
            writer.create(goal)
        for step in script:
            if step is not None and (events := _events(goals[step[0]])):
                goals[step[0]] = _step(writer, goals[step[0]], events[step[1] % len(events)])
            elif step is None and writer.num_pending:
                await book.let_pass()
        book.open()
        assert await writer.flush(timeout_s=20) == 0
    for goal in goals:
        held = await book.inner.get(goal.id)
        assert held == goal or (held is None and may_forget)
    assert heard == [n % 2 == 0 for n in range(len(heard))]
    assert not writer.degraded


def _events(goal: RequestRecord) -> list[RequestEvent]:
    return [event for state, event in TABLE if state is goal.state and not state.terminal]


def _step(writer: BookWriter, goal: RequestRecord, event: RequestEvent) -> RequestRecord:
    code = "worker_lost" if event is RequestEvent.INTERRUPT else ""
    number = goal.attempt + (event in (RequestEvent.RETRY, RequestEvent.RESUME))
    after = replace(
        goal,
        attempt=number,
        state=TABLE[goal.state, event],
        num_emitted=goal.num_emitted + 1,
        failure_code=code,
    )
    told = writer.advance(AttemptId(goal.id, number), event, num_emitted=after.num_emitted, failure_code=code)
    assert told is after.state
    return after


async def test_a_hung_book_holds_nobody_and_steps_melt() -> None:
    book = FaultyBook(shut=True)
    writer = new_writer(book, [])
    writer.start()
    goal = new_request(RequestId("a"))
    writer.create(goal)
    async with asyncio.timeout(10):
        await book.next_call()
    for _ in range(100):
        for event in (RequestEvent.ENQUEUE, RequestEvent.PROMISE, RequestEvent.INTERRUPT, RequestEvent.RETRY):
            if (goal.state, event) in TABLE:
                goal = _step(writer, goal, event)
    assert (writer.num_pending, book.num_calls) == (1, 1)
    assert await writer.close(timeout_s=0.05) == 1
    assert goal.attempt == 101


async def test_the_oldest_ended_requests_are_lost_when_the_backlog_is_full() -> None:
    book, heard = FaultyBook(), list[bool]()
    writer = new_writer(book, heard, max_finished=2)
    names = [RequestId(name) for name in ("a", "b", "c", "d", "live")]
    for id in names:
        writer.create(new_request(id))
    for id in names[:4]:
        writer.advance(AttemptId(id, 1), RequestEvent.CANCEL)
    assert (writer.num_pending, writer.num_lost, writer.degraded) == (3, 2, True)
    async with writer:
        assert await writer.flush(timeout_s=10) == 0
        held = [await book.inner.get(id) for id in names]
        states = [record.state if record else None for record in held]
        assert states == [None, None, *[RequestState.CANCELLED] * 2, RequestState.RECEIVED]
        for id in names[:4]:  # what is written no longer counts
            writer.create(new_request(id))
            writer.advance(AttemptId(id, 1), RequestEvent.REFUSE)
            assert await writer.flush(timeout_s=10) == 0
    assert (writer.num_lost, heard) == (2, [True, False])


async def test_a_record_that_vanished_is_entered_again_every_time() -> None:
    book, goal = FaultyBook(), new_request(RequestId("a"))
    async with new_writer(book, []) as writer:
        writer.create(goal)
        for event in (RequestEvent.ENQUEUE, RequestEvent.PROMISE, RequestEvent.PREFILL, RequestEvent.SEAL):
            assert await writer.flush(timeout_s=10) == 0
            book.inner = MemoryBook(OPTIONS)
            goal = _step(writer, goal, event)
        assert await writer.flush(timeout_s=10) == 0
    assert await book.inner.get(goal.id) == goal


async def test_a_retry_whose_answer_was_lost_is_not_taken_for_another_router() -> None:
    book, goal = FaultyBook(), new_request(RequestId("a"))
    async with new_writer(book, []) as writer:
        writer.create(goal)
        for event in (RequestEvent.ENQUEUE, RequestEvent.PROMISE, RequestEvent.INTERRUPT):
            goal = _step(writer, goal, event)
        assert await writer.flush(timeout_s=10) == 0
        book.faults = [Fault.ANSWER_LOST]
        for event in (RequestEvent.RETRY, RequestEvent.PROMISE):
            goal = _step(writer, goal, event)
            assert await writer.flush(timeout_s=10) == 0
    assert await book.inner.get(goal.id) == goal


async def test_a_request_that_another_router_took_over_is_left_alone() -> None:
    book, heard = FaultyBook(), list[bool]()
    await book.inner.create(replace(new_request(RequestId("a")), router_id="other"))
    writer = new_writer(book, heard)
    writer.start()
    for name in "ab":
        writer.create(new_request(RequestId(name)))
        writer.advance(AttemptId(RequestId(name), 1), RequestEvent.ENQUEUE)
    assert await writer.close(timeout_s=10) == 0
    taken, own = await book.inner.get(RequestId("a")), await book.inner.get(RequestId("b"))
    assert taken is not None
    assert (taken.router_id, taken.state) == ("other", RequestState.RECEIVED)
    assert own is not None
    assert own.state is RequestState.QUEUED
    assert heard == []


async def test_an_idle_writer_notices_an_outage_and_its_end() -> None:
    book = FaultyBook([Fault.NOT_HEARD, Fault.NOT_HEARD])
    heard: asyncio.Queue[bool] = asyncio.Queue()
    writer = BookWriter(cast(StateBook, book), on_degraded=heard.put_nowait, retry_s=0.001, idle_ping_s=0.001)
    async with asyncio.timeout(10), writer:
        assert await heard.get() is True
        assert await heard.get() is False


async def test_the_writer_refuses_what_the_table_refuses() -> None:
    writer = new_writer(FaultyBook(), [])
    writer.create(new_request(RequestId("a")))
    with pytest.raises(Broken, match="already"):
        writer.create(new_request(RequestId("a")))
    with pytest.raises(Broken, match="cannot seal"):
        writer.advance(AttemptId(RequestId("a"), 1), RequestEvent.SEAL)
    with pytest.raises(Superseded):
        writer.advance(AttemptId(RequestId("a"), 0), RequestEvent.ENQUEUE)
    with pytest.raises(Broken, match="no such request"):
        writer.advance(AttemptId(RequestId("z"), 1), RequestEvent.ENQUEUE)
    assert await writer.close() == 1


async def test_a_real_server_that_lost_everything_is_told_again() -> None:
    with running_redis() as server:
        book = await connect(server.url, BookOptions(timeout_s=1.0))
        heard: asyncio.Queue[bool] = asyncio.Queue()
        writer = BookWriter(book, on_degraded=heard.put_nowait, retry_s=0.02, idle_ping_s=0.02)
        goal = new_request(RequestId("a"))
        async with asyncio.timeout(10), writer:
            writer.create(goal)
            server.kill()
            assert await heard.get() is True
            for event in (RequestEvent.ENQUEUE, RequestEvent.PROMISE, RequestEvent.INTERRUPT, RequestEvent.RETRY):
                goal = _step(writer, goal, event)
            server.start()
            assert await heard.get() is False
            assert await book.get(goal.id) == goal
        await book.close()
