"""Report of a failing scenario: the broken rule, the shrunk scenario, and the last trace lines of the request."""

from __future__ import annotations

from collections.abc import Iterator

from simulation.run import RunResult

MAX_LINES = 60


def describe(result: RunResult, max_lines: int = MAX_LINES) -> str:
    """The report as text."""
    return "\n".join(_lines(result, max_lines))


def _lines(result: RunResult, max_lines: int) -> Iterator[str]:
    scenario, violation = result.scenario, result.violation
    yield f"seed {scenario.seed}: {violation or 'no violation'}"
    yield f"  {', '.join((*scenario.routers, *scenario.prefills, *scenario.decodes))}; digests {scenario.digests}"
    yield f"  eviction {scenario.eviction.value}, prefill {scenario.prefill_policy.value}, equal {scenario.equal_steps}"
    yield f"  host tier {scenario.host_write}"
    yield f"  images {scenario.images}: {', '.join(scenario.encoders) or 'no encode worker'}; towers {scenario.towers}"
    yield f"  prefilling for themselves: {', '.join(scenario.local_prefill_workers) or 'nobody'}"
    yield f"  {scenario.noise}"
    yield from (f"  fault  {fault}" for fault in scenario.faults)
    yield from (f"  client {outcome}" for outcome in result.outcomes)
    yield from map(str, result.trace.entries_for(violation.request_id if violation else None, max_lines))
    yield f"  trace {result.trace.digest()}; again: python -m simulation --seed {scenario.seed} --trace"
