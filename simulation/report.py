"""A failing scenario in words: what broke, what is left of the scenario, and the last lines that concern it."""

from __future__ import annotations

from collections.abc import Iterator

from simulation.world import Verdict

MAX_LINES = 60


def describe(verdict: Verdict, max_lines: int = MAX_LINES) -> str:
    """For people to read."""
    return "\n".join(_lines(verdict, max_lines))


def _lines(verdict: Verdict, max_lines: int) -> Iterator[str]:
    scenario, violation = verdict.scenario, verdict.violation
    yield f"seed {scenario.seed}: {violation or 'no violation'}"
    yield f"  {', '.join((*scenario.routers, *scenario.prefills, *scenario.decodes))}; digests {scenario.digests}"
    yield f"  prefilling for themselves: {', '.join(scenario.selfish) or 'nobody'}"
    yield f"  {scenario.noise}"
    yield from (f"  fault  {fault}" for fault in scenario.faults)
    yield from (f"  client {outcome}" for outcome in verdict.outcomes)
    yield from map(str, verdict.trace.story(violation.subject if violation else None, max_lines))
    yield f"  trace {verdict.trace.digest()}; again: python -m simulation --seed {scenario.seed} --trace"
