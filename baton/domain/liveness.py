"""Who is there, from looks at a registry that may be away, or may have lost all that it knew.

The router keeps one of all workers, decode one of its prefill workers. Pure: time is an argument. An announcement that
ends says that its process is gone only while the registry itself can be believed: after it was away, or was suddenly
empty, everybody who was there before has `grace_s` to announce themselves again.
"""

from __future__ import annotations

from collections.abc import Collection

from baton.domain.ids import Incarnation


class Liveness:
    """Processes seen so far and not forgotten. `grace_s`: how long one may be absent before it is gone."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._announced: frozenset[Incarnation] = frozenset()
        self._seen_at: dict[Incarnation, float] = {}
        self._grace_until = 0.0

    def observe(self, announced: Collection[Incarnation], now: float) -> None:
        """The registry was read: these are announced, all of them."""
        if self._announced and not announced:
            self._start_grace(now)
        self._announced = frozenset(announced)
        lately = {one: seen_at for one, seen_at in self._seen_at.items() if now - seen_at < self._grace_s}
        self._seen_at = lately | dict.fromkeys(announced, now)

    def observe_outage(self, now: float) -> None:
        """The registry could not be read; its silence says nothing of anybody."""
        self._start_grace(now)

    def is_present(self, incarnation: Incarnation, now: float) -> bool:
        """Whether it is announced, or was and has an excuse for its absence."""
        return incarnation in self._announced or (now < self._grace_until and incarnation in self._seen_at)

    def is_gone(self, incarnation: Incarnation, now: float) -> bool:
        """Whether it was never seen, or has been absent for too long."""
        if incarnation in self._announced:
            return False
        seen_at = self._seen_at.get(incarnation)
        return seen_at is None or now - seen_at >= self._grace_s

    def forget(self, incarnation: Incarnation) -> None:
        """It is gone, or another has its place; idempotent."""
        self._seen_at.pop(incarnation, None)
        self._announced -= {incarnation}

    def _start_grace(self, now: float) -> None:
        self._grace_until = now + self._grace_s
        self._seen_at = dict.fromkeys(self._seen_at, now)
