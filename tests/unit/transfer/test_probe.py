"""The probe: its result, its errors, and the release of its pages."""

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation, WorkerId
from baton.kv.memory import PageMemory
from baton.transfer.base import PullEvent, PullOutcome, SourceInfo
from baton.transfer.fake import TRANSPORT, FakeFabric, FakePuller, FakeSource, PullFault, PullFaultKind
from baton.transfer.probe import FIRST_BYTES, probe_bandwidth
from tests.unit.transfer.rigs import WAIT_S, EventLog, page_ids
from tests.unit.transfer.source_process import filled_memory

PREFILL = WorkerId("prefill-0")


@dataclass
class Pair:
    fabric: FakeFabric = field(default_factory=FakeFabric)
    events: EventLog = field(default_factory=EventLog)
    free: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.source = FakeSource(self.fabric, PREFILL, Incarnation(1), filled_memory(8, 64, seed=1))
        self.puller = FakePuller(self.fabric, PageMemory(8, 64), self.events)
        self.info = SourceInfo(PREFILL, Incarnation(1), "", TRANSPORT, self.source.metadata(), 0, 8, 64)
        self.puller.connect(self.info)

    def probe(self, num_local: int = 8, num_pages: int = 8, deadline_s: float = WAIT_S) -> tuple[int, float]:
        local = page_ids(range(num_local))
        return probe_bandwidth(
            self.puller, self.info, local, num_pages, deadline_s=deadline_s, on_pages_free=self.free.set
        )


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.puller.close()


def test_bytes_really_moved_and_pages_are_free(pair):
    num_bytes, seconds = pair.probe()
    assert num_bytes == 8 * 64
    assert seconds > 0
    assert pair.free.is_set()


@pytest.mark.parametrize(("num_local", "num_pages", "moved"), [(3, 8, 3), (8, 2, 2), (8, 100, 8)])
def test_a_probe_moves_at_most_the_pages_of_both_pools(pair, num_local, num_pages, moved):
    assert pair.probe(num_local, num_pages)[0] == moved * 64


@pytest.mark.parametrize(
    ("start_s", "page_s", "stalls", "sizes", "took"),
    [
        (0.0, 1e-6, {}, [1, 1, 4, 16, 64, 100], 1e-4),
        (0.0, 0.25, {}, [1, 1, 4, 4], 1.0),
        (5e-3, 2.5e-3, {}, [1, 1, 4, 16, 16], 0.045),
        (0.0, 1e-6, {2: 0.5}, [1, 1, 4, 4, 16, 64, 100], 1e-4),
    ],
    ids=["fast", "slow", "far", "one pull waited for its core"],
)
def test_a_slow_link_is_measured_with_few_bytes(start_s, page_s, stalls, sizes, took):
    pulled: list[int] = []

    def submit_to(pull, on_event):
        num_pages, number = len(pull.remote_pages), len(pulled)
        pulled.append(num_pages)
        seconds = start_s + page_s * num_pages + stalls.get(number, 0.0)
        on_event(PullEvent(pull, PullOutcome.DONE, num_pages * FIRST_BYTES // 4, seconds))

    info = SourceInfo(PREFILL, Incarnation(1), "", TRANSPORT, b"", 0, 100, FIRST_BYTES // 4)
    puller: Any = SimpleNamespace(submit_to=submit_to)
    free = threading.Event()
    moved, took_s = probe_bandwidth(puller, info, page_ids(range(100)), 100, on_pages_free=free.set)
    assert pulled == sizes
    assert moved == sizes[-1] * FIRST_BYTES // 4
    assert took_s == pytest.approx(took)
    assert free.is_set()


def test_a_failure_in_either_round_is_a_broken_link(pair):
    for faults in ([PullFault(PullFaultKind.FAIL)], [PullFault(), PullFault(PullFaultKind.FAIL)]):
        pair.free.clear()
        pair.fabric.script(faults)
        with pytest.raises(LinkBroken, match="scripted"):
            pair.probe()
        assert pair.free.is_set()


def test_a_hanging_probe_keeps_its_pages_until_the_read_ends(pair):
    pair.fabric.script([PullFault(PullFaultKind.HANG)])
    with pytest.raises(LinkBroken, match="nothing within"):
        pair.probe(deadline_s=0.05)
    assert not pair.free.is_set()
    pair.source.close()
    assert pair.free.wait(WAIT_S)
