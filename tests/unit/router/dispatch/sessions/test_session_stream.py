"""A stream as its attempt reads it: order, ends, losses and cancellation."""

from __future__ import annotations

import asyncio

import pytest

from baton.domain.errors import LinkBroken, WorkerLost
from baton.domain.request import OutputToken
from baton.rpc.gen import common_pb2, decode_pb2
from baton.rpc.gen import session_pb2 as pb
from baton.services.router.dispatch.sessions.session_stream import SessionStream
from baton.services.router.dispatch.worker_errors import AttemptFailure
from baton.services.router.generation import TokenChunk

CHUNK = TokenChunk((OutputToken(1, 1),), 0)


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


async def test_an_event_may_be_the_end():
    rig, calls = Rig(), list[bool]()
    rig.stream.listen(lambda: calls.append(rig.stream.is_ready))
    rig.stream.put_last(row(0))
    assert calls == [True], "event and end are told at once"
    rig.stream.listen(None)
    assert [await rig.stream.read(), await rig.stream.read()] == [row(0), None]
    rig.stream.cancel()
    assert rig.num_cancels == 0


async def test_an_end_of_another_kind_is_damage_and_then_the_end():
    stream = Rig().stream
    stream.put_last(decode_pb2.ReserveReply())
    with pytest.raises(AttemptFailure, match="ReserveReply in the stream of an attempt"):
        await stream.read()
    assert await stream.read() is None


async def test_a_lost_session_is_told_behind_what_came():
    stream = Rig().stream
    stream.put(row(0))
    stream.end(WorkerLost("gone"))
    assert await stream.read() == row(0)
    for _ in range(2):
        with pytest.raises(WorkerLost, match="gone"):
            await stream.read()


async def test_an_answer_of_another_kind_is_damage_behind_what_came():
    stream = Rig().stream
    stream.put(row(0))
    stream.put(decode_pb2.ReserveReply())
    stream.put(row(1))
    assert await stream.read() == row(0)
    with pytest.raises(AttemptFailure, match="ReserveReply in the stream of an attempt") as raised:
        await stream.read()
    assert isinstance(raised.value.error, LinkBroken)
    assert await stream.read() == row(1)


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


async def waiting(stream: SessionStream, on_row: object) -> asyncio.Task[object]:
    """A reader that waits."""
    reading = asyncio.create_task(stream.read(on_row))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    return reading


async def test_rows_go_to_a_reader_that_waits_but_the_last_one():
    stream, taken = Rig().stream, list[pb.TokenRow]()
    stream.put_row(row(0))
    assert await stream.read(taken.append) == row(0), "it was there before the reader"
    reading = await waiting(stream, taken.append)
    last = pb.TokenRow(first_index=3, tokens=[3], finish_reason=common_pb2.FINISH_REASON_STOP)
    for each in (row(1), row(2), last):
        stream.put_row(each)
    assert taken == [row(1), row(2)]
    assert not reading.done()
    assert await reading == last


async def test_another_event_ends_the_calls_until_it_is_read():
    stream, taken = Rig().stream, list[pb.TokenRow]()
    event = decode_pb2.GenerateEvent(failed=common_pb2.Failure(code="sent_back"))
    reading = await waiting(stream, taken.append)
    stream.put(event)
    stream.put_row(row(1))
    assert taken == []
    assert [await reading, await stream.read(taken.append)] == [event, row(1)]


async def test_a_chunk_that_was_left_comes_first_even_if_the_stream_is_cancelled():
    """Its tokens are recorded: an attempt after this one continues behind them."""
    stream, seen = Rig().stream, list[pb.TokenRow]()

    def leave(each: pb.TokenRow) -> TokenChunk:
        seen.append(each)
        return CHUNK

    reading = await waiting(stream, leave)
    for index in (1, 2):
        stream.put_row(row(index))
    assert seen == [row(1)]
    stream.cancel()
    assert await reading == CHUNK
    with pytest.raises(asyncio.CancelledError):
        await stream.read(leave)


async def test_a_chunk_that_was_left_waits_for_the_next_read():
    stream = Rig().stream
    reading = await waiting(stream, lambda each: CHUNK)
    for index in (1, 2):
        stream.put_row(row(index))
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert [await stream.read(), await stream.read()] == [CHUNK, row(2)]


async def test_an_error_of_a_call_is_the_readers_and_not_the_sessions():
    stream = Rig().stream

    def fail(each: pb.TokenRow) -> None:
        raise ValueError(each.first_index)

    reading = await waiting(stream, fail)
    stream.put_row(row(1))
    stream.put_row(row(2))
    with pytest.raises(ValueError, match="1"):
        await reading
    assert await stream.read(fail) == row(2)


async def test_a_reader_that_is_cancelled_gets_no_calls():
    stream, taken = Rig().stream, list[pb.TokenRow]()
    reading = await waiting(stream, taken.append)
    reading.cancel()
    stream.put_row(row(1))
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert taken == []
    assert await stream.read() == row(1)


async def test_a_listener_is_called_when_there_is_something_until_the_cancel():
    stream, seen = Rig().stream, list[object]()
    stream.listen(lambda: seen.append(stream.read_now()))
    assert not stream.is_ready
    stream.put(row(0))
    stream.put_row(row(1))
    stream.end()
    assert seen == [row(0), row(1), None]
    stream.cancel()
    assert len(seen) == 3


async def test_a_reader_that_waits_goes_before_a_listener():
    stream, called = Rig().stream, list[bool]()
    stream.listen(lambda: called.append(True))
    reading = await waiting(stream, None)
    stream.put(row(0))
    assert (await reading, called) == (row(0), [])


async def test_a_listener_that_left_is_not_called():
    stream, called = Rig().stream, list[bool]()
    stream.listen(lambda: called.append(True))
    stream.listen(None)
    stream.put(row(0))
    assert (called, await stream.read()) == ([], row(0))
