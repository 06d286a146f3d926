"""A step waits for rows that are about to join, for no longer than that gains."""

from __future__ import annotations

import pytest

from baton.services.decode.rows.join_gate import HOLD_SHARE, MAX_HOLD_S, JoinGate

STEP_S = 0.02


def held_s(num_joining: int, num_running: int, last_step_s: float) -> float:
    """The longest wait, in seconds, of a gate whose joining rows never join."""
    gate = JoinGate()
    if not gate.holds(num_joining, num_running, last_step_s, 5.0):
        return 0.0
    until = gate.next_wakeup()
    assert until is not None
    assert not gate.holds(num_joining, num_running, last_step_s, until)
    return until - 5.0


@pytest.mark.parametrize(("num_joining", "num_running"), [(0, 4), (4, 0), (0, 0)])
def test_nothing_waits_unless_some_join_and_some_run(num_joining: int, num_running: int):
    assert held_s(num_joining, num_running, STEP_S) == 0.0


def test_nothing_waits_before_a_step_was_timed():
    assert held_s(4, 4, 0.0) == 0.0


@pytest.mark.parametrize(
    ("num_joining", "num_running", "last_step_s", "wanted"),
    [
        (7, 1, STEP_S, HOLD_SHARE * STEP_S),
        (1, 64, STEP_S, STEP_S / 64),
        (7, 1, 10.0, MAX_HOLD_S),
    ],
)
def test_a_wait_is_bounded(num_joining: int, num_running: int, last_step_s: float, wanted: float):
    assert held_s(num_joining, num_running, last_step_s) == pytest.approx(wanted)


def test_running_rows_lose_no_more_than_joining_ones_gain():
    for num_joining in range(1, 40):
        for num_running in range(1, 40):
            assert held_s(num_joining, num_running, STEP_S) * num_running <= num_joining * STEP_S + 1e-9


def test_a_wait_ends_when_all_have_joined():
    gate = JoinGate()
    assert gate.holds(3, 1, STEP_S, 0.0)
    assert not gate.holds(0, 4, STEP_S, 0.001)
    assert gate.next_wakeup() is None


def test_there_is_one_wait_a_step_whoever_comes_meanwhile():
    gate = JoinGate()
    assert gate.holds(3, 4, STEP_S, 0.0)
    assert not gate.holds(0, 7, STEP_S, 0.004)
    assert not gate.holds(9, 7, STEP_S, 0.006), "counted from the first wait"
    gate.on_step()
    assert gate.holds(9, 7, STEP_S, 0.006)
