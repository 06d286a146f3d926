"""Links that rest, and who tries them again."""

from __future__ import annotations

import pytest

from baton.domain.ids import AttemptId, Incarnation, RequestId
from services.router.dispatch.quarantine import LinkLoss, Quarantine, RestLimits

LINK = (Incarnation(1), Incarnation(2))
OTHER = (Incarnation(1), Incarnation(3))
LIMITS = RestLimits(first_s=1.0, longest_s=4.0, excused_s=10.0)


def attempt(number: int) -> AttemptId:
    return AttemptId(RequestId(f"r{number}"), 1)


@pytest.fixture
def quarantine() -> Quarantine:
    quarantine = Quarantine(LIMITS)
    quarantine.place(attempt(0), LINK)
    assert quarantine.lose(attempt(0), LINK, now=0.0) == LinkLoss(1.0, excused=False)
    return quarantine


def lost_trial(quarantine: Quarantine, number: int, now: float) -> LinkLoss | None:
    assert quarantine.admits(LINK, now)
    quarantine.place(attempt(number), LINK)
    return quarantine.lose(attempt(number), LINK, now)


def test_a_link_rests_after_a_loss_and_others_do_not(quarantine):
    assert not quarantine.admits(LINK, now=0.99)
    assert quarantine.admits(LINK, now=1.0)
    assert quarantine.admits(OTHER, now=0.0)


def test_a_link_that_broke_under_many_attempts_broke_once(quarantine):
    for number in range(1, 9):
        assert quarantine.lose(attempt(number), LINK, now=0.5) is None
    assert quarantine.admits(LINK, now=1.0)


def test_one_attempt_at_a_time_tries_it_again(quarantine):
    quarantine.place(attempt(1), LINK)
    assert not quarantine.admits(LINK, now=2.0)
    quarantine.settle(attempt(1))  # given up, which says nothing
    quarantine.settle(attempt(1))
    assert quarantine.admits(LINK, now=2.0)


def test_rests_double_and_trials_are_excused_for_a_while(quarantine):
    losses = [lost_trial(quarantine, n, now) for n, now in enumerate([1.0, 3.0, 7.0, 11.0], start=1)]
    assert losses == [LinkLoss(2.0, True), LinkLoss(4.0, True), LinkLoss(4.0, True), LinkLoss(4.0, False)]
    assert not quarantine.admits(LINK, now=14.9)
    assert quarantine.admits(LINK, now=15.0)


def test_a_trial_that_lands_ends_it(quarantine):
    quarantine.place(attempt(1), LINK)
    assert quarantine.land(attempt(1))
    assert not quarantine.land(attempt(1))
    assert len(quarantine) == 0
    assert quarantine.admits(LINK, now=1.0)
    assert quarantine.lose(attempt(1), LINK, now=1.0) == LinkLoss(1.0, excused=False), "a new trouble"


def test_pages_that_came_before_it_broke_prove_nothing(quarantine):
    assert not quarantine.land(attempt(7))
    assert not quarantine.admits(LINK, now=0.5)


def test_a_link_that_is_made_anew_is_trusted(quarantine):
    quarantine.place(attempt(1), LINK)
    quarantine.retain({LINK, OTHER})
    assert not quarantine.admits(LINK, now=5.0)
    quarantine.retain({OTHER})
    assert quarantine.admits(LINK, now=0.0)
    quarantine.settle(attempt(1))
    assert not quarantine.land(attempt(1))
