"""The prefill scheduler under any sequence of calls; `prefill_machine` has the invariants."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from baton.services.prefill.policy import PolicySettings, PrefillPolicy
from simulation.runtime.step_time import ScriptedStepTime, attentive
from tests.property.machines.damaged_prefill_machine import DamagedPrefillMachine
from tests.property.machines.prefill_machine import PrefillMachine
from tests.tiny_workers import PAGE_SIZE, REPEATABLE_SETTINGS


class SharedStepMachine(PrefillMachine):
    """Of a long prompt a step computes one page first."""

    long_prompt_tokens = PAGE_SIZE


def ordered(policy: PrefillPolicy, max_overtakes: int) -> type[PrefillMachine]:
    """The machine of a worker with this policy; short prompts may overtake long ones within a step."""
    attributes = {"order": PolicySettings(policy, max_overtakes=max_overtakes)}
    return type(f"{policy.value}Machine", (SharedStepMachine,), attributes)


class PriorityMachine(SharedStepMachine):
    """Prompts of higher priority come first, whatever is left of them."""

    order = PolicySettings(PrefillPolicy.SRPT, max_overtakes=2, by_priority=True)


class EqualTimeMachine(SharedStepMachine):
    """Steps take the time of a budget at the beginning of a prompt; attention costs as much as all else."""

    order = PolicySettings(PrefillPolicy.SRPT, max_overtakes=2)
    equal_time = ScriptedStepTime(attentive)


ORDERED = [ordered(PrefillPolicy.LPM, 1), ordered(PrefillPolicy.SRPT, 2), ordered(PrefillPolicy.EDF, 64)]


@pytest.mark.parametrize("machine", [PrefillMachine, SharedStepMachine, PriorityMachine, EqualTimeMachine, *ORDERED])
def test_prefill_scheduler(machine: type[PrefillMachine]):
    run_state_machine_as_test(machine, settings=REPEATABLE_SETTINGS)


def test_prefill_scheduler_over_pages_that_rot():
    run_state_machine_as_test(DamagedPrefillMachine, settings=REPEATABLE_SETTINGS)
