"""Arrivals, landings and the decode scheduler under any sequence of calls; see `decode_machine` for the demands."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.decode_machine import DecodeMachine
from tests.worlds import REPRODUCIBLE


def test_decode_side():
    run_state_machine_as_test(DecodeMachine, settings=settings(REPRODUCIBLE, max_examples=100, stateful_step_count=60))
