"""Writes whose requests were lost: some arrive after their sender has given them up."""

import asyncio
from random import Random

from baton.domain.ids import Incarnation, OwnerId, RequestId
from baton.store.memory_store import MemoryStore
from baton.store.store import CallRecord, CallStatus, StoreUnavailable
from simulation.nodes.state_store import TIMEOUT_S, SimStore, StoreServer
from simulation.runtime.network import STRAGGLES_S, STRAGGLING, SimNetwork
from simulation.runtime.process import SimProcess
from simulation.runtime.trace import Trace
from simulation.runtime.virtual_clock import VirtualLoop
from simulation.scenario import STORE, Noise

NUM_CALLS = 200
CUT_S = 3.0


def call(number: int) -> CallRecord:
    return CallRecord(RequestId(f"c{number}"), OwnerId("r/1"), 1, CallStatus.OPEN, "/", b"{}", "", 0, 0, ())


class _Link:
    """A router that writes calls to a store, and loses each request."""

    def __init__(self, noise: Noise, loop: VirtualLoop) -> None:
        self.network = SimNetwork(1, noise, Trace(loop.time))
        self.host = StoreServer(MemoryStore)
        self.router = SimProcess("router-0", Incarnation(1), Random(0), lambda process, error: None)
        self.store = SimStore(self.host, self.network, self.router, 0.5)

    async def write_in_vain(self) -> None:
        writes = [self.store.put_call(call(number)) for number in range(NUM_CALLS)]
        answers = await asyncio.gather(*writes, return_exceptions=True)
        assert {type(answer) for answer in answers} == {StoreUnavailable}

    async def num_stored(self) -> int:
        found = [await self.host.store.get_call(RequestId(f"c{number}")) for number in range(NUM_CALLS)]
        return sum(record is not None for record in found)


def stored(noise: Noise, cut_s: float = 0.0, *, is_killed: bool = False) -> list[int]:
    """Returns how many calls the store has when they are given up, and after the latest arrival."""
    loop = VirtualLoop()

    async def lose() -> list[int]:
        link = _Link(noise, loop)
        if cut_s:
            link.network.cut("router-0", STORE, cut_s)
        await link.write_in_vain()
        counts = [await link.num_stored()]
        if is_killed:
            await link.host.wipe()
        await asyncio.sleep(max(STRAGGLES_S, cut_s) + TIMEOUT_S)
        return [*counts, await link.num_stored()]

    try:
        return loop.run_until_complete(lose())
    finally:
        loop.close()


def is_share(count: int) -> bool:
    return 0.5 * STRAGGLING < count / NUM_CALLS < 2 * STRAGGLING


def test_some_lost_writes_arrive_after_they_were_given_up():
    before, after = stored(Noise(loss=1.0))
    assert before == 0
    assert is_share(after)


def test_some_writes_that_a_cut_held_arrive_at_its_end():
    before, after = stored(Noise(), CUT_S)
    assert before == 0
    assert is_share(after)


def test_no_late_write_reaches_the_successor_of_a_killed_store():
    assert stored(Noise(loss=1.0), is_killed=True) == [0, 0]
