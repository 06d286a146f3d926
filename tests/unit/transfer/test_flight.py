"""A flight says at most one LATE and exactly one end, whatever happens to it."""

import pytest

from baton.domain.errors import Broken
from baton.domain.ids import Incarnation, WorkerId
from baton.transfer.base import Pull, PullEvent, PullOutcome, SourceInfo
from baton.transfer.flight import Flight, why_impossible
from tests.unit.transfer.rigs import page_ids


class Sky:
    """A flight under a clock that the test turns."""

    def __init__(self, deadline_s: float = 1.0) -> None:
        self.now = 100.0
        self.events: list[PullEvent] = []
        pull = Pull(1, WorkerId("p"), page_ids([0]), page_ids([0]), None, deadline_s)
        self.flight = Flight(pull, self.now, self.events.append, lambda: self.now)

    @property
    def outcomes(self) -> list[PullOutcome]:
        return [event.outcome for event in self.events]


def test_landing_in_time_is_done():
    sky = Sky()
    sky.now += 0.25
    sky.flight.num_bytes = 77
    sky.flight.land()
    assert sky.events == [PullEvent(sky.flight.pull, PullOutcome.DONE, 77, 0.25)]
    assert sky.flight.ended


def test_corrupt_positions_are_sorted():
    sky = Sky()
    sky.flight.land(corrupt=[5, 2])
    assert (sky.outcomes, sky.events[0].corrupt) == ([PullOutcome.CORRUPT], (2, 5))


def test_a_late_landing_is_late_and_then_failed():
    sky = Sky()
    sky.now += 1.5
    sky.flight.land()
    assert sky.outcomes == [PullOutcome.LATE, PullOutcome.FAILED]


def test_late_is_said_once_and_a_corrupt_late_one_failed():
    sky = Sky()
    sky.flight.expire("slow")
    sky.flight.expire("slow")
    sky.flight.land(corrupt=[0])
    assert sky.outcomes == [PullOutcome.LATE, PullOutcome.FAILED]


def test_it_ends_only_once():
    sky = Sky()
    sky.flight.fail("gone")
    sky.flight.expire("slow")
    with pytest.raises(Broken, match="ended twice"):
        sky.flight.land()
    assert sky.outcomes == [PullOutcome.FAILED]


@pytest.mark.parametrize(
    ("remote", "local", "digests", "problem"),
    [
        ([0, 1], [0], None, "2 remote pages for 1"),
        ([0], [0], (1, 2), "2 digests for 1"),
        ([0], [4], None, "local page is outside the pool of 4"),
        ([0], [-1], None, "local page is outside"),
        ([9], [0], None, "remote page is outside the pool of 9"),
    ],
)
def test_what_cannot_be_started_is_named(remote, local, digests, problem):
    source = SourceInfo(WorkerId("p"), Incarnation(1), "", "fake", b"", 0, 9, 64)
    pull = Pull(1, WorkerId("p"), page_ids(remote), page_ids(local), digests, 1.0)
    assert problem in (why_impossible(pull, 4, source) or "")


def test_a_sound_pull_is_possible():
    source = SourceInfo(WorkerId("p"), Incarnation(1), "", "fake", b"", 0, 9, 64)
    assert why_impossible(Pull(1, WorkerId("p"), page_ids([8]), page_ids([3]), (0,), 1.0), 4, source) is None
