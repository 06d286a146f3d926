"""A registration numbers and signs its records, waits for an id that is held, and gives up with a clear reason."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.trust import ClusterTrust
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from baton.worker.registration import Registration, RegistrationLoss

RECORD = WorkerRecord(WorkerId("decode-0"), WorkerRole.DECODE, Incarnation(1), "10.0.0.1:7", "m", "f", 16, 100, 100)
OTHER = replace(RECORD, incarnation=Incarnation(2), address="10.0.0.2:7")
NEVER_S = 600.0
TRUST = ClusterTrust(b"s" * 32)


@dataclass(slots=True)
class World:
    """A store on a clock that the test moves, and the losses that registrations report."""

    now: float = 0.0
    losses: list[RegistrationLoss] = field(default_factory=list)
    store: MemoryStore = field(init=False)

    def __post_init__(self) -> None:
        self.store = MemoryStore(StoreOptions(worker_ttl_s=2.0), clock=lambda: self.now)

    def registration(self, record: WorkerRecord, patience_s: float = 0.0) -> Registration:
        return Registration(self.store, lambda: record, 0.5, self.losses.append, TRUST, patience_s)


def test_records_are_signed_and_their_number_grows():
    async def run() -> None:
        world = World()
        registration = world.registration(RECORD)
        numbers = []
        for _ in range(3):
            await registration.announce()
            [record] = await world.store.workers()
            assert TRUST.verify(record)
            numbers.append(record.announcement)
        assert numbers == [1, 2, 3]

    asyncio.run(run())


def test_a_held_id_is_asked_for_until_the_patience_is_over():
    async def run() -> None:
        world = World()
        holder, second = world.registration(RECORD), world.registration(OTHER)
        await holder.announce()
        await second.announce()
        assert world.losses == [], "the holder may be its dead predecessor"
        await holder.announce()
        await second.announce()
        assert world.losses == [RegistrationLoss.TAKEN]
        assert [record.address for record in await world.store.workers()] == [RECORD.address]

    asyncio.run(run())


def test_a_dead_predecessor_only_delays_the_next_process():
    async def run() -> None:
        world = World()
        await world.registration(RECORD).announce()
        restarted = world.registration(OTHER, patience_s=60.0)
        await restarted.announce()
        world.now = 2.0
        await restarted.announce()
        assert [record.address for record in await world.store.workers()] == [OTHER.address]
        assert world.losses == []

    asyncio.run(run())


def test_a_holder_whose_record_ended_learns_that_it_was_replaced():
    async def run() -> None:
        world = World()
        paused, newer = world.registration(RECORD), world.registration(OTHER)
        await paused.announce()
        world.now = 3.0
        await newer.announce()
        world.now = 6.0
        await paused.announce()
        assert world.losses == [RegistrationLoss.REPLACED]
        await newer.announce()
        assert [record.address for record in await world.store.workers()] == [OTHER.address]

    asyncio.run(run())


def test_a_change_does_not_swallow_the_end():
    """A link that goes down asks for an announcement in the moment in which the process ends."""

    async def run() -> None:
        for num_ticks in range(8):
            world = World()
            registration = Registration(world.store, lambda: RECORD, NEVER_S, world.losses.append, TRUST, 0.0)
            running = asyncio.create_task(registration.run())
            for _ in range(20):  # it has announced and waits
                await asyncio.sleep(0)
            assert await world.store.workers()
            registration.announce_soon()
            for _ in range(num_ticks):
                await asyncio.sleep(0)
            running.cancel()
            ended, _ = await asyncio.wait({running}, timeout=30.0)
            assert ended, f"{num_ticks} ticks after the change"

    asyncio.run(run())
