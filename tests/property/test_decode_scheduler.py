"""Import policy, imports and decode scheduler under any sequence of calls; `decode_checks` has the invariants."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.machines.decode_machine import DecodeMachine
from tests.tiny_workers import REPEATABLE_SETTINGS


def test_decode_side():
    run_state_machine_as_test(
        DecodeMachine, settings=settings(REPEATABLE_SETTINGS, max_examples=100, stateful_step_count=60)
    )
