"""Links that attempts were lost on: who rests, for how long, who tries again. Owned by `fleet`; pure, time is given.

A link is the way between one prefill and one decode process. That it is broken shows only when an attempt on it is
lost, so a resting link is tried again with a single attempt, after rests that double.

    trusted --(an attempt is lost)--> resting --(its rest is over)--> on trial, by one attempt at a time
       ^                                 ^---(the trial is lost too: a longer rest)---'  |
       `---(the trial's pages landed, or decode made the link anew)----------------------'
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from baton.domain.ids import AttemptId, Incarnation

LinkId = tuple[Incarnation, Incarnation]
"""A (prefill, decode) pair of processes."""


@dataclass(frozen=True, slots=True)
class RestLimits:
    """`first_s`, then doubling up to `longest_s`. For `excused_s` from the first loss on, a lost trial is excused."""

    first_s: float = 0.5
    longest_s: float = 8.0
    excused_s: float = 30.0


@dataclass(slots=True)
class _Trouble:
    since: float
    rest_s: float
    rests_until: float
    trial: AttemptId | None = None


@dataclass(frozen=True, slots=True)
class LinkLoss:
    """What became of a link that an attempt was lost on: it rests for `rest_s`.

    `excused`: somebody had to try, so the loss is not to be counted against the request.
    """

    rest_s: float
    excused: bool


class Quarantine:
    """All links that are not trusted."""

    def __init__(self, limits: RestLimits) -> None:
        self._limits = limits
        self._troubles: dict[LinkId, _Trouble] = {}
        self._trials: dict[AttemptId, LinkId] = {}

    def __len__(self) -> int:
        return len(self._troubles)

    def admits(self, link: LinkId, now: float) -> bool:
        """Whether an attempt may be placed on the link: it is trusted, or may be tried and nobody is at it."""
        trouble = self._troubles.get(link)
        return trouble is None or (trouble.trial is None and now >= trouble.rests_until)

    def place(self, id: AttemptId, link: LinkId) -> None:
        """The attempt was placed on the link; if that is not trusted, this is its trial."""
        trouble = self._troubles.get(link)
        if trouble is not None and trouble.trial is None:
            trouble.trial = id
            self._trials[id] = link

    def settle(self, id: AttemptId) -> None:
        """The attempt is over. A trial that was neither lost nor landed leaves room for another; idempotent."""
        trouble = self._troubles.get(self._trials.pop(id)) if id in self._trials else None
        if trouble is not None and trouble.trial == id:
            trouble.trial = None

    def lose(self, id: AttemptId, link: LinkId, now: float) -> LinkLoss | None:
        """The attempt was lost on the link; None when that is no news.

        Many attempts are lost when a link breaks, but it broke once: after the first only a trial counts.
        """
        trouble = self._troubles.get(link)
        if trouble is None:
            rest_s = self._limits.first_s
            self._troubles[link] = _Trouble(now, rest_s, now + rest_s)
            return LinkLoss(rest_s, excused=False)
        if trouble.trial != id:
            return None
        trouble.rest_s = min(2 * trouble.rest_s, self._limits.longest_s)
        trouble.rests_until = now + trouble.rest_s
        self.settle(id)
        return LinkLoss(trouble.rest_s, excused=now - trouble.since < self._limits.excused_s)

    def land(self, id: AttemptId) -> bool:
        """Pages of the attempt have landed; True if that ends a trial, and the link is trusted again.

        What landed of earlier attempts says nothing: it may have travelled before the link broke.
        """
        link = self._trials.pop(id, None)
        return link is not None and self._troubles.pop(link, None) is not None

    def retain(self, linked: Collection[LinkId]) -> None:
        """Forgets links that are not announced. One that is announced again was probed with pages, and is trusted."""
        for link in [link for link in self._troubles if link not in linked]:
            trial = self._troubles.pop(link).trial
            if trial is not None:
                del self._trials[trial]
