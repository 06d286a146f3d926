"""The prefill scheduler under any sequence of calls; see `prefill_machine` for what is demanded of it."""

from __future__ import annotations

from hypothesis.stateful import run_state_machine_as_test

from tests.property.machines.prefill_machine import PrefillMachine
from tests.tiny_workers import REPEATABLE_SETTINGS


def test_prefill_scheduler():
    run_state_machine_as_test(PrefillMachine, settings=REPEATABLE_SETTINGS)
