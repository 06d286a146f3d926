"""Prompts that start before their reservation, in simulated clusters: every end is drawn, and a wrong rule is found."""

from baton.telemetry.metrics import EARLY_PREFILLS_TOTAL
from simulation.policies import PolicyClasses
from simulation.run import run
from simulation.scenario_generator import generate_scenario
from tests.simulation import planted_bugs

OUTCOMES = ("reserved", "no_room", "ended")
SEEDS = (2, 4, 8, 36)
"""Refused reservations, lost workers and cancelled requests beside a prompt that has started."""


def num_early(outcome: str) -> float:
    return float(EARLY_PREFILLS_TOTAL.labels(outcome)._value.get())


def test_early_prompts_get_room_find_none_and_end_otherwise():
    before = {outcome: num_early(outcome) for outcome in OUTCOMES}
    assert [run(generate_scenario(seed)).violation for seed in SEEDS] == [None] * len(SEEDS)
    grown = {outcome: num_early(outcome) - before[outcome] for outcome in OUTCOMES}
    assert all(grown.values()), grown


def test_an_attempt_of_two_prefill_workers_is_found():
    policies = PolicyClasses(dispatcher=planted_bugs.ForgetsWhereItBegan)
    violation = next(filter(None, (run(generate_scenario(seed), policies).violation for seed in range(20, 60))), None)
    assert violation is not None
    assert violation.rule == "I8"
