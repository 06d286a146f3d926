"""Circuit breakers of the links between prefill and decode processes. Owned by `workers`; pure, time is an argument.

A broken link shows only when an attempt on it fails. An open breaker keeps attempts away, twice as long each time.
After that one attempt probes the link.

    closed --(an attempt fails)--> open --(open_s is over)--> half-open: one attempt at a time probes
       ^                            ^---(the probe fails)----'  |
       `---(the probe's pages are imported, or decode links anew)'
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass

from baton.domain.ids import AttemptId, Incarnation

LinkId = tuple[Incarnation, Incarnation]
"""A (prefill, decode) pair of processes."""


@dataclass(frozen=True, slots=True)
class LinkBreakerLimits:
    """Open for `first_open_s`, then twice as long each time, up to `max_open_s`.

    Failed probes do not count as attempts for `grace_s` after the first failure.
    """

    first_open_s: float = 0.5
    max_open_s: float = 8.0
    grace_s: float = 30.0


@dataclass(slots=True)
class _Breaker:
    first_failed_at: float
    open_s: float
    open_until: float
    probe: AttemptId | None = None


class BreakerState(enum.Enum):
    """State of a breaker that is not closed. OPEN: no attempt; HALF_OPEN: one attempt at a time probes the link."""

    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class LinkFailure:
    """A breaker opened for `open_s`.

    `in_grace`: the attempt was a probe within `grace_s`, and does not count against its request.
    """

    open_s: float
    in_grace: bool


class LinkBreakers:
    """The breakers that are not closed."""

    def __init__(self, limits: LinkBreakerLimits) -> None:
        self._limits = limits
        self._breakers: dict[LinkId, _Breaker] = {}
        self._probes: dict[AttemptId, LinkId] = {}

    def __len__(self) -> int:
        return len(self._breakers)

    def states(self, now: float) -> dict[LinkId, BreakerState]:
        """The breakers that are not closed, and their states."""
        return {
            link: BreakerState.OPEN if now < breaker.open_until else BreakerState.HALF_OPEN
            for link, breaker in self._breakers.items()
        }

    def allows(self, link: LinkId, now: float) -> bool:
        """True for a closed breaker, and for a half-open one without a probe."""
        breaker = self._breakers.get(link)
        return breaker is None or (breaker.probe is None and now >= breaker.open_until)

    def on_placed(self, id: AttemptId, link: LinkId) -> None:
        """Records the placement of an attempt. On a half-open link the attempt is the probe."""
        breaker = self._breakers.get(link)
        if breaker is not None and breaker.probe is None:
            breaker.probe = id
            self._probes[id] = link

    def on_ended(self, id: AttemptId) -> None:
        """Records the end of an attempt. A probe without a result makes room for another. Idempotent."""
        breaker = self._breakers.get(self._probes.pop(id)) if id in self._probes else None
        if breaker is not None and breaker.probe == id:
            breaker.probe = None

    def on_failure(self, id: AttemptId, link: LinkId, now: float) -> LinkFailure | None:
        """Records an attempt that failed on the link; None when the breaker does not change.

        A link that breaks fails many attempts. After the first one, only a failed probe counts.
        """
        breaker = self._breakers.get(link)
        if breaker is None:
            open_s = self._limits.first_open_s
            self._breakers[link] = _Breaker(now, open_s, now + open_s)
            return LinkFailure(open_s, in_grace=False)
        if breaker.probe != id:
            return None
        breaker.open_s = min(2 * breaker.open_s, self._limits.max_open_s)
        breaker.open_until = now + breaker.open_s
        self.on_ended(id)
        return LinkFailure(breaker.open_s, in_grace=now - breaker.first_failed_at < self._limits.grace_s)

    def on_imported(self, id: AttemptId) -> bool:
        """Records imported pages of an attempt; True if it was a probe, which closes the breaker.

        Pages of earlier attempts prove nothing: they may have moved before the link broke.
        """
        link = self._probes.pop(id, None)
        return link is not None and self._breakers.pop(link, None) is not None

    def retain(self, linked: Collection[LinkId]) -> None:
        """Forgets links that are not announced. Decode probes a link with pages before it announces the link again."""
        for link in [link for link in self._breakers if link not in linked]:
            probe = self._breakers.pop(link).probe
            if probe is not None:
                del self._probes[probe]
