"""Bounds how often a process that ends by itself is started again. Pure: the time is an argument."""

from __future__ import annotations

MAX_RESTARTS = 5
WINDOW_S = 60.0
FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 10.0


class RestartBudget:
    """Counts the ends of the last minute. Used for the services of `baton up` together, and for its Redis apart."""

    def __init__(self) -> None:
        self._ends_s: list[float] = []

    def allows(self, now: float) -> bool:
        """Counts an end. False if there were more than `MAX_RESTARTS` within `WINDOW_S`."""
        self._ends_s = [at for at in self._ends_s if now - at < WINDOW_S] + [now]
        return len(self._ends_s) <= MAX_RESTARTS

    @property
    def pause_s(self) -> float:
        """Seconds to wait before a restart that need not come at once: none after the first end, then twice as long.

        At most `MAX_PAUSE_S`.
        """
        num_ends = len(self._ends_s)
        return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (num_ends - 2)) if num_ends > 1 else 0.0
