"""The fake transport in virtual time."""

import pytest

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation, WorkerId
from baton.kv.memory import PageMemory
from baton.transfer.active_pull import ActivePull
from baton.transfer.base import Pull, PullEvent, PullOutcome, SourceInfo
from baton.transfer.digest import digest_pages
from baton.transfer.fake import TRANSPORT, FakeFabric, FakeMover, FakeSource, PullFault, PullFaultKind
from tests.unit.transfer.rigs import page_ids
from tests.unit.transfer.source_process import filled_memory

PREFILL = WorkerId("prefill-0")


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.fabric = FakeFabric()
        self.remote = filled_memory(4, 32, seed=5)
        self.source = FakeSource(self.fabric, PREFILL, Incarnation(1), self.remote)
        self.local = PageMemory(4, 32)
        self.mover = FakeMover(self.fabric, self.local, lambda: self.now)
        metadata = self.source.metadata()
        self.mover.link(SourceInfo(PREFILL, Incarnation(1), "", TRANSPORT, metadata, 0, 4, 32))
        self.events: list[PullEvent] = []

    def start(self, deadline_s: float = 10.0) -> ActivePull:
        pages = page_ids([1, 3])
        pull = Pull(1, PREFILL, pages, page_ids([0, 1]), digest_pages(self.remote, pages), deadline_s)
        active = ActivePull(pull, self.now, self.events.append, lambda: self.now)
        self.mover.start(active)
        return active

    def outcomes(self) -> list[PullOutcome]:
        return [event.outcome for event in self.events]


def test_a_pull_without_a_fault_is_done_in_the_next_turn():
    world = World()
    world.start()
    assert world.mover.progress() is None
    assert world.outcomes() == [PullOutcome.DONE]
    assert world.events[0].num_bytes == 64
    assert world.local.page(1) == world.remote.page(3)


def test_a_delay_is_kept_in_virtual_time():
    world = World()
    world.fabric.script([PullFault(delay_s=2.0)])
    world.start()
    assert world.mover.progress() == pytest.approx(2.0)
    assert world.local.page(0) == bytes(32)
    world.now = 2.0
    assert world.mover.progress() is None
    assert (world.outcomes(), world.events[0].seconds) == ([PullOutcome.DONE], 2.0)


def test_faults_meet_the_pulls_in_order_and_then_no_more():
    world = World()
    world.fabric.script([PullFault(PullFaultKind.FAIL), PullFault(PullFaultKind.CORRUPT, position=1)])
    for _ in range(3):
        world.start()
        world.mover.progress()
    assert world.outcomes() == [PullOutcome.FAILED, PullOutcome.CORRUPT, PullOutcome.DONE]
    assert world.events[1].corrupt == (1,)


def test_a_hanging_pull_ends_only_with_its_source():
    world = World()
    world.fabric.script([PullFault(PullFaultKind.HANG)])
    active = world.start()
    world.now = 1000.0
    assert world.mover.progress() is not None
    active.expire("past its deadline")
    world.source.close()
    assert world.mover.progress() is None
    assert world.outcomes() == [PullOutcome.LATE, PullOutcome.FAILED]


def test_an_unknown_source_cannot_be_linked():
    with pytest.raises(LinkBroken, match="not on the fabric"):
        World().mover.link(SourceInfo(PREFILL, Incarnation(2), "", TRANSPORT, b"prefill-0:2", 0, 4, 32))
