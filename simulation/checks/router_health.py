"""Tracks healthy routers: no fault hit them, the store, or the link between.

Used by `cluster` for the checked store. A fault counts until leases have settled after it.
"""

from __future__ import annotations

from simulation.policies import CONFIG
from simulation.scenario import STORE, FaultPlan, Scenario, SimFaultKind

SETTLE_S = 3 * CONFIG.owner_ttl_s
"""Time after a fault until every lease is renewed and seen by all claimants."""

FOREVER_S = float("inf")


class RouterHealth:
    """Health of the routers of one run. A draining router is not healthy; its next life is another owner."""

    def __init__(self, scenario: Scenario) -> None:
        noise = scenario.noise
        self._never_certain = bool(noise.loss or noise.slow) or noise.mean_delay_s > 0.01
        self._suspect_until_s: dict[str, float] = {}

    def inject(self, fault: FaultPlan, now: float) -> None:
        """Records the begin of a fault."""
        until_s = FOREVER_S if fault.kind is SimFaultKind.DRAIN else now + fault.duration_s + SETTLE_S
        for name in (fault.target, fault.peer):
            if name is not None and (name == STORE or fault.peer in (None, STORE) or fault.target == STORE):
                self._suspect_until_s[name] = max(until_s, self._suspect_until_s.get(name, 0.0))

    def is_healthy(self, name: str, now: float) -> bool:
        """True if this router's lease should have been renewed without a gap."""
        is_suspect = any(now < self._suspect_until_s.get(one, 0.0) for one in (name, STORE))
        return not is_suspect and not self._never_certain
