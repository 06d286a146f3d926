"""Links that attempts were lost on: who rests, for how long, who tries again. Owned by `workers`; pure, time is given.

A link is the way between one prefill and one decode process. That it is broken shows only when an attempt on it is
lost, so a resting link is tried again with a single attempt, after rests that double.

    trusted --(an attempt is lost)--> resting --(its rest is over)--> on probe, by one attempt at a time
       ^                                 ^---(the probe is lost too: a longer rest)---'  |
       `---(the probe's pages landed, or decode made the link anew)----------------------'
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class LinkFailure:
    """What became of a link that an attempt was lost on: it rests for `open_s`.

    `in_grace`: somebody had to try, so the loss is not to be counted against the request.
    """

    open_s: float
    in_grace: bool


class LinkBreakers:
    """All links that are not trusted."""

    def __init__(self, limits: LinkBreakerLimits) -> None:
        self._limits = limits
        self._breakers: dict[LinkId, _Breaker] = {}
        self._probes: dict[AttemptId, LinkId] = {}

    def __len__(self) -> int:
        return len(self._breakers)

    def allows(self, link: LinkId, now: float) -> bool:
        """Whether an attempt may be placed on the link: it is trusted, or may be tried and nobody is at it."""
        breaker = self._breakers.get(link)
        return breaker is None or (breaker.probe is None and now >= breaker.open_until)

    def on_placed(self, id: AttemptId, link: LinkId) -> None:
        """The attempt was placed on the link; if that is not trusted, this is its probe."""
        breaker = self._breakers.get(link)
        if breaker is not None and breaker.probe is None:
            breaker.probe = id
            self._probes[id] = link

    def on_ended(self, id: AttemptId) -> None:
        """The attempt is over. A probe that was neither lost nor landed leaves room for another; idempotent."""
        breaker = self._breakers.get(self._probes.pop(id)) if id in self._probes else None
        if breaker is not None and breaker.probe == id:
            breaker.probe = None

    def on_failure(self, id: AttemptId, link: LinkId, now: float) -> LinkFailure | None:
        """The attempt was lost on the link; None when that is no news.

        Many attempts are lost when a link breaks, but it broke once: after the first only a probe counts.
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
        """Pages of the attempt have landed; True if that ends a probe, and the link is trusted again.

        What landed of earlier attempts says nothing: it may have travelled before the link broke.
        """
        link = self._probes.pop(id, None)
        return link is not None and self._breakers.pop(link, None) is not None

    def retain(self, linked: Collection[LinkId]) -> None:
        """Forgets links that are not announced. One that is announced again was probed with pages, and is trusted."""
        for link in [link for link in self._breakers if link not in linked]:
            probe = self._breakers.pop(link).probe
            if probe is not None:
                del self._probes[probe]
