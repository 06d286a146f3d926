"""A connection that hands messages over within the call that brings them: order, ends, errors and room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from baton.domain.errors import Broken, LinkBroken
from baton.rpc.gen import session_pb2 as pb
from baton.session.lifecycle import SessionState
from baton.session.pump import SessionPump
from baton.session.session import ROUTER_KINDS, WORKER_KINDS, MessageSession, SessionLimits
from baton.session.tags import ConnectionKeys
from baton.session.wires.socket_connection import LENGTH, ROOM_BYTES, SocketConnection
from baton.session.wires.wire import DirectConnection

WAIT_S = 10.0
KEYS = ConnectionKeys(b"s" * 32, b"r" * 32)


class FakeTransport:
    """Keeps what is written. Has no room after each write while `is_full`."""

    def __init__(self, connection: SocketConnection) -> None:
        self.written: list[bytes] = []
        self.is_full = False
        self.is_reading = True
        self.is_closed = False
        self._connection = connection
        connection.connection_made(cast(Any, self))

    def get_extra_info(self, name: str) -> None:
        return None

    def set_write_buffer_limits(self, high: int) -> None:
        return

    def write(self, data: bytes) -> None:
        self.written.append(data)
        if self.is_full:
            self._connection.pause_writing()

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True


def framed(message: pb.SessionMessage) -> bytes:
    data = message.SerializeToString()
    return LENGTH.pack(len(data)) + data


def message(number: int, num_bytes: int = 0) -> bytes:
    return framed(pb.SessionMessage(body=bytes([number]) + bytes(num_bytes), tag=b"t"))


async def opened() -> tuple[SocketConnection, FakeTransport]:
    connection = SocketConnection()
    return connection, FakeTransport(connection)


async def handing_over(connection: SocketConnection, take: Callable[[pb.SessionMessage], bool]) -> asyncio.Task[None]:
    task = asyncio.create_task(connection.hand_over(take))
    await asyncio.sleep(0)
    return task


class Taken(list[int]):
    """Numbers of the messages that were taken. `then` runs after each, and says whether more are wanted."""

    def __init__(self, then: Callable[[int], bool] = lambda number: True) -> None:
        super().__init__()
        self._then = then

    def __call__(self, message: pb.SessionMessage) -> bool:
        self.append(message.body[0])
        return self._then(message.body[0])


async def test_messages_are_taken_within_the_call_that_brings_them():
    connection, _ = await opened()
    assert isinstance(connection, DirectConnection)
    taken = Taken()
    task = await handing_over(connection, taken)
    whole = message(1) + message(2) + message(3)
    connection.data_received(whole[:-4])
    assert taken == [1, 2]
    connection.data_received(whole[-4:])
    assert taken == [1, 2, 3]
    connection.connection_lost(None)
    await asyncio.wait_for(task, WAIT_S)


async def test_what_came_before_is_handed_over_first():
    connection, transport = await opened()
    connection.data_received(message(1, ROOM_BYTES) + message(2))
    assert not transport.is_reading, "nothing reads, so the socket is not read either"
    taken = Taken()
    task = await handing_over(connection, taken)
    assert (taken, transport.is_reading) == ([1, 2], True)
    connection.data_received(message(3, ROOM_BYTES) + message(4))
    assert (taken, transport.is_reading) == ([1, 2, 3, 4], True), "what is taken takes no room"
    task.cancel()


@pytest.mark.parametrize("came_before", [True, False])
async def test_a_taker_that_wants_no_more_gets_no_more(came_before: bool):
    connection, _ = await opened()
    taken, data = Taken(lambda number: number < 2), message(1) + message(2) + message(3)
    if came_before:
        connection.data_received(data)
    task = await handing_over(connection, taken)
    if not came_before:
        connection.data_received(data)
    await asyncio.wait_for(task, WAIT_S)
    assert taken == [1, 2]


@pytest.mark.parametrize("error", [RuntimeError("a bug"), LinkBroken("its own"), StopIteration()])
async def test_an_error_of_a_taker_ends_the_hand_over_not_the_loop(error: Exception):
    def fail(number: int) -> bool:
        raise error

    connection, _ = await opened()
    taken = Taken(fail)
    task = await handing_over(connection, taken)
    connection.data_received(message(1) + message(2))
    connection.data_received(message(3))
    with pytest.raises(RuntimeError if isinstance(error, StopIteration) else type(error)):
        await asyncio.wait_for(task, WAIT_S)
    assert taken == [1]


async def test_a_connection_that_its_taker_closes_hands_over_no_more():
    connection, transport = await opened()

    def close(number: int) -> bool:
        connection.close()
        return True

    taken = Taken(close)
    task = await handing_over(connection, taken)
    connection.data_received(message(1) + message(2))
    await asyncio.wait_for(task, WAIT_S)
    assert (taken, transport.is_closed) == ([1], True)
    with pytest.raises(LinkBroken):
        connection.write(pb.SessionMessage())


@pytest.mark.parametrize(
    ("damaged", "told"),
    [
        pytest.param(LENGTH.pack(3) + b"\xff\xff\xff", "no message", id="no message"),
        pytest.param(LENGTH.pack(1 << 31), "bytes", id="too long"),
    ],
)
async def test_a_damaged_message_is_told_behind_others(damaged: bytes, told: str):
    connection, _ = await opened()
    taken = Taken()
    task = await handing_over(connection, taken)
    connection.data_received(message(1) + damaged + message(2))
    with pytest.raises(LinkBroken, match=told):
        await asyncio.wait_for(task, WAIT_S)
    assert taken == [1]


async def test_a_hand_over_that_is_cancelled_takes_nothing_more():
    connection, _ = await opened()
    taken = Taken()
    task = await handing_over(connection, taken)
    task.cancel()
    connection.data_received(message(1))
    with pytest.raises(asyncio.CancelledError):
        await task
    connection.data_received(message(2))
    assert taken == []


class Rig:
    """A router's session over a direct connection, and the worker's end as it is on the wire."""

    def __init__(self, connection: SocketConnection, apply: Callable[[list[pb.StreamMessage]], None]) -> None:
        now = asyncio.get_running_loop().time()
        self.session = MessageSession(1, WORKER_KINDS, SessionLimits(), now)
        self.worker = MessageSession(1, ROUTER_KINDS, SessionLimits(), now)
        self.pump = SessionPump(self.session, apply, lambda: None)
        self.connection = connection
        self.transport = FakeTransport(connection)

    @classmethod
    async def made(cls, apply: Callable[[list[pb.StreamMessage]], None] = lambda _: None) -> Rig:
        return cls(SocketConnection(), apply)

    async def run(self, connection: SocketConnection, keys: ConnectionKeys = KEYS) -> asyncio.Task[None]:
        now = asyncio.get_running_loop().time()
        self.session.connected(keys, self.worker.last_applied_seq, now)
        self.worker.connected(keys.reversed(), self.session.last_applied_seq, now)
        task = asyncio.create_task(self.pump.run(connection))
        for _ in range(3):  # the task, its first frame, and what this wakes
            await asyncio.sleep(0)
        return task

    def row(self, index: int) -> bytes:
        """A frame of the worker with a token."""
        self.worker.post_tokens(1, index, [index])
        taken = self.worker.take(asyncio.get_running_loop().time())
        assert taken is not None
        return framed(taken)

    def aborted(self, transport: FakeTransport) -> list[list[int]]:
        """Streams of the aborts in each frame that was written with some."""
        frames = [pb.Frame.FromString(pb.SessionMessage.FromString(data[4:]).body) for data in transport.written]
        return [[one.stream for one in frame.messages] for frame in frames if frame.messages]

    def abort(self, stream: int) -> None:
        self.pump.post(pb.StreamMessage(stream=stream, abort=pb.Abort()))


async def test_what_is_posted_in_one_pass_leaves_in_one_frame():
    rig = await Rig.made()
    task = await rig.run(rig.connection)
    for stream in (1, 2, 3):
        rig.abort(stream)
    await asyncio.sleep(0)
    assert rig.aborted(rig.transport) == [[1, 2, 3]]
    rig.abort(4)
    await asyncio.sleep(0)
    assert rig.aborted(rig.transport) == [[1, 2, 3], [4]]
    task.cancel()


async def test_nothing_is_written_until_the_transport_has_room():
    rig = await Rig.made()
    task = await rig.run(rig.connection)
    rig.transport.is_full = True
    for stream in range(1, 6):
        rig.abort(stream)
        await asyncio.sleep(0)
    assert rig.aborted(rig.transport) == [[1]], "the rest waits in the session, where it is bounded"
    rig.connection.resume_writing()
    await asyncio.sleep(0)
    assert rig.aborted(rig.transport) == [[1], [2, 3, 4, 5]]
    task.cancel()


async def test_nothing_behind_a_damaged_frame_is_applied():
    applied: list[int] = []
    rig = await Rig.made(lambda messages: applied.extend(row.first_index for m in messages for row in m.step.rows))
    task = await rig.run(rig.connection)
    first, second, third = (rig.row(index) for index in range(3))
    rig.connection.data_received(first + second[:-1] + bytes([second[-1] ^ 1]) + third)
    await asyncio.wait_for(task, WAIT_S)
    assert applied == [0]
    assert (rig.session.state, rig.session.num_bad_frames) == (SessionState.BROKEN, 1)
    assert (rig.transport.is_closed, rig.session.last_applied_seq) == (True, 1)


async def test_a_connection_reset_in_the_pass_brings_what_came():
    applied: list[int] = []
    rig = await Rig.made(lambda messages: applied.extend(row.first_index for m in messages for row in m.step.rows))
    task = await rig.run(rig.connection)
    rig.connection.data_received(rig.row(0) + rig.row(1))
    rig.connection.connection_lost(ConnectionResetError())
    rig.abort(1)
    await asyncio.wait_for(task, WAIT_S)
    assert (applied, rig.session.state) == ([0, 1], SessionState.BROKEN)
    again = SocketConnection()
    transport = FakeTransport(again)
    task = await rig.run(again, ConnectionKeys(b"t" * 32, b"q" * 32))
    assert rig.aborted(transport) == [[1]], "what did not leave does so now"
    task.cancel()


@pytest.mark.parametrize(("error", "raised"), [(KeyError("a bug"), KeyError), (LinkBroken("of another link"), Broken)])
async def test_a_bug_of_a_handler_is_raised_and_loses_the_session(error: Exception, raised: type[Exception]):
    """The other end counts the frame as applied, so a session that went on would lack a part of it."""

    def fail(messages: list[pb.StreamMessage]) -> None:
        raise error

    rig = await Rig.made(fail)
    task = await rig.run(rig.connection)
    rig.connection.data_received(rig.row(0) + rig.row(1))
    with pytest.raises(raised):
        await asyncio.wait_for(task, WAIT_S)
    assert (rig.session.state, rig.transport.is_closed) == (SessionState.LOST, True)
    assert rig.session.end_reason == f"a frame could not be applied: {type(error).__name__}"


async def test_a_frame_that_cannot_be_made_loses_the_session():
    """Its number is missing for ever, and with it what it was to bring."""
    changes: list[SessionState] = []
    rig = await Rig.made()
    rig.pump._on_change = lambda: changes.append(rig.session.state)
    task = await rig.run(rig.connection)
    rig.abort(1)
    rig.pump.post_tokens(2, 0, [-1])
    await asyncio.wait_for(task, WAIT_S)
    assert (rig.session.state, rig.transport.is_closed) == (SessionState.LOST, True)
    assert rig.session.end_reason == "a frame could not be made: ValueError"
    assert set(changes) == {SessionState.LOST}
    rig.abort(2)
    await asyncio.sleep(0)
    assert rig.aborted(rig.transport) == []


async def test_a_newer_connection_is_used_instead_of_the_older():
    applied: list[int] = []
    rig = await Rig.made(lambda messages: applied.extend(row.first_index for m in messages for row in m.step.rows))
    older = await rig.run(rig.connection)
    late = rig.row(0)
    newer = SocketConnection()
    transport = FakeTransport(newer)
    task = await rig.run(newer, ConnectionKeys(b"t" * 32, b"q" * 32))
    await asyncio.wait_for(older, WAIT_S)
    rig.connection.data_received(late)
    rig.connection.resume_writing()  # its transport empties while it closes
    assert applied == []
    replayed = rig.worker.take(asyncio.get_running_loop().time())
    assert replayed is not None
    newer.data_received(framed(replayed))
    rig.abort(1)
    await asyncio.sleep(0)
    assert (applied, rig.aborted(transport), rig.session.state) == ([0], [[1]], SessionState.OPEN)
    assert rig.aborted(rig.transport) == []
    task.cancel()
