"""Which routers have had no reason to be taken for dead: nothing was done to them, to the book, or to the way between.

Used by `cluster` for the oracle on the book. A fault's effects outlast it by the time that leases take to settle.
"""

from __future__ import annotations

from simulation.parts import SIZES
from simulation.scenario import BOOK, FaultKind, FaultPlan, Scenario

AFTERMATH_S = 3 * SIZES.owner_ttl_s
"""By now every lease is renewed again, and whoever looked for orphans has seen it."""

FOREVER_S = float("inf")


class Health:
    """Of one run. A router that was told to leave is not well any more; its next life is another owner."""

    def __init__(self, scenario: Scenario) -> None:
        noise = scenario.noise
        self._always_in_doubt = bool(noise.loss or noise.slow) or noise.mean_delay_s > 0.01
        self._in_doubt_until_s: dict[str, float] = {}

    def strike(self, fault: FaultPlan, now: float) -> None:
        """A fault begins."""
        until_s = FOREVER_S if fault.kind is FaultKind.DRAIN else now + fault.duration_s + AFTERMATH_S
        for name in (fault.target, fault.peer):
            if name is not None and (name == BOOK or fault.peer in (None, BOOK) or fault.target == BOOK):
                self._in_doubt_until_s[name] = max(until_s, self._in_doubt_until_s.get(name, 0.0))

    def is_well(self, name: str, now: float) -> bool:
        """Whether this router's lease should have been renewed all the time."""
        in_doubt = any(now < self._in_doubt_until_s.get(one, 0.0) for one in (name, BOOK))
        return not in_doubt and not self._always_in_doubt
