"""A pull reports at most one LATE and exactly one terminal event."""

import pytest

from baton.domain.errors import Broken
from baton.domain.ids import Incarnation, WorkerId
from baton.transfer.active_pull import ActivePull, pull_problem
from baton.transfer.base import Pull, PullEvent, PullOutcome, SourceInfo
from tests.unit.transfer.rigs import page_ids


class ActivePullHarness:
    """A pull under a clock that the test sets."""

    def __init__(self, deadline_s: float = 1.0) -> None:
        self.now = 100.0
        self.events: list[PullEvent] = []
        pull = Pull(1, WorkerId("p"), page_ids([0]), page_ids([0]), None, deadline_s)
        self.active = ActivePull(pull, self.now, self.events.append, lambda: self.now)

    @property
    def outcomes(self) -> list[PullOutcome]:
        return [event.outcome for event in self.events]


def test_a_pull_in_time_is_done():
    harness = ActivePullHarness()
    harness.now += 0.25
    harness.active.num_bytes = 77
    harness.active.complete()
    assert harness.events == [PullEvent(harness.active.pull, PullOutcome.DONE, 77, 0.25)]
    assert harness.active.ended


def test_corrupt_positions_are_sorted():
    harness = ActivePullHarness()
    harness.active.complete(corrupt=[5, 2])
    assert (harness.outcomes, harness.events[0].corrupt) == ([PullOutcome.CORRUPT], (2, 5))


def test_a_late_pull_is_late_and_then_failed():
    harness = ActivePullHarness()
    harness.now += 1.5
    harness.active.complete()
    assert harness.outcomes == [PullOutcome.LATE, PullOutcome.FAILED]


def test_late_is_reported_once_and_a_corrupt_late_pull_fails():
    harness = ActivePullHarness()
    harness.active.expire("slow")
    harness.active.expire("slow")
    harness.active.complete(corrupt=[0])
    assert harness.outcomes == [PullOutcome.LATE, PullOutcome.FAILED]


def test_it_ends_only_once():
    harness = ActivePullHarness()
    harness.active.fail("gone")
    harness.active.expire("slow")
    with pytest.raises(Broken, match="ended twice"):
        harness.active.complete()
    assert harness.outcomes == [PullOutcome.FAILED]


@pytest.mark.parametrize(
    ("remote", "local", "digests", "problem"),
    [
        ([0, 1], [0], None, "2 remote pages for 1"),
        ([0], [0], (1, 2), "2 digests for 1"),
        ([0], [4], None, "local page is outside the pool of 4"),
        ([0], [-1], None, "local page is outside"),
        ([9], [0], None, "remote page is outside the pool of 9"),
        ([0, 9, 1], [0, 1, 2], None, "remote page is outside the pool of 9"),
        ([0, 1, 2], [3, -1, 2], None, "local page is outside"),
    ],
)
def test_an_impossible_pull_has_a_reason(remote, local, digests, problem):
    source = SourceInfo(WorkerId("p"), Incarnation(1), "", "fake", b"", 0, 9, 64)
    pull = Pull(1, WorkerId("p"), page_ids(remote), page_ids(local), digests, 1.0)
    assert problem in (pull_problem(pull, 4, source) or "")


@pytest.mark.parametrize("slots", [(0, 3), (-1, 0), (0,)])
def test_impossible_window_slots_have_a_reason(slots):
    source = SourceInfo(WorkerId("p"), Incarnation(1), "", "fake", b"", 0, 9, 64, num_window_slots=3, window_bytes=8)
    pull = Pull(1, WorkerId("p"), page_ids([0, 1]), page_ids([2, 3]), None, 1.0, remote_windows=slots)
    assert "window slots" in (pull_problem(pull, 4, source) or "")


def test_a_sound_pull_is_possible():
    source = SourceInfo(WorkerId("p"), Incarnation(1), "", "fake", b"", 0, 9, 64)
    assert pull_problem(Pull(1, WorkerId("p"), page_ids([8]), page_ids([3]), (0,), 1.0), 4, source) is None
