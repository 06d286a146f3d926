"""Events of the cluster: each change of the registry gives one, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.ids import Incarnation
from baton.domain.worker import WorkerStatus
from baton.services.router.cluster.changes import MAX_LOST, SHOWN_LOST_S, ClusterChanges
from baton.services.router.cluster.event_log import MAX_KEPT, ClusterEventLog
from baton.services.router.cluster.source import KnownWorker
from tests.unit.router.cluster.worker_records import known, link, record

PREFILL = record("prefill-0", 1)
DECODE = record("decode-0", 2, links=(link(PREFILL),))
BOTH = (known(PREFILL), known(DECODE))


class World:
    """A view of the registry, and the kinds of the events of each step."""

    def __init__(self) -> None:
        self.log = ClusterEventLog(lambda: 1.0)
        self.changes = ClusterChanges(self.log)
        self.now = 0.0

    def step(self, *workers: KnownWorker, breakers=(), after_s: float = 1.0) -> list[str]:
        self.now += after_s
        seq = self.log.last_seq
        self.changes.observe(workers, dict.fromkeys(breakers, "open"), self.now)
        return [event.kind for event in self.log.after(seq)]

    def lost(self) -> list[tuple[str, bool]]:
        return [(worker.record.id, worker.lost) for worker in self.changes.lost(self.now)]


@pytest.fixture
def world() -> World:
    made = World()
    assert made.step(*BOTH) == [], "everything was there before"
    assert made.step(*BOTH) == [], "nothing changed"
    return made


def test_a_worker_that_vanishes_is_lost_until_it_comes_back(world: World):
    assert world.step(known(PREFILL)) == ["lost"]
    assert world.lost() == [("decode-0", True)]
    assert world.step(known(PREFILL)) == [], "told once"
    assert world.step(known(PREFILL), known(record("decode-0", 3))) == ["joined"]
    assert world.lost() == []


def test_a_worker_that_drained_has_left(world: World):
    draining = known(replace(DECODE, status=WorkerStatus.DRAINING))
    assert world.step(known(PREFILL), draining) == ["draining"]
    assert world.step(known(PREFILL)) == ["left"]
    assert world.lost() == [("decode-0", False)]


def test_another_process_under_the_same_id_is_a_restart(world: World):
    assert world.step(known(PREFILL), known(replace(DECODE, incarnation=Incarnation(9)))) == ["restarted", "link_up"]


@pytest.mark.parametrize("absence", ["silent", "suspected", "stuck"])
def test_an_absence_is_told_when_it_begins(world: World, absence: str):
    assert world.step(known(PREFILL), known(DECODE, absence)) == [absence]
    assert world.step(known(PREFILL), known(DECODE, absence)) == []
    assert world.step(*BOTH) == []


def test_a_link_that_falls_back_to_another_path_is_told(world: World):
    slow = replace(DECODE, links=(link(PREFILL, "tcp"),))
    assert world.step(known(PREFILL), known(slow)) == ["link_path"]
    assert [event.level for event in world.log.after(0)] == ["warn"]


def test_a_breaker_that_opens_and_closes_is_told(world: World):
    assert world.step(*BOTH, breakers=[(1, 2)]) == ["link_open"]
    assert world.step(*BOTH, breakers=[(1, 2)]) == []
    assert world.step(*BOTH) == ["link_closed"]
    assert "prefill-0 > decode-0" in list(world.log.after(0))[-1].text


def test_lost_workers_are_forgotten_and_bounded(world: World):
    world.step(*[known(record(f"decode-{n}", 10 + n)) for n in range(3 * MAX_LOST)])
    world.step(known(PREFILL))
    assert len(world.lost()) == MAX_LOST
    world.step(known(PREFILL), after_s=SHOWN_LOST_S)
    assert world.lost() == []


def test_the_log_is_bounded_and_its_numbers_grow():
    log = ClusterEventLog(lambda: 1.0)
    for _ in range(MAX_KEPT + 5):
        log.add("k", "info", "x" * 1000)
    seqs = [event.seq for event in log.after(0)]
    assert seqs == list(range(6, MAX_KEPT + 6))
    assert len(log.newest(None, 1)[0].text) < 1000


def test_a_tenant_sees_only_events_of_its_requests():
    log = ClusterEventLog(lambda: 1.0)
    log.add("lost", "bad", "decode-0", worker="decode-0")
    log.add_request("replayed", "warn", "", request="a", tenant="red")
    log.add_request("replayed", "warn", "", request="b", tenant="blue")
    log.add("refused", "warn", "two requests")
    assert [event.request for event in log.newest("red", 9)] == ["a"]
    assert log.newest("", 9) == [], "a tenant without a name is not everyone"
    assert len(log.newest(None, 9)) == 4
