"""Spans of a finished run in which something was faulty, from its scenario and its trace. Used by `silence`.

A process is faulty until it lives again, and a link until its messages arrive. A killed process is faulty at least
until keepalive has closed its half-open connections.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass

from simulation.policies import CONFIG
from simulation.runtime.network import KEEPALIVE_S
from simulation.runtime.trace import BROKE, LATE, TraceEntry
from simulation.scenario import FaultPlan, Scenario, SimFaultKind

LONGEST_DRAIN_S = CONFIG.drain_s + 3.0
"""Until a drained process has left: its requests, its clients and its records in the store."""

_ENDS = re.compile("-x|<->")
"""Between the ends of a call that failed, and of a session."""

LEAVES = (SimFaultKind.DRAIN, SimFaultKind.UPGRADE)


@dataclass(frozen=True, slots=True)
class DisturbedSpan:
    """`names` were faulty, or the link between two of them, from `from_s` until `until_s`."""

    from_s: float
    until_s: float
    names: frozenset[str]


def disturbed_spans(scenario: Scenario, entries: list[TraceEntry]) -> list[DisturbedSpan]:
    """All of them by their begin: planned faults, lost connections, late messages and late reads."""
    starts = [entry for entry in entries if entry.text == "starts"]
    planned = [_planned(fault, starts) for fault in scenario.faults]
    return sorted([*planned, *_noise(entries)], key=lambda span: span.from_s)


def calm_spans(
    spans: list[DisturbedSpan], from_s: float, until_s: float, names: Set[str] | None = None
) -> Iterator[tuple[float, float]]:
    """Parts of a time without a disturbance among `names`; None: without any."""
    for span in spans:
        if span.until_s < from_s or span.from_s >= until_s or (names is not None and not span.names <= names):
            continue
        if span.from_s > from_s:
            yield from_s, span.from_s
        from_s = span.until_s
    if from_s < until_s:
        yield from_s, until_s


def _planned(fault: FaultPlan, starts: list[TraceEntry]) -> DisturbedSpan:
    until_s = fault.at_s + fault.duration_s
    if fault.kind is SimFaultKind.KILL:
        until_s = max(until_s, fault.at_s + KEEPALIVE_S)
    elif fault.kind in LEAVES:
        later = (entry.at_s for entry in starts if entry.source == fault.target and entry.at_s > until_s)
        until_s = next(later, until_s + LONGEST_DRAIN_S)
    return DisturbedSpan(fault.at_s, until_s, frozenset(filter(None, (fault.target, fault.peer))))


def _noise(entries: list[TraceEntry]) -> Iterator[DisturbedSpan]:
    for entry in entries:
        if entry.text.startswith(LATE):
            until_s = entry.at_s + float(entry.text.removeprefix(LATE).split()[0])
            yield DisturbedSpan(entry.at_s, until_s, frozenset(entry.source.split("|")))
        elif entry.text.endswith(BROKE):
            yield DisturbedSpan(entry.at_s, entry.at_s, frozenset(_ENDS.split(entry.source)))
