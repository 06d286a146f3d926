"""The transfer thread around a scripted mover."""

import threading
from collections.abc import Callable

import pytest

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation, WorkerId
from baton.transfer.active_pull import ActivePull
from baton.transfer.base import Pull, PullOutcome, SourceInfo
from baton.transfer.puller import ThreadedPuller
from tests.unit.transfer.rigs import WAIT_S, EventLog, page_ids

SOURCE = SourceInfo(WorkerId("p"), Incarnation(1), "", "still", b"", 0, 8, 64)


class IdleMover:
    """Moves nothing by itself."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.active_pulls: list[ActivePull] = []
        self.land_next = threading.Event()
        self.fault: Exception | None = None
        self.closed = threading.Event()

    def link(self, source: SourceInfo) -> None:
        if source.incarnation == 2:
            raise LinkBroken("not that one")

    def unlink(self, source: WorkerId) -> None: ...

    def start(self, active: ActivePull) -> None:
        self.active_pulls.append(active)

    def progress(self) -> float | None:
        if self.fault is not None:
            raise self.fault
        if self.land_next.is_set():
            self.land_next.clear()
            self.active_pulls.pop(0).complete()
        return None

    def close(self) -> None:
        self.closed.set()


class PullerHarness:
    def __init__(self) -> None:
        self.events = EventLog()
        self.mover: IdleMover
        self.puller = ThreadedPuller("still", (64,), self._make, self.events)

    def _make(self, wake: Callable[[], None]) -> IdleMover:
        self.mover = IdleMover(wake)
        return self.mover

    def pull(self, deadline_s: float = WAIT_S) -> Pull:
        pull = Pull(1, WorkerId("p"), page_ids([0]), page_ids([0]), None, deadline_s)
        self.puller.submit(pull)
        return pull


@pytest.fixture
def harness():
    harness = PullerHarness()
    yield harness
    harness.puller.close()
    assert harness.mover.closed.is_set()


def test_a_deadline_is_noticed_while_the_mover_is_silent(harness):
    pull = harness.pull(deadline_s=0.05)
    event = harness.events.first(pull)
    assert event.outcome is PullOutcome.LATE
    assert 0.05 <= event.seconds < 5.0


def test_the_mover_can_wake_the_thread_from_any_other(harness):
    pull = harness.pull()
    harness.puller.connect(SOURCE)  # returns after the pull was taken
    harness.mover.land_next.set()
    harness.mover.wake()
    assert harness.events.terminal(pull).outcome is PullOutcome.DONE


def test_a_refused_link_is_the_callers_error_and_nobody_elses(harness):
    with pytest.raises(LinkBroken, match="not that one"):
        harness.puller.connect(SourceInfo(WorkerId("p"), Incarnation(2), "", "still", b"", 0, 8, 64))
    harness.puller.connect(SOURCE)


def test_a_callers_own_events_go_to_no_one_else(harness):
    mine = EventLog()
    pull = Pull(1, WorkerId("p"), page_ids([0]), page_ids([0]), None, WAIT_S)
    harness.puller.submit_to(pull, mine)
    harness.mover.land_next.set()
    harness.mover.wake()
    assert mine.terminal(pull).outcome is PullOutcome.DONE
    assert harness.events.of(pull) == []


def test_a_crash_leaves_pulls_late_and_fails_new_ones(harness):
    before = harness.pull()
    harness.puller.connect(SOURCE)
    harness.mover.fault = RuntimeError("a bug")
    harness.mover.wake()
    assert harness.events.first(before).outcome is PullOutcome.LATE
    assert harness.events.terminal(harness.pull()).outcome is PullOutcome.FAILED
    with pytest.raises(LinkBroken, match="failed"):
        harness.puller.connect(SOURCE)


def test_a_mover_that_cannot_be_made_is_the_constructors_error():
    def broken(wake: Callable[[], None]) -> IdleMover:
        raise LinkBroken("no UCX here")

    before = threading.active_count()
    with pytest.raises(LinkBroken, match="no UCX here"):
        ThreadedPuller("still", (64,), broken, EventLog())
    assert threading.active_count() <= before + 1


def test_close_may_be_called_from_an_event():
    closed = threading.Event()
    harness = PullerHarness()

    def close(_: object) -> None:
        harness.puller.close()
        closed.set()

    harness.puller.submit_to(Pull(1, WorkerId("p"), page_ids([0]), page_ids([0]), None, 0.01), close)
    assert closed.wait(WAIT_S)
    assert harness.mover.closed.wait(WAIT_S)
