"""A process that is stopped (SIGSTOP, a frozen cgroup) hears nothing: that says nothing of the other end.

On a clock that jumps. `time.monotonic`, which is the loop's on Linux, does not count the time of a suspended machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from baton.domain.ids import Incarnation
from baton.domain.trust import OPEN_CLUSTER
from baton.rpc.gen import session_pb2 as pb
from baton.session.dialler import DialledPeer, SessionDialler
from baton.session.lifecycle import SessionState
from baton.session.listener import SessionListener
from baton.session.pump import SessionPump
from baton.session.session import LOOK_AGAIN_S, ROUTER_KINDS, WORKER_KINDS, MessageSession, SessionLimits
from baton.session.tags import ConnectionKeys
from baton.session.wires.memory_wire import MemoryConnection, MemoryWire
from simulation.runtime.virtual_clock import VirtualLoop

LIMITS = SessionLimits()
LISTENER, ROUTER = Incarnation(7), Incarnation(9)
ADDRESS = "a:1"
TICK_S = 0.02


class CoarseLoop(VirtualLoop):
    """Its clock has whole milliseconds, as uvloop's."""

    def time(self) -> float:
        return int(super().time() * 1000) / 1000


def run(work: Callable[[VirtualLoop], Awaitable[None]], loop_type: type[VirtualLoop] = VirtualLoop) -> None:
    loop = loop_type()
    try:
        loop.run_until_complete(work(loop))
    finally:
        loop.close()


def stand_still(loop: VirtualLoop, seconds: float) -> None:
    """The clock goes on, and nothing runs: all timers of this time are late."""
    loop._virtual_selector.advance(seconds)


class Owner:
    """Of one end, without streams."""

    def __init__(self, pump: SessionPump | None = None) -> None:
        self.pump = pump

    def apply(self, messages: list[pb.StreamMessage]) -> None:
        raise AssertionError("nothing is sent here")

    def on_ended(self, reason: str) -> None:
        return


class AwayWire(MemoryWire):
    """A memory wire whose network can be away: dials wait."""

    def __init__(self) -> None:
        super().__init__()
        self.is_there = asyncio.Event()
        self.is_there.set()

    async def connect(self, address: str, incarnation: Incarnation) -> MemoryConnection:
        await self.is_there.wait()
        return await super().connect(address, incarnation)


class TwoEnds:
    """A dialler and a listener in one process."""

    def __init__(self) -> None:
        self.wire, self.owners = AwayWire(), list[Owner]()
        self.listener = SessionListener(OPEN_CLUSTER, LISTENER, LIMITS, self._make_owner)
        self.wire.listen(ADDRESS, self.listener.serve)
        peer = DialledPeer(ADDRESS, LISTENER, "router-0", ROUTER)
        self.dialler = SessionDialler(self.wire, OPEN_CLUSTER, peer, LIMITS)
        self._task = asyncio.ensure_future(self.dialler.run(Owner()))

    def _make_owner(self, pump: SessionPump) -> Owner:
        self.owners.append(Owner(pump))
        return self.owners[-1]

    def check_open(self, num_breaks: int) -> None:
        """Both ends are open, after so many breaks, and have answered pings."""
        [owner] = self.owners
        assert owner.pump is not None
        for session in (self.dialler.session, owner.pump.session):
            assert (session.state, session.num_breaks) == (SessionState.OPEN, num_breaks)
            assert session.num_round_trips > 0

    async def close(self) -> None:
        self.listener.close()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.wire.close()


def run_ends(
    work: Callable[[VirtualLoop, TwoEnds], Awaitable[None]], loop_type: type[VirtualLoop] = VirtualLoop
) -> None:
    async def work_and_close(loop: VirtualLoop) -> None:
        ends = TwoEnds()
        try:
            await work(loop, ends)
        finally:
            await ends.close()

    run(work_and_close, loop_type)


STOPS_S = [0.9, 0.999, 1.0, 1.05, 1.1, 1.2, 1.24, 1.25, 1.5, 2.0, 5.0, 3600.0]


@pytest.mark.parametrize("loop_type", [VirtualLoop, CoarseLoop])
@pytest.mark.parametrize("offset_s", [0.0, 0.3, 0.3999, 0.4, 0.4001, 0.49, 0.5, 0.51, 0.99, 1.0])
@pytest.mark.parametrize("stopped_s", STOPS_S)
def test_two_ends_that_stood_still_keep_their_connection(
    stopped_s: float, offset_s: float, loop_type: type[VirtualLoop]
):
    """As in one cgroup that was frozen, wherever they were between two pings."""

    async def work(loop: VirtualLoop, ends: TwoEnds) -> None:
        await asyncio.sleep(0.1 + offset_s)
        stand_still(loop, stopped_s)
        await asyncio.sleep(10.0)
        ends.check_open(0)

    run_ends(work, loop_type)


@pytest.mark.parametrize("way_s", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("stopped_s", STOPS_S)
def test_two_ends_that_stood_still_within_a_round_trip_keep_it(stopped_s: float, way_s: float):
    """The dialler's first ping is on its way for so long before the stop, and arrives after it."""

    async def work(loop: VirtualLoop, ends: TwoEnds) -> None:
        stops = [stopped_s]
        await asyncio.sleep(0.1)
        [connection] = ends.wire.connections
        send = connection.send

        async def send_and_stop(message: pb.SessionMessage) -> None:
            if stops and pb.Frame.FromString(message.body).ping:
                await asyncio.sleep(way_s)
                stand_still(loop, stops.pop())
                await asyncio.sleep(0)  # the timers that are due go off first
            await send(message)

        connection.send = send_and_stop  # type: ignore[method-assign]
        await asyncio.sleep(stopped_s + 10.0)
        assert stops == []
        ends.check_open(0)

    run_ends(work)


@pytest.mark.parametrize("stopped_s", STOPS_S)
def test_two_ends_that_stand_still_again_and_again_keep_their_connection(stopped_s: float):
    """They hear each other between two stops."""

    async def work(loop: VirtualLoop, ends: TwoEnds) -> None:
        for passed_s in [0.6, 0.7, 1.1, 2.1, 0.6]:
            await asyncio.sleep(passed_s)
            stand_still(loop, stopped_s)
        await asyncio.sleep(10.0)
        ends.check_open(0)

    run_ends(work, CoarseLoop)


@pytest.mark.parametrize("stopped_s", [2.6, 4.0, 3600.0])
def test_two_ends_that_stood_still_without_a_connection_dial_again(stopped_s: float):
    async def work(loop: VirtualLoop, ends: TwoEnds) -> None:
        await asyncio.sleep(1.0)
        ends.wire.is_there.clear()
        ends.wire.connections[-1].close()
        await asyncio.sleep(0.1)
        assert ends.dialler.session.state is SessionState.BROKEN
        stand_still(loop, stopped_s)
        ends.wire.is_there.set()
        await asyncio.sleep(10.0)
        ends.check_open(1)

    run_ends(work)


def opened_ends() -> tuple[MessageSession, MessageSession]:
    """A router's and a worker's end, connected at 0 s, after each has heard the other's first frame."""
    router = MessageSession(1, WORKER_KINDS, LIMITS, 0.0)
    worker = MessageSession(1, ROUTER_KINDS, LIMITS, 0.0)
    router.connected(ConnectionKeys(b"s" * 32, b"r" * 32), 0, 0.0)
    worker.connected(ConnectionKeys(b"r" * 32, b"s" * 32), 0, 0.0)
    carry(router, worker, 0.0)
    carry(worker, router, 0.0)
    return router, worker


def state_of(session: MessageSession) -> SessionState:
    """Its state now."""
    return session.state


def carry(source: MessageSession, target: MessageSession, now: float) -> None:
    """One frame, which must be there."""
    message = source.take(now)
    assert message is not None
    target.receive(message, now)


def test_a_frame_counts_that_is_heard_at_the_time_of_the_excuse():
    router, worker = opened_ends()
    router.on_time(20.0, 19.5)
    worker.on_time(20.0, 19.5)
    assert (router.state, worker.state) == (SessionState.OPEN, SessionState.OPEN)
    carry(router, worker, 20.5)
    carry(worker, router, 20.0)
    router.on_time(40.0, 18.5)
    assert state_of(router) is SessionState.OPEN, "a stop after a frame is excused as the one before"
    router.on_time(60.0, 18.5)
    assert state_of(router) is SessionState.BROKEN, "nothing was heard between these two"


@pytest.mark.parametrize("stopped_s", STOPS_S[2:])
def test_a_pong_that_was_not_read_during_a_stop_is_read_before_the_break(stopped_s: float):
    """The timer goes off before the loop reads, and the ping left just before the stop."""
    router, worker = opened_ends()
    carry(router, worker, 0.5)
    pong = worker.take(0.5)
    assert pong is not None
    now = 0.5 + stopped_s
    router.on_time(now, now - 1.5)
    assert state_of(router) is SessionState.OPEN
    wakeup = router.next_wakeup()
    assert wakeup is not None
    assert wakeup >= now + 0.99 * LOOK_AGAIN_S, "the loop reads meanwhile"
    router.receive(pong, now)
    router.on_time(now + 0.49)
    assert (router.state, router.num_breaks) == (SessionState.OPEN, 0)


@pytest.mark.parametrize("now", [1.0, 1.4, 1.499])
def test_a_ping_that_left_late_has_a_second_for_its_answer(now: float):
    router, worker = opened_ends()
    router.on_time(now, now - 0.5)
    carry(router, worker, now)
    assert router.next_wakeup() == pytest.approx(now + 1.0)
    for later in (1.51, 1.53, now + 0.99):
        router.on_time(later)
        assert state_of(router) is SessionState.OPEN
    router.on_time(now + 1.001)
    router.on_time(now + 1.001 + 2 * LOOK_AGAIN_S)
    assert state_of(router) is SessionState.BROKEN


def broken_end() -> MessageSession:
    """A router's end whose connection ended at 1 s."""
    router, _ = opened_ends()
    router.broken(1.0)
    return router


@pytest.mark.parametrize(("now", "lost_at"), [(3.6, 3.7), (5.0, 6.5), (3600.0, 3602.5)])
def test_a_process_that_stood_still_without_a_connection_may_dial_again(now: float, lost_at: float):
    """For as long again as its timer was late, and for `resume_s` at most."""
    router = broken_end()
    router.on_time(now, now - 3.5)
    assert state_of(router) is SessionState.BROKEN
    assert router.next_wakeup() == pytest.approx(lost_at)
    router.on_time(lost_at + 0.001, 0.001)
    assert state_of(router) is SessionState.LOST


def test_without_a_connection_a_stop_is_excused_once_for_each_break():
    router = broken_end()
    router.on_time(5.0, 1.5)
    router.connected(ConnectionKeys(b"s" * 32, b"r" * 32), 0, 5.1)
    router.broken(6.0)
    router.on_time(20.0, 11.5)
    assert state_of(router) is SessionState.BROKEN, "another break"
    router.on_time(40.0, 17.5)
    assert state_of(router) is SessionState.LOST


def test_without_a_connection_a_timer_in_time_loses_the_session():
    router = broken_end()
    router.on_time(3.5, 0.0)
    assert state_of(router) is SessionState.LOST


class DeafConnection:
    """Takes everything, and brings nothing."""

    wire = "memory"

    def __init__(self) -> None:
        self.num_sent = 0
        self._ended = asyncio.Event()

    async def send(self, message: pb.SessionMessage) -> None:
        self.num_sent += 1

    async def receive(self) -> pb.SessionMessage | None:
        await self._ended.wait()
        return None

    def close(self) -> None:
        self._ended.set()


async def breaks_at(loop: VirtualLoop, stops: list[tuple[float, float]]) -> tuple[float, int]:
    """Seconds from the connection to its break, and frames sent. `stops`: when this process stands still, how long."""
    began = loop.time()
    session = MessageSession(1, WORKER_KINDS, LIMITS, began)
    changed, connection = asyncio.Event(), DeafConnection()
    pump = SessionPump(session, lambda _: None, changed.set)
    pump.start()
    session.connected(ConnectionKeys(b"s" * 32, b"r" * 32), 0, began)
    task = asyncio.ensure_future(pump.run(connection))
    for at_s, seconds in stops:
        await asyncio.sleep(began + at_s - loop.time())
        stand_still(loop, seconds)
    await changed.wait()
    assert session.state is SessionState.BROKEN
    after_s = loop.time() - began
    session.lose("the test ends")
    pump.close()
    await task
    return after_s, connection.num_sent


def test_a_silent_end_is_found_in_time():
    async def work(loop: VirtualLoop) -> None:
        after_s, num_sent = await breaks_at(loop, [])
        assert LIMITS.silent_s <= after_s <= LIMITS.silent_s + 2 * TICK_S
        assert num_sent == 2, "an ack and a ping"

    run(work)


@pytest.mark.parametrize("at_s", [0.2, 0.6, 1.4])
def test_a_silent_end_is_waited_for_once_more_and_then_found(at_s: float):
    async def work(loop: VirtualLoop) -> None:
        after_s, num_sent = await breaks_at(loop, [(at_s, 20.0)])
        found_s = after_s - at_s - 20.0
        assert LIMITS.silent_s <= found_s <= LIMITS.silent_s + 3 * TICK_S
        assert num_sent == 2, "an ack and a ping, which left before or after the stop"

    run(work)


def test_a_process_that_stands_still_twice_is_excused_once():
    """Nothing was heard between two stops."""

    async def work(loop: VirtualLoop) -> None:
        after_s, _ = await breaks_at(loop, [(0.2, 20.0), (21.0, 20.0)])
        assert 41.0 <= after_s <= 41.0 + 2 * TICK_S

    run(work)


def test_a_short_delay_of_the_loop_excuses_no_more_than_itself():
    async def work(loop: VirtualLoop) -> None:
        after_s, _ = await breaks_at(loop, [(1.45, 0.2)])
        assert 1.65 + 0.1 <= after_s <= 1.65 + 0.15 + 2 * TICK_S

    run(work)
