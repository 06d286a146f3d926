"""A stream as its attempt reads it: order, ends, losses and cancellation."""

from __future__ import annotations

import asyncio

import pytest

from baton.domain.errors import WorkerLost
from baton.rpc.gen import session_pb2 as pb
from baton.services.router.dispatch.sessions.session_stream import SessionStream


class Rig:
    def __init__(self) -> None:
        self.num_cancels = 0
        self.stream = SessionStream(self._on_cancel)

    def _on_cancel(self) -> None:
        self.num_cancels += 1


def row(index: int) -> pb.TokenRow:
    return pb.TokenRow(first_index=index, tokens=[index])


async def test_events_come_in_order_and_then_the_end():
    stream = Rig().stream
    reading = asyncio.create_task(stream.read())
    await asyncio.sleep(0)
    for index in range(3):
        stream.put(row(index))
    stream.end()
    assert await reading == row(0)
    assert [await stream.read() for _ in range(3)] == [row(1), row(2), None]
    assert await stream.read() is None


async def test_a_lost_session_is_told_behind_what_came():
    stream = Rig().stream
    stream.put(row(0))
    stream.end(WorkerLost("gone"))
    assert await stream.read() == row(0)
    for _ in range(2):
        with pytest.raises(WorkerLost, match="gone"):
            await stream.read()


async def test_a_cancelled_stream_wakes_its_reader_and_tells_the_worker_once():
    rig = Rig()
    reading = asyncio.create_task(rig.stream.read())
    await asyncio.sleep(0)
    rig.stream.cancel()
    rig.stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert rig.num_cancels == 1
    rig.stream.put(row(0))
    with pytest.raises(asyncio.CancelledError):
        await rig.stream.read()


async def test_the_worker_hears_nothing_of_a_stream_that_has_ended():
    rig = Rig()
    rig.stream.end()
    rig.stream.cancel()
    assert rig.num_cancels == 0
