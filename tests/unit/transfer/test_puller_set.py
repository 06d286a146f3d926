"""Each source is read over one transport; one that is ruled out is offered to its process no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation, WorkerId
from baton.kv.memory import PageMemory
from baton.transfer.base import Pull, PullOutcome, SourceInfo
from baton.transfer.fake import FakeFabric, FakeMover, FakeSource
from baton.transfer.puller import ThreadedPuller
from baton.transfer.puller_set import PullerSet
from tests.unit.transfer.rigs import WAIT_S, EventLog, page_ids
from tests.unit.transfer.source_process import filled_memory

P, Q = WorkerId("prefill-0"), WorkerId("prefill-1")
FIRST, SECOND = Incarnation(1), Incarnation(2)
FAST, SAFE = "fast", "safe"


@dataclass
class _Rig:
    """Two transports on two fabrics: a source is readable over the fabric that it is registered on."""

    memory: PageMemory = field(default_factory=lambda: PageMemory(8, 64))
    events: EventLog = field(default_factory=EventLog)
    fabrics: dict[str, FakeFabric] = field(default_factory=lambda: {FAST: FakeFabric(), SAFE: FakeFabric()})

    def __post_init__(self) -> None:
        self.pullers = PullerSet([self._puller(FAST), self._puller(SAFE)])

    def _puller(self, transport: str) -> ThreadedPuller:
        def make_mover(wake: Callable[[], None]) -> FakeMover:
            return FakeMover(self.fabrics[transport], self.memory)

        return ThreadedPuller(transport, (64,), make_mover, self.events)

    def source(self, id: WorkerId, transport: str, seed: int) -> SourceInfo:
        source = FakeSource(self.fabrics[transport], id, FIRST, filled_memory(8, 64, seed=seed))
        return SourceInfo(id, FIRST, "", transport, source.metadata(), 0, 8, 64)

    def pulled(self, id: WorkerId) -> bytes:
        """Pulls a page; returns what arrived, b"" if it failed."""
        pull = Pull(1, id, page_ids([0]), page_ids([0]), None, WAIT_S)
        self.pullers.submit(pull)
        event = self.events.terminal(pull)
        return bytes(self.memory.read(page_ids([0]))[0]) if event.outcome is PullOutcome.DONE else b""


@pytest.fixture
def rig() -> Iterator[_Rig]:
    rig = _Rig()
    yield rig
    rig.pullers.close()


def test_each_source_is_read_over_its_own_transport(rig: _Rig):
    rig.pullers.connect(rig.source(P, FAST, seed=1))
    rig.pullers.connect(rig.source(Q, SAFE, seed=2))
    assert (rig.pullers.transport(P), rig.pullers.transport(Q)) == (FAST, SAFE)
    assert rig.pulled(P) == bytes(filled_memory(8, 64, seed=1).read(page_ids([0]))[0])
    assert rig.pulled(Q) == bytes(filled_memory(8, 64, seed=2).read(page_ids([0]))[0])


def test_a_source_that_changes_its_transport_is_read_over_the_new_one_only(rig: _Rig):
    rig.pullers.connect(rig.source(P, FAST, seed=1))
    rig.pullers.connect(rig.source(P, SAFE, seed=2))
    assert rig.pulled(P) == bytes(filled_memory(8, 64, seed=2).read(page_ids([0]))[0])
    rig.pullers.disconnect(P)
    assert rig.pulled(P) == b""


def test_a_transport_that_was_ruled_out_is_offered_to_the_next_process(rig: _Rig):
    assert rig.pullers.offered(P, FIRST) == rig.pullers.transports == (FAST, SAFE)
    assert rig.pullers.rule_out(P, FIRST, FAST)
    assert rig.pullers.offered(P, FIRST) == (SAFE,)
    assert rig.pullers.offered(Q, FIRST) == rig.pullers.offered(P, SECOND) == (FAST, SAFE)


def test_the_last_transport_stays(rig: _Rig):
    assert rig.pullers.rule_out(P, FIRST, FAST)
    assert not rig.pullers.rule_out(P, FIRST, SAFE)
    assert rig.pullers.offered(P, FIRST) == (SAFE,)


def test_an_unknown_transport_is_no_link(rig: _Rig):
    with pytest.raises(LinkBroken, match="speaks smoke, not fast or safe"):
        rig.pullers.connect(replace(rig.source(P, FAST, seed=1), transport="smoke"))
