"""Routers place prompts by the step-time fits that workers announce, also by wrong and by absurd ones."""

from random import Random

import pytest

from baton.domain.timing import prompt_cost
from baton.telemetry.metrics import PLACEMENTS_TOTAL
from simulation.announced_fits import AnnouncedFits
from simulation.run import run
from simulation.scenario_generator import generate_scenario

SEEDS = [seed for seed in range(40) if generate_scenario(seed).fits]


def num_placements(basis: prompt_cost.CostBasis) -> float:
    return sum(
        sample.value
        for metric in PLACEMENTS_TOTAL.collect()
        for sample in metric.samples
        if sample.labels == {"basis": basis.value} and sample.name.endswith("_total")
    )


def test_fits_of_every_kind_are_announced():
    fits = AnnouncedFits(Random("kinds"), 0.01)
    drawn = [fits.next() for _ in range(1000)]
    assert None in drawn
    assert sum(fit is not None and fit.usable for fit in drawn) > 300
    assert sum(fit is not None and not fit.usable for fit in drawn) > 50


def test_prompts_are_placed_by_fits_and_by_constants():
    before = {basis: num_placements(basis) for basis in prompt_cost.CostBasis}
    for seed in SEEDS[:4]:
        assert run(generate_scenario(seed)).violation is None
    assert all(num_placements(basis) - before[basis] > 5 for basis in before)


def test_a_router_that_believes_every_fit_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompt_cost, "usable_fit", lambda record: record.load.step_time)
    assert any(_fails(seed) for seed in SEEDS)


def _fails(seed: int) -> bool:
    return run(generate_scenario(seed)).violation is not None
