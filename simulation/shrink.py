"""Shrinks a failing scenario: removes faults, clients and noise while it breaks the same rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from simulation.run import RunResult
from simulation.scenario import Noise, Scenario

Run = Callable[[Scenario], RunResult]


def shrink(failing: RunResult, run: Run, max_runs: int = 100) -> RunResult:
    """A result with the same broken rule, from the smallest scenario found within `max_runs`."""
    smallest = failing
    candidates = _smaller(smallest.scenario)
    for _ in range(max_runs):
        candidate = next(candidates, None)
        if candidate is None:
            break
        result = run(candidate)
        if result.violation is not None and failing.violation is not None:
            if result.violation.rule != failing.violation.rule:
                continue
            smallest, candidates = result, _smaller(candidate)
    return smallest


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Every scenario with one element less."""
    for i in range(len(scenario.faults)):
        yield replace(scenario, faults=scenario.faults[:i] + scenario.faults[i + 1 :])
    middle = len(scenario.clients) // 2
    for clients in (scenario.clients[:middle], scenario.clients[middle:]):
        if clients:
            yield replace(scenario, clients=clients)
    for i in range(len(scenario.clients)):
        yield replace(scenario, clients=scenario.clients[:i] + scenario.clients[i + 1 :])
    for field in fields(Noise):
        if field.name != "mean_delay_s" and getattr(scenario.noise, field.name):
            yield replace(scenario, noise=replace(scenario.noise, **{field.name: 0.0}))
