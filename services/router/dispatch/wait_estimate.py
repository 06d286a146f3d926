"""Estimates how long a new request waits for a slot. Owned by `AdmissionQueue`; pure, time is an argument.

The wait for the n-th departure is n * S / c (Little's law for c slots that are always taken), S being the mean time
that a request keeps its slot. S is that of the last `WINDOW` to leave, so that it outlives an idle hour, but never
less than half the mean age of those who are running: when nobody leaves any more, the forecast grows.
"""

from __future__ import annotations

from collections import deque

WINDOW = 128

SPREAD_FACTOR = 1.1
"""Retry-After times are this much further apart than departures, so that the queue is shorter when the next comes."""


class RecentMean:
    """Mean of the last `WINDOW` values; None before the first."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=WINDOW)

    def add(self, value: float) -> None:
        """One value more."""
        self._values.append(value)

    def get(self) -> float | None:
        """The mean."""
        return sum(self._values) / len(self._values) if self._values else None


class WaitEstimator:
    """Hears of everyone who takes a slot, gives its first token, and leaves."""

    def __init__(self) -> None:
        self._service_times = RecentMean()
        self._first_tokens = RecentMean()
        self._num_running = 0
        self._started_sum = 0.0  # of the clock's readings when those who run now started

    def on_start(self, now: float) -> None:
        """A request took its slot."""
        self._num_running += 1
        self._started_sum += now

    def on_first_token(self, started_at: float, now: float) -> None:
        """A request that took its slot at `started_at` gave its first token."""
        self._first_tokens.add(now - started_at)

    def on_release(self, started_at: float, now: float) -> None:
        """A request that took its slot at `started_at` left it."""
        self._service_times.add(now - started_at)
        self._num_running -= 1
        self._started_sum = self._started_sum - started_at if self._num_running else 0.0

    def service_time_s(self, now: float) -> float:
        """How long a request keeps its slot, on average; before any has left, how long the present ones have."""
        age_s = now - self._started_sum / self._num_running if self._num_running else 0.0
        recent_s = self._service_times.get()
        return age_s if recent_s is None else max(recent_s, age_s / 2)

    def wait_s(self, num_departures: int, num_slots: int, now: float) -> float:
        """How long it takes until so many have left, all `num_slots` being taken all the time."""
        return num_departures * self.service_time_s(now) / max(1, num_slots)

    def first_token_s(self) -> float:
        """From taking a slot to the first token; 0 before any was seen."""
        return self._first_tokens.get() or 0.0


class RetryAfterSpread:
    """When the refused are told to come back: one after the other, as slots become free, not all at once.

    Nobody is told less than `min_s` or more than `max_s`; beyond that the house is booked out.
    """

    def __init__(self, min_s: float, max_s: float) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._spread_until = 0.0

    def assign(self, wait_s: float, gap_s: float, now: float) -> float:
        """Seconds to come back after, at least `wait_s`; `gap_s` after the one before."""
        at = max(now + wait_s, self._spread_until + SPREAD_FACTOR * gap_s) if self._spread_until > now else now + wait_s
        self._spread_until = min(at, now + self._max_s)
        return min(self._max_s, max(self._min_s, at - now))
