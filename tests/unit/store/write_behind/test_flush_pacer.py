"""Times of journal flushes."""

from __future__ import annotations

import pytest

from baton.store.write_behind.flush_pacer import MAX_REST_S, REST_RATIO, FlushPacer


def test_what_is_due_first_waits_an_interval_for_what_follows() -> None:
    pace = FlushPacer(0.05)
    pace.begin(100.0)
    assert pace.wait_s(100.0, urgent=False) == pytest.approx(0.05)
    assert pace.wait_s(100.0, urgent=True) == 0.0
    pace.record(100.05, 100.06)
    pace.begin(100.07)
    assert pace.wait_s(100.07, urgent=False) == pytest.approx(0.09)  # the rest after a flush is longer


def test_the_next_flush_is_after_the_interval() -> None:
    pace = FlushPacer(0.05)
    assert pace.wait_s(100.0, urgent=False) == 0.0
    pace.record(100.0, 100.001)
    assert pace.wait_s(100.001, urgent=False) == pytest.approx(0.049)
    assert pace.wait_s(100.06, urgent=False) == 0.0


@pytest.mark.parametrize("urgent", [False, True])
def test_flushing_takes_a_small_part_of_the_time_even_if_urgent(urgent: bool) -> None:
    pace = FlushPacer(0.05)
    pace.record(100.0, 100.02)
    assert pace.wait_s(100.02, urgent=urgent) == pytest.approx(REST_RATIO * 0.02)


def test_an_urgent_flush_skips_the_interval() -> None:
    pace = FlushPacer(3600.0)
    pace.record(100.0, 100.001)
    assert pace.wait_s(100.001, urgent=True) == pytest.approx(0.01)


def test_the_rest_after_a_slow_flush_is_bounded() -> None:
    pace = FlushPacer(0.05)
    pace.record(100.0, 101.0)
    assert pace.wait_s(101.0, urgent=False) == pytest.approx(MAX_REST_S)


@pytest.mark.parametrize("urgent", [False, True])
def test_what_did_not_fit_follows_without_a_rest(urgent: bool) -> None:
    pace = FlushPacer(0.05)
    pace.record(100.0, 100.02, more=True)
    assert pace.wait_s(100.02, urgent=urgent) == 0.0
    pace.record(100.02, 100.03)
    assert pace.wait_s(100.03, urgent=urgent) == pytest.approx(REST_RATIO * 0.01)
