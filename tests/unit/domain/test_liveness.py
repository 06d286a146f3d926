"""Liveness of processes when the registry is unavailable or has lost its data."""

from __future__ import annotations

from baton.domain.ids import Incarnation
from baton.domain.liveness import Liveness

ONE, OTHER = Incarnation(1), Incarnation(2)


def test_a_missing_process_is_absent_at_once_and_gone_after_grace():
    liveness = Liveness(grace_s=2.0)
    liveness.observe([ONE, OTHER], 0.0)
    liveness.observe([OTHER], 1.0)
    assert not liveness.is_present(ONE, 1.0)
    assert not liveness.is_gone(ONE, 1.0)
    liveness.observe([OTHER], 2.0)
    assert liveness.is_gone(ONE, 2.0)
    assert liveness.is_present(OTHER, 2.0)
    assert not liveness.is_gone(OTHER, 2.0)


def test_a_registry_outage_makes_no_process_absent():
    liveness = Liveness(grace_s=2.0)
    liveness.observe([ONE, OTHER], 0.0)
    for now in range(1, 60):
        liveness.observe_outage(float(now))
    liveness.observe([], 60.0)
    assert liveness.is_present(ONE, 60.0)
    assert liveness.is_present(OTHER, 60.0)
    liveness.observe([ONE], 61.0)
    assert liveness.is_present(OTHER, 61.9)
    assert not liveness.is_gone(OTHER, 61.9)
    assert liveness.is_present(ONE, 99.0)
    assert not liveness.is_present(OTHER, 62.0)
    assert liveness.is_gone(OTHER, 62.0)


def test_a_suddenly_empty_registry_starts_one_grace_period():
    liveness = Liveness(grace_s=2.0)
    liveness.observe([ONE], 0.0)
    liveness.observe([], 10.0)
    assert liveness.is_present(ONE, 11.9)
    assert not liveness.is_gone(ONE, 11.9)
    liveness.observe([], 11.0)
    assert not liveness.is_present(ONE, 12.0), "it is excused once, not for ever"
    assert liveness.is_gone(ONE, 12.0)


def test_a_forgotten_or_unseen_process_gets_no_grace():
    liveness = Liveness(grace_s=2.0)
    liveness.observe([ONE], 0.0)
    liveness.forget(ONE)
    liveness.observe_outage(0.5)
    for incarnation in (ONE, OTHER):
        assert not liveness.is_present(incarnation, 0.5)
        assert liveness.is_gone(incarnation, 0.5)


def test_gone_processes_are_forgotten():
    liveness = Liveness(grace_s=2.0)
    liveness.observe([ONE], 0.0)
    for now in (1.0, 2.0, 3.0):
        liveness.observe([OTHER], now)
    liveness.observe_outage(6.0)
    assert not liveness.is_present(ONE, 6.0)


def test_an_announcement_that_is_gone_too_early_makes_no_process_absent():
    """An emptied registry in which another process is back already, or an older announcement that is refused."""
    liveness = Liveness(grace_s=2.0)
    for step in range(8):
        liveness.observe([ONE, OTHER], step / 2, {ONE: step, OTHER: step})
    liveness.observe([OTHER], 4.0, {OTHER: 8})
    assert liveness.is_present(ONE, 5.9)
    assert not liveness.is_gone(ONE, 5.9)
    liveness.observe([OTHER], 5.0, {OTHER: 10})
    assert not liveness.is_present(ONE, 6.0), "it is excused once, not for ever"
    assert liveness.is_gone(ONE, 6.0)


def test_an_announcement_that_was_not_renewed_has_expired():
    liveness = Liveness(grace_s=2.0)
    for step in range(5):
        liveness.observe([ONE, OTHER], step / 2, {ONE: 7, OTHER: step})
    liveness.observe([OTHER], 2.5, {OTHER: 5})
    assert not liveness.is_present(ONE, 2.5)
    assert not liveness.is_gone(ONE, 2.5)
    assert liveness.is_gone(ONE, 4.0)


def test_a_process_that_is_back_can_be_excused_again():
    liveness = Liveness(grace_s=2.0)
    liveness.observe([ONE, OTHER], 0.0, {ONE: 1, OTHER: 1})
    liveness.observe([OTHER], 0.5, {OTHER: 2})
    liveness.observe([ONE, OTHER], 1.0, {ONE: 3, OTHER: 3})
    liveness.observe([OTHER], 3.0, {OTHER: 7})
    assert liveness.is_present(ONE, 3.0), "the reader was away"
    liveness.observe([ONE, OTHER], 3.5, {ONE: 8, OTHER: 8})
    liveness.observe([OTHER], 4.0, {OTHER: 9})
    assert liveness.is_present(ONE, 5.9)


def test_a_reader_that_was_away_gives_all_a_grace_period_once():
    liveness = Liveness(grace_s=2.0)
    liveness.observe([ONE, OTHER], 0.0)
    liveness.observe([OTHER], 2.5)
    assert liveness.is_present(ONE, 4.4)
    assert not liveness.is_gone(ONE, 4.4)
    liveness.observe([OTHER], 4.5)
    assert not liveness.is_present(ONE, 4.5)
    assert liveness.is_gone(ONE, 4.5), "also of a reader that is always as slow"
