"""Liveness of processes, derived from a registry that may be unavailable or may have lost its data.

The router tracks all workers, decode its prefill workers. Pure: time is an argument. A missing announcement means a
lost process only while the registry is reliable. After an outage, or when the registry is suddenly empty, every
process seen before gets `grace_s` to announce itself again.
"""

from __future__ import annotations

from collections.abc import Collection

from baton.domain.ids import Incarnation


class Liveness:
    """Processes seen so far and not forgotten. `grace_s`: longest absence before a process is gone."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._announced: frozenset[Incarnation] = frozenset()
        self._seen_at: dict[Incarnation, float] = {}
        self._grace_until = 0.0

    def observe(self, announced: Collection[Incarnation], now: float) -> None:
        """Records one reading of the registry: `announced` is all that it holds."""
        if self._announced and not announced:
            self._start_grace(now)
        self._announced = frozenset(announced)
        lately = {one: seen_at for one, seen_at in self._seen_at.items() if now - seen_at < self._grace_s}
        self._seen_at = lately | dict.fromkeys(announced, now)

    def observe_outage(self, now: float) -> None:
        """Records that the registry could not be read."""
        self._start_grace(now)

    def is_present(self, incarnation: Incarnation, now: float) -> bool:
        """True if the process is announced, or was and is within a grace period."""
        return incarnation in self._announced or (now < self._grace_until and incarnation in self._seen_at)

    def is_gone(self, incarnation: Incarnation, now: float) -> bool:
        """True if the process was never seen, or has been absent for `grace_s`."""
        if incarnation in self._announced:
            return False
        seen_at = self._seen_at.get(incarnation)
        return seen_at is None or now - seen_at >= self._grace_s

    def forget(self, incarnation: Incarnation) -> None:
        """Removes a process that is gone or replaced; idempotent."""
        self._seen_at.pop(incarnation, None)
        self._announced -= {incarnation}

    def _start_grace(self, now: float) -> None:
        self._grace_until = now + self._grace_s
        self._seen_at = dict.fromkeys(self._seen_at, now)
