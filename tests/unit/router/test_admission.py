"""What the door tells those it refuses."""

from __future__ import annotations

import pytest

from baton.domain.errors import Overloaded
from services.router.dispatch.admission import Door, DoorLimits

ONE_AT_A_TIME = DoorLimits(max_running_requests=1, max_queued_requests=2, max_queued_tokens=100)


def refused_after(door: Door, num_tokens: int, now: float) -> float | None:
    with pytest.raises(Overloaded) as refusal:
        door.admit(num_tokens, now)
    return refusal.value.retry_after_s


def test_a_prompt_larger_than_the_queue_still_runs_when_nobody_is_running():
    door = Door(ONE_AT_A_TIME)
    assert door.may_run(door.admit(1000, now=0.0))


def test_the_queue_is_bounded_in_tokens_before_it_is_bounded_in_requests():
    door = Door(ONE_AT_A_TIME)
    door.admit(1, now=0.0)
    door.admit(60, now=0.0)
    assert refused_after(door, 41, now=0.0) == 1.0
    door.admit(40, now=0.0)
    assert door.num_waiting_tokens == 100


def test_retry_after_is_the_time_the_requests_in_the_way_will_take():
    door = Door(ONE_AT_A_TIME)
    running = door.admit(1, now=0.0)
    for second in (10.0, 20.0, 30.0):  # one request every ten seconds, always one waiting
        waiting = door.admit(10, now=second - 10.0)
        assert door.leave(running, now=second) == waiting
        running = waiting
    door.admit(50, now=30.0)
    door.admit(50, now=30.0)
    assert refused_after(door, 10, now=30.0) == pytest.approx(1 * 30.0 / 4)
    assert refused_after(door, 60, now=30.0) == pytest.approx(2 * 30.0 / 4)
    assert refused_after(door, 101, now=30.0) == pytest.approx(3 * 30.0 / 4)


def test_retry_after_grows_while_nothing_leaves_and_stays_within_its_bounds():
    door = Door(ONE_AT_A_TIME)
    for _ in range(3):
        door.admit(1, now=0.0)
    waits = [refused_after(door, 1, now=now) for now in (0.5, 30.0, 60.0, 10_000.0)]
    assert waits == [1.0, 30.0, 60.0, 120.0]


def test_idle_time_does_not_count_as_slow_service():
    door = Door(ONE_AT_A_TIME)
    first = door.admit(1, now=0.0)
    door.leave(first, now=1.0)
    for _ in range(3):
        door.admit(1, now=5000.0)
    assert refused_after(door, 1, now=5004.0) == pytest.approx(4.0)
