"""Attempt streams: one reader an attempt, ordered events, nothing kept for closed streams."""

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
