"""Who is there, from looks at a registry that may be away, or may have lost all that it knew.

The router keeps one of all workers, decode one of its prefill workers. Pure: time is an argument. An announcement that
ends says that its process is gone only while the registry itself can be believed: after it was away, or was suddenly
empty, everybody who was there before has `patience_s` to announce themselves again.
"""

from __future__ import annotations

from collections.abc import Collection

from baton.domain.ids import Incarnation


class Roll:
    """Processes seen so far and not forgotten. `patience_s`: how long one may be absent before it is gone."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._announced: frozenset[Incarnation] = frozenset()
        self._seen_at: dict[Incarnation, float] = {}
        self._excused_until = 0.0

    def look(self, announced: Collection[Incarnation], now: float) -> None:
        """The registry was read: these are announced, all of them."""
        if self._announced and not announced:
            self._excuse(now)
        self._announced = frozenset(announced)
        lately = {one: seen_at for one, seen_at in self._seen_at.items() if now - seen_at < self._patience_s}
        self._seen_at = lately | dict.fromkeys(announced, now)

    def no_look(self, now: float) -> None:
        """The registry could not be read; its silence says nothing of anybody."""
        self._excuse(now)

    def has(self, incarnation: Incarnation, now: float) -> bool:
        """Whether it is announced, or was and has an excuse for its absence."""
        return incarnation in self._announced or (now < self._excused_until and incarnation in self._seen_at)

    def is_gone(self, incarnation: Incarnation, now: float) -> bool:
        """Whether it was never seen, or has been absent for too long."""
        if incarnation in self._announced:
            return False
        seen_at = self._seen_at.get(incarnation)
        return seen_at is None or now - seen_at >= self._patience_s

    def forget(self, incarnation: Incarnation) -> None:
        """It is gone, or another has its place; idempotent."""
        self._seen_at.pop(incarnation, None)
        self._announced -= {incarnation}

    def _excuse(self, now: float) -> None:
        self._excused_until = now + self._patience_s
        self._seen_at = dict.fromkeys(self._seen_at, now)
