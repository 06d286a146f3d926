"""When journals are written."""

from __future__ import annotations

import pytest

from baton.state.pace import MAX_REST_S, REST, Pace


def test_the_first_round_begins_at_once_and_the_next_after_the_interval() -> None:
    pace = Pace(0.05)
    assert pace.wait_s(100.0, hurry=False) == 0.0
    pace.took(100.0, 100.001)
    assert pace.wait_s(100.001, hurry=False) == pytest.approx(0.049)
    assert pace.wait_s(100.06, hurry=False) == 0.0


@pytest.mark.parametrize("hurry", [False, True])
def test_a_round_takes_a_small_part_of_the_time_even_in_a_hurry(hurry: bool) -> None:
    pace = Pace(0.05)
    pace.took(100.0, 100.02)
    assert pace.wait_s(100.02, hurry=hurry) == pytest.approx(REST * 0.02)


def test_a_hurry_cuts_the_interval_short() -> None:
    pace = Pace(3600.0)
    pace.took(100.0, 100.001)
    assert pace.wait_s(100.001, hurry=True) == pytest.approx(0.01)


def test_a_slow_book_is_not_left_alone_for_ever() -> None:
    pace = Pace(0.05)
    pace.took(100.0, 101.0)
    assert pace.wait_s(101.0, hurry=False) == pytest.approx(MAX_REST_S)
