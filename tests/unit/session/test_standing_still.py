"""A process that stood still has heard nothing meanwhile: that says nothing of the other end. On a clock that jumps."""

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
from baton.session.session import WORKER_KINDS, MessageSession, SessionLimits
from baton.session.tags import ConnectionKeys
from baton.session.wires.memory_wire import MemoryWire
from simulation.runtime.virtual_clock import VirtualLoop

LIMITS = SessionLimits()
LISTENER, ROUTER = Incarnation(7), Incarnation(9)
ADDRESS = "a:1"
TICK_S = 0.02


def run(work: Callable[[VirtualLoop], Awaitable[None]]) -> None:
    loop = VirtualLoop()
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


@pytest.mark.parametrize("offset_s", [0.0, 0.3, 0.49, 0.5, 0.51, 0.99, 1.0])
@pytest.mark.parametrize("stopped_s", [1.0, 1.5, 2.0, 5.0, 3600.0])
def test_two_ends_that_stood_still_keep_their_connection(stopped_s: float, offset_s: float):
    """As on a laptop that was closed, wherever they were between two pings."""

    async def work(loop: VirtualLoop) -> None:
        wire, owners = MemoryWire(), list[Owner]()

        def make_owner(pump: SessionPump) -> Owner:
            owners.append(Owner(pump))
            return owners[-1]

        listener = SessionListener(OPEN_CLUSTER, LISTENER, LIMITS, make_owner)
        wire.listen(ADDRESS, listener.serve)
        dialler = SessionDialler(wire, OPEN_CLUSTER, DialledPeer(ADDRESS, LISTENER, "router-0", ROUTER), LIMITS)
        task = asyncio.ensure_future(dialler.run(Owner()))
        await asyncio.sleep(0.1 + offset_s)
        stand_still(loop, stopped_s)
        await asyncio.sleep(10.0)
        [owner] = owners
        assert owner.pump is not None
        for session in (dialler.session, owner.pump.session):
            assert (session.state, session.num_breaks) == (SessionState.OPEN, 0)
            assert session.num_round_trips > 0
        listener.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await wire.close()

    run(work)


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
def test_a_silent_end_is_asked_once_more_and_then_found(at_s: float):
    async def work(loop: VirtualLoop) -> None:
        after_s, num_sent = await breaks_at(loop, [(at_s, 20.0)])
        found_s = after_s - at_s - 20.0
        assert LIMITS.silent_s <= found_s <= LIMITS.silent_s + 3 * TICK_S
        assert num_sent == (2 if at_s < LIMITS.ping_s else 3), "the new count has a ping of its own"

    run(work)


def test_a_process_that_stands_still_twice_is_excused_once():
    """Nothing was heard between two stops."""

    async def work(loop: VirtualLoop) -> None:
        after_s, _ = await breaks_at(loop, [(0.2, 20.0), (21.0, 20.0)])
        assert 41.0 <= after_s <= 41.0 + 2 * TICK_S

    run(work)


def test_a_short_delay_of_the_loop_excuses_nothing():
    async def work(loop: VirtualLoop) -> None:
        after_s, _ = await breaks_at(loop, [(1.45, 0.2)])
        assert after_s <= 1.65 + 2 * TICK_S

    run(work)
