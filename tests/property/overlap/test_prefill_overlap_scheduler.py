"""Prefill ahead of its device changes no token, page or digest, and reads or reuses no page too early."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from baton.services.prefill.policy import PolicySettings, PrefillPolicy
from tests.property.overlap.prefill_overlap_machine import (
    DamagedPrefillOverlapMachine,
    DigestingMachine,
    PrefillOverlapMachine,
)
from tests.tiny_workers import PAGE_SIZE, REPEATABLE_SETTINGS


class ShortFirstMachine(DigestingMachine):
    """Short prompts overtake long ones, of which a step computes one page first."""

    long_prompt_tokens = PAGE_SIZE
    order = PolicySettings(PrefillPolicy.SRPT, max_overtakes=2)


MACHINES = (PrefillOverlapMachine, ShortFirstMachine, DigestingMachine, DamagedPrefillOverlapMachine)


@pytest.mark.parametrize("machine", MACHINES)
def test_prefill_side_with_a_step_in_flight(machine: type[PrefillOverlapMachine]):
    machine.num_ahead = 0
    run_state_machine_as_test(machine, settings=settings(REPEATABLE_SETTINGS, max_examples=machine.num_examples))
    assert machine.num_ahead > 30
