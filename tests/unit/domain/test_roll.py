"""Who is there, when the registry is away or has lost its pages."""

from __future__ import annotations

from baton.domain.ids import Incarnation
from baton.domain.roll import Roll

ONE, OTHER = Incarnation(1), Incarnation(2)


def test_an_announcement_that_ends_ends_presence_at_once_and_the_process_later():
    roll = Roll(patience_s=2.0)
    roll.look([ONE, OTHER], 0.0)
    roll.look([OTHER], 1.0)
    assert not roll.has(ONE, 1.0)
    assert not roll.is_gone(ONE, 1.0)
    roll.look([OTHER], 2.0)
    assert roll.is_gone(ONE, 2.0)
    assert roll.has(OTHER, 2.0)
    assert not roll.is_gone(OTHER, 2.0)


def test_nobody_is_absent_because_the_registry_is_away_or_comes_back_empty():
    roll = Roll(patience_s=2.0)
    roll.look([ONE, OTHER], 0.0)
    for now in range(1, 60):
        roll.no_look(float(now))
    roll.look([], 60.0)
    assert roll.has(ONE, 60.0)
    assert roll.has(OTHER, 60.0)
    roll.look([ONE], 61.0)
    assert roll.has(OTHER, 61.9)
    assert not roll.is_gone(OTHER, 61.9)
    assert roll.has(ONE, 99.0)
    assert not roll.has(OTHER, 62.0)
    assert roll.is_gone(OTHER, 62.0)


def test_a_registry_that_is_suddenly_empty_has_lost_its_pages():
    roll = Roll(patience_s=2.0)
    roll.look([ONE], 0.0)
    roll.look([], 10.0)
    assert roll.has(ONE, 11.9)
    assert not roll.is_gone(ONE, 11.9)
    roll.look([], 11.0)
    assert not roll.has(ONE, 12.0), "it is excused once, not for ever"
    assert roll.is_gone(ONE, 12.0)


def test_who_was_replaced_or_never_seen_has_no_excuse():
    roll = Roll(patience_s=2.0)
    roll.look([ONE], 0.0)
    roll.forget(ONE)
    roll.no_look(0.5)
    for incarnation in (ONE, OTHER):
        assert not roll.has(incarnation, 0.5)
        assert roll.is_gone(incarnation, 0.5)


def test_those_who_are_gone_are_not_remembered():
    roll = Roll(patience_s=2.0)
    roll.look([ONE], 0.0)
    roll.look([OTHER], 1.0)
    roll.look([OTHER], 5.0)
    roll.no_look(6.0)
    assert not roll.has(ONE, 6.0)
