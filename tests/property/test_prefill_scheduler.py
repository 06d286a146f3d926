"""The prefill scheduler under any sequence of calls; `prefill_machine` has the invariants."""

from __future__ import annotations

from hypothesis.stateful import run_state_machine_as_test

from tests.property.machines.damaged_prefill_machine import DamagedPrefillMachine
from tests.property.machines.prefill_machine import PrefillMachine
from tests.tiny_workers import REPEATABLE_SETTINGS


def test_prefill_scheduler():
    run_state_machine_as_test(PrefillMachine, settings=REPEATABLE_SETTINGS)


def test_prefill_scheduler_over_pages_that_rot():
    run_state_machine_as_test(DamagedPrefillMachine, settings=REPEATABLE_SETTINGS)
