"""Attempt streams: one reader an attempt, ordered events by both ways, nothing kept for closed streams."""

from __future__ import annotations

import asyncio

import pytest

from baton.domain.errors import DeadlineExceeded, Superseded
from baton.domain.ids import AttemptId, RequestId
from baton.worker.streams import AttemptStreams

ID = AttemptId(RequestId("r"), 1)
OTHER = AttemptId(RequestId("r"), 2)


async def test_events_come_in_order_to_their_own_reader():
    streams: AttemptStreams[int] = AttemptStreams()
    streams.open(ID)
    streams.open(OTHER)
    for event in (1, 2):
        streams.deliver(ID, event)
    streams.deliver(OTHER, 3)
    assert [await streams.next(ID, 1.0), await streams.next(ID, 1.0), await streams.next(OTHER, 1.0)] == [1, 2, 3]


async def test_a_waiting_reader_wakes_for_its_event():
    streams: AttemptStreams[int] = AttemptStreams()
    streams.open(ID)

    async def deliver() -> None:
        streams.deliver(ID, 1)

    event, _ = await asyncio.gather(streams.next(ID, 10.0), deliver())
    assert event == 1


async def test_an_attempt_has_one_reader():
    streams: AttemptStreams[int] = AttemptStreams()
    streams.open(ID)
    with pytest.raises(Superseded, match="r/1 is being served"):
        streams.open(ID)
    streams.close(ID)
    streams.close(ID)
    streams.open(ID)
    assert len(streams) == 1


async def test_events_without_an_open_stream_are_dropped():
    streams: AttemptStreams[int] = AttemptStreams()
    streams.deliver(ID, 1)
    streams.open(ID)
    with pytest.raises(DeadlineExceeded, match="no event"):
        await streams.next(ID, 0.01)


class Taker:
    """Takes numbers below 100, as plain tokens; leaves all others."""

    def __init__(self) -> None:
        self.handled: list[int] = []

    def take(self, event: int) -> bool:
        if event < 100:
            self.handled.append(event)
        return event < 100


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_waiting_reader_sleeps_while_its_events_are_taken():
    streams: AttemptStreams[int] = AttemptStreams()
    taker = Taker()
    streams.open(ID, taker.take)
    reader = asyncio.create_task(streams.next(ID, 10.0))
    await settle()
    for event in (1, 2):
        streams.deliver(ID, event)
    await settle()
    assert (taker.handled, reader.done()) == ([1, 2], False)
    streams.deliver(ID, 100)
    assert await reader == 100


async def test_an_event_waits_behind_one_that_the_reader_has_not_handled():
    """Whatever was left to the reader comes first, also between its wake-up and its next wait."""
    streams: AttemptStreams[int] = AttemptStreams()
    taker = Taker()
    streams.open(ID, taker.take)
    streams.deliver(ID, 1)  # nobody waits yet

    async def read() -> None:
        while (event := await streams.next(ID, 10.0)) != 999:
            await asyncio.sleep(0)
            taker.handled.append(event)

    reader = asyncio.create_task(read())
    await settle()
    for event in (2, 100, 3, 101, 4):  # 3 must not be taken while 100 is on its way to the reader
        streams.deliver(ID, event)
    await asyncio.sleep(0)
    streams.deliver(ID, 5)
    for _ in range(12):
        await asyncio.sleep(0)
    streams.deliver(ID, 6)
    streams.deliver(ID, 999)
    await reader
    assert taker.handled == [1, 2, 100, 3, 101, 4, 5, 6]


async def test_a_cancelled_reader_takes_nothing_more():
    streams: AttemptStreams[int] = AttemptStreams()
    taker = Taker()
    streams.open(ID, taker.take)
    reader = asyncio.create_task(streams.next(ID, 10.0))
    await settle()
    reader.cancel()
    streams.deliver(ID, 1)  # before the task has heard of it
    await asyncio.gather(reader, return_exceptions=True)
    streams.deliver(ID, 2)
    assert taker.handled == []


async def test_taken_events_end_a_silence():
    """The time is over three times; only the last silence had no event."""
    streams: AttemptStreams[int] = AttemptStreams()
    taker = Taker()
    streams.open(ID, taker.take)
    reader = asyncio.create_task(streams.next(ID, 600.0))

    async def end_time() -> None:
        await settle()
        waiter = streams._streams[ID].waiter
        assert waiter is not None
        waiter.set_exception(TimeoutError())
        await settle()

    await settle()
    for event in (1, 2):
        streams.deliver(ID, event)
        await end_time()
        assert not reader.done()
    await end_time()
    with pytest.raises(DeadlineExceeded, match="no event"):
        await reader
    assert taker.handled == [1, 2]
