"""Liveness of processes, derived from a registry that may be unavailable or may have lost its data.

The router tracks all workers, decode its prefill workers. Pure: time is an argument. A missing announcement means a
lost process only while the registry is reliable. After an outage, when the registry is suddenly empty, and when its
reader was away itself, every process seen before gets `grace_s` to announce itself again. So does a single one whose
announcement is gone before it could have expired: the registry has lost it, or an older one is back in its place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from baton.domain.ids import Incarnation

EARLY_SHARE = 0.75
"""Part of the grace after which a reader that read nothing was away. Where the grace is the time to live of an
announcement, none expires by itself within that part."""


class Liveness:
    """Processes seen so far and not forgotten. `grace_s`: longest absence before a process is gone."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._early_s = EARLY_SHARE * grace_s
        self._announced: frozenset[Incarnation] = frozenset()
        self._seen_at: dict[Incarnation, float] = {}
        self._grace_until = 0.0
        self._read_at: float | None = None
        self._was_away = False
        self._numbers: dict[Incarnation, tuple[int, float]] = {}  # of the newest announcements, and when they came
        self._excused_until: dict[Incarnation, float] = {}

    def observe(
        self, announced: Collection[Incarnation], now: float, numbers: Mapping[Incarnation, int] | None = None
    ) -> None:
        """Records one reading of the registry: `announced` is all that it holds.

        `numbers`: of their announcements, which grow with each, where `grace_s` is the time to live of these. None:
        nobody is missed too early.
        """
        away_before = self._was_away
        self._was_away = self._read_at is not None and now - self._read_at >= self._early_s
        self._read_at = now
        if self._announced and (not announced or (self._was_away and not away_before)):
            self._start_grace(now)
        if numbers is not None:
            self._excuse(self._announced - frozenset(announced), now)
            self._note_numbers(numbers, now)
        self._announced = frozenset(announced)
        lately = {one: seen_at for one, seen_at in self._seen_at.items() if now - seen_at < self._grace_s}
        self._seen_at = lately | dict.fromkeys(announced, now)

    def observe_outage(self, now: float) -> None:
        """Records that the registry could not be read."""
        self._read_at = now
        self._start_grace(now)

    def is_present(self, incarnation: Incarnation, now: float) -> bool:
        """True if the process is announced, or was and is within a grace period."""
        if incarnation in self._announced:
            return True
        return incarnation in self._seen_at and now < max(self._grace_until, self._excused_until.get(incarnation, 0.0))

    def is_announced(self, incarnation: Incarnation) -> bool:
        """True if the last reading had the process: then it is present until the next one, whatever the time."""
        return incarnation in self._announced

    def is_gone(self, incarnation: Incarnation, now: float) -> bool:
        """True if the process was never seen, or has been absent for `grace_s`."""
        if incarnation in self._announced:
            return False
        seen_at = self._seen_at.get(incarnation)
        return seen_at is None or now - seen_at >= self._grace_s

    def forget(self, incarnation: Incarnation) -> None:
        """Removes a process that is gone or replaced; idempotent."""
        for table in (self._seen_at, self._numbers, self._excused_until):
            table.pop(incarnation, None)
        self._announced -= {incarnation}

    def _start_grace(self, now: float) -> None:
        self._grace_until = now + self._grace_s
        self._seen_at = dict.fromkeys(self._seen_at, now)

    def _excuse(self, missing: frozenset[Incarnation], now: float) -> None:
        """Starts a grace period for each process whose newest announcement cannot have expired."""
        for incarnation in missing & self._numbers.keys():
            _, renewed_at = self._numbers[incarnation]
            if now - renewed_at < self._early_s:
                self._excused_until[incarnation] = now + self._grace_s
                self._seen_at[incarnation] = now

    def _note_numbers(self, numbers: Mapping[Incarnation, int], now: float) -> None:
        for incarnation, number in numbers.items():
            known = self._numbers.get(incarnation)
            if known is None or known[0] != number:
                self._numbers[incarnation] = number, now
        self._excused_until = {one: until for one, until in self._excused_until.items() if one not in numbers}
