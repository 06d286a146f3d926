"""The performance goals, and the findings of saved runs that measure them. Called by `bench.report`; pure.

A goal is a ratio of two quantities that one run measured on one machine, with a limit that nothing can pass. Figures
come only from the findings of saved runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from bench.harness.rotations import Finding

MISSED, NO_VERDICT, UNDECIDED, REACHED = "missed", "no verdict, no rotation was steady", "undecided", "reached"
VERDICTS = (MISSED, NO_VERDICT, UNDECIDED, REACHED)
"""From the least to the most favourable."""


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal. `pattern`: regular expression for the names of the experiment's findings.

    `scale` converts a finding into the goal's unit. `at_least`: the good side of `bound` is above it.
    """

    number: str
    what: str
    experiment: str
    pattern: str
    bound: float
    at_least: bool
    unit: str
    limit: str
    command: str
    scale: float = 1.0

    @property
    def target(self) -> str:
        """`>= 80 %`."""
        return f"{'>=' if self.at_least else '<='} {_number(self.bound)}{self.unit}"

    def verdict(self, finding: Finding) -> str:
        """One of `VERDICTS`. Steady rotations decide, and only when the whole interval lies on one side."""
        if finding.steady is None:
            return NO_VERDICT
        good = [self._is_good(end) for end in (finding.steady.low, finding.steady.high)]
        return REACHED if all(good) else UNDECIDED if any(good) else MISSED

    def margin(self, finding: Finding) -> float:
        """Distance of the median from `bound`, negative on the bad side."""
        distance = (finding.steady or finding.overall).median * self.scale - self.bound
        return distance if self.at_least else -distance

    def _is_good(self, figure: float) -> bool:
        scaled = figure * self.scale
        return scaled >= self.bound if self.at_least else scaled <= self.bound

    def shown(self, figure: float) -> str:
        """A figure in the goal's unit."""
        return f"{_number(figure * self.scale)}{self.unit}"


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """A goal without an experiment yet, and the reason."""

    number: str
    what: str
    target: str
    limit: str
    reason: str


_ENGINE = "baton bench engine --rotations 20 --result runs/engine.json"
_INTERFERENCE = "python -m bench.system.interference --rotations 10 --result runs/interference.json"
_GOODPUT = "python -m bench.system.goodput --rotations 3 --result runs/goodput.json"
_PREFIX = "baton bench prefix --shape m150 --rotations 20 --result runs/prefix.json"
_TRANSFER = "baton bench transfer --rotations 20 --result runs/transfer.json"
_EXPOSED = "baton bench exposed --rotations 10 --result runs/exposed.json"
_ROUTER = "baton bench router --rotations 20 --result runs/router.json"

GOALS: tuple[Goal, ...] = (
    Goal("G1", "decode: bytes a step must read / time, over the reading ceiling, batch 1", "engine",
         r"^decode 1 x \d+: read / ceiling(, by CPU time)?$", 80, True, " %", "100 %", _ENGINE, 100),
    Goal("G1", "decode: bytes a step must read / time, over the reading ceiling, batch 4", "engine",
         r"^decode 4 x \d+: read / ceiling(, by CPU time)?$", 80, True, " %", "100 %", _ENGINE, 100),
    Goal("G2", "prefill of 512 tokens: operations / time, over the matrix product's ceiling", "engine",
         r"^prefill 512: arithmetic / ceiling(, by CPU time)?$", 80, True, " %", "100 %", _ENGINE, 100),
    Goal("G2", "prefill of 2048 tokens: operations / time, over the matrix product's ceiling", "engine",
         r"^prefill 2048: arithmetic / ceiling(, by CPU time)?$", 80, True, " %", "100 %", _ENGINE, 100),
    Goal("G2", "prefill in chunks of 64 over chunks of 1024", "engine",
         r"^prefill 1024 in chunks of 64: speed / in one(, by CPU time)?$", 75, True, " %", "100 %", _ENGINE, 100),
    Goal("G3", "p99 gap between tokens beside long prompts, over p99 alone: split", "interference",
         r"^split: p99 gap beside prompts / alone$", 1.15, False, "x", "1x", _INTERFERENCE),
    Goal("G3", "p99 gap between tokens beside long prompts, over p99 alone: mixed chunks in one worker", "interference",
         r"^mixed chunks of \d+: p99 gap beside prompts / alone$", 3, False, "x", "1x", _INTERFERENCE),
    Goal("G4", "goodput of prefill + decode over the better of two colocated replicas, TPOT objective", "goodput",
         r"^split / best colocated: goodput by TPOT$", 1.2, True, "x", "its raw throughput is at most equal", _GOODPUT),
    Goal("G4", "goodput of prefill + decode over the better of two colocated replicas, largest-gap objective",
         "goodput",
         r"^split / best colocated: goodput by largest gap$", 2, True, "x", "its raw throughput is at most equal",
         _GOODPUT),
    Goal("G5", "pages over a transport, over a copy or a socket: NIXL", "transfer",
         r"^nixl: speed / baseline$", 85, True, " %", "100 %", _TRANSFER, 100),
    Goal("G5", "pages over a transport, over a copy or a socket: stream", "transfer",
         r"^stream: speed / baseline$", 80, True, " %", "a copy of the bytes", _TRANSFER, 100),
    Goal("G5", "exposed transfer time over the time to the first token", "exposed",
         r"^\w+, \d+ tokens: exposed / first token$", 1, False, " %", "0 %", _EXPOSED, 100),
    Goal("G6", "shared prefix: speed-up of the first token over the ideal one", "prefix",
         r"^\d+ % cached: speed-up / ideal$", 90, True, " %", "100 %", _PREFIX, 100),
    Goal("G6", "shared prefix: speed-up over the attainable one (the ideal with the attention to the prefix)", "prefix",
         r"^\d+ % cached: speed-up / attainable$", 90, True, " %", "100 %", _PREFIX, 100),
    Goal("G6", "cost of the cache without a hit: bookkeeping over the time to the first token", "prefix",
         r"^no hit: bookkeeping / first token$", 1, False, " %", "0 %", _PREFIX, 100),
    Goal("G7", "router: added latency a request, p50", "router_overhead",
         r"^p50 added by the router$", 150, False, " us", "one loopback hop", _ROUTER),
    Goal("G7", "router: added latency a request, p99", "router_overhead",
         r"^p99 added by the router$", 500, False, " us", "one loopback hop", _ROUTER),
    Goal("G7", "router: CPU a streamed token", "router_overhead",
         r"^router's CPU a streamed token$", 15, False, " us", "one loopback hop", _ROUTER),
    Goal("G8", "host's share of a decode turn's CPU time", "engine",
         r"^loop \d+ x \d+: host / turn$", 2, False, " %", "0 %", _ENGINE, 100),
)  # fmt: skip

UNMEASURED: tuple[Unmeasured, ...] = (
    Unmeasured("G9", "n-gram speculation at batch 1, copy-heavy", ">= 2x", "accepted length", "only as ratios"),
    Unmeasured("G10", "simulator's median error against real runs", "<= 8 %", "noise", "no experiment yet"),
)  # fmt: skip


def findings_for(goal: Goal, findings: Iterable[Finding]) -> list[Finding]:
    """The findings that measure `goal`, in the run's order."""
    return [finding for finding in findings if re.search(goal.pattern, finding.name)]


def _number(value: float) -> str:
    return f"{value:.3g}"
