"""What the door tells those it refuses."""

from __future__ import annotations

import math

import pytest

from baton.domain.errors import Overloaded
from services.router.dispatch.admission import Door, DoorLimits, Place

ONE_AT_A_TIME = DoorLimits(max_running_requests=1, max_queued_requests=2, max_queued_tokens=100)


def refused_after(door: Door, num_tokens: int, now: float, deadline_s: float = math.inf) -> float | None:
    with pytest.raises(Overloaded) as refusal:
        door.admit(num_tokens, now, deadline_s)
    return refusal.value.retry_after_s


def a_stay_each(door: Door, stay_s: float, num: int) -> Place:
    """`num` requests run one after the other, always one waiting; returns the one that runs now."""
    running = door.admit(1, now=0.0)
    for n in range(num):
        waiting = door.admit(10, now=n * stay_s)
        assert door.leave(running, now=(n + 1) * stay_s) == waiting
        running = waiting
    return running


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


@pytest.mark.parametrize(("num_tokens", "num_in_the_way"), [(10, 1), (60, 2), (101, 3)])
def test_retry_after_is_the_time_the_requests_in_the_way_will_take(num_tokens, num_in_the_way):
    door = Door(ONE_AT_A_TIME)
    a_stay_each(door, 10.0, 3)
    door.admit(50, now=30.0)
    door.admit(50, now=30.0)
    assert refused_after(door, num_tokens, now=30.0) == pytest.approx(num_in_the_way * 10.0)


def test_the_refused_are_told_to_come_back_one_after_the_other():
    door = Door(ONE_AT_A_TIME)
    a_stay_each(door, 10.0, 3)
    door.admit(1, now=30.0)
    door.admit(1, now=30.0)
    assert [refused_after(door, 1, now=30.0) for _ in range(3)] == [10.0, 21.0, 32.0]
    assert refused_after(door, 1, now=35.0) == 38.0
    assert [refused_after(door, 1, now=35.0) for _ in range(20)][-1] == 120.0
    assert refused_after(door, 1, now=160.0) == 65.0, "appointments that have passed are no hindrance"


def test_retry_after_grows_while_nothing_leaves_and_stays_within_its_bounds():
    for now, expected in [(0.5, 1.0), (30.0, 30.0), (60.0, 60.0), (10_000.0, 120.0)]:
        door = Door(ONE_AT_A_TIME)
        for _ in range(3):
            door.admit(1, now=0.0)
        assert refused_after(door, 1, now=now) == expected


def test_a_standstill_is_noticed_whatever_was_measured_before():
    door = Door(ONE_AT_A_TIME)
    a_stay_each(door, 1.0, 64)
    door.admit(1, now=64.0)
    door.admit(1, now=64.0)
    assert refused_after(door, 1, now=164.0) == pytest.approx(50.0)


def test_what_a_request_takes_is_remembered_over_an_idle_hour():
    door = Door(ONE_AT_A_TIME)
    door.leave(a_stay_each(door, 10.0, 4), now=50.0)
    for _ in range(3):
        door.admit(1, now=3600.0)
    assert refused_after(door, 1, now=3600.0) == pytest.approx(10.0)


def test_who_would_be_served_too_late_is_refused_before_the_queue_is_full():
    door = Door(DoorLimits(1, 100, 1000, max_ttft_s=25.0))
    a_stay_each(door, 10.0, 4)
    door.admit(1, now=40.0)  # its turn comes in 10 s
    door.admit(1, now=40.0)  # and this one's in 20 s
    assert refused_after(door, 1, now=40.0) == pytest.approx(5.0)
    assert door.num_waiting == 2


def test_the_time_to_the_first_token_counts_and_so_does_the_requests_own_deadline():
    door = Door(DoorLimits(1, 100, 1000))
    running = a_stay_each(door, 10.0, 4)
    door.answered(running, now=44.0)
    door.answered(running, now=49.0)  # not its first
    assert refused_after(door, 1, now=44.0, deadline_s=13.0) == pytest.approx(1.0)
    door.admit(1, now=44.0, deadline_s=14.5)


def test_a_full_door_says_so_before_it_knows_the_prompt():
    door = Door(ONE_AT_A_TIME)
    door.admit(1, now=0.0)
    door.refuse_if_full(now=0.0)
    door.admit(50, now=0.0)
    door.admit(50, now=0.0)
    with pytest.raises(Overloaded):
        door.refuse_if_full(now=0.0)


def test_a_request_that_is_under_way_already_is_never_refused():
    door = Door(ONE_AT_A_TIME)
    for _ in range(3):
        door.admit(50, now=0.0)
    assert not door.may_run(door.admit(100, now=0.0, always=True))
    assert door.num_waiting == 3


def test_no_more_run_than_the_workers_have_rows_for():
    door = Door(DoorLimits(max_running_requests=3, max_queued_requests=9, max_queued_tokens=100))
    assert door.resize(1, now=0.0) == []
    places = [door.admit(1, now=0.0) for _ in range(5)]
    assert [door.may_run(place) for place in places] == [True, False, False, False, False]
    assert door.resize(2, now=1.0) == [places[1]]
    assert door.resize(9, now=1.0) == [places[2]], "the setting bounds it"
    assert door.resize(1, now=1.0) == []
    assert door.leave(places[0], now=2.0) is None, "two still run where one may"
    assert door.resize(None, now=2.0) == [places[3]]
