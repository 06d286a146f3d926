"""Estimates how long a request waits for a slot. Owned by `AdmissionQueue`; pure, time is an argument.

The wait for the n-th departure is n * S / c (Little's law for c slots that are always taken). S is the mean time that
the last `WINDOW` requests kept their slots, so it outlives an idle hour. S is at least half the mean age of the running
requests, so it grows when none leaves.
"""

from __future__ import annotations

from collections import deque

WINDOW = 128

SPREAD_FACTOR = 1.1
"""Retry-After times are this much further apart than departures, so that the queue is shorter when the next comes."""


class WaitEstimator:
    """Observes every request that takes a slot, gives its first token, and leaves."""

    def __init__(self) -> None:
        self._service_times: deque[float] = deque(maxlen=WINDOW)
        self._first_tokens: deque[float] = deque(maxlen=WINDOW)
        self._num_running = 0
        self._started_sum = 0.0  # of the start times of the running ones

    def on_start(self, now: float) -> None:
        """A request took its slot."""
        self._num_running += 1
        self._started_sum += now

    def on_first_token(self, started_at: float, now: float) -> None:
        """A request that took its slot at `started_at` gave its first token."""
        self._first_tokens.append(now - started_at)

    def on_release(self, started_at: float, now: float) -> None:
        """A request that took its slot at `started_at` left it."""
        self._service_times.append(now - started_at)
        self._num_running -= 1
        self._started_sum = self._started_sum - started_at if self._num_running else 0.0

    def service_time_s(self, now: float) -> float:
        """Mean time that a request keeps its slot; before the first has left, the mean age of the running ones."""
        age_s = now - self._started_sum / self._num_running if self._num_running else 0.0
        if not self._service_times:
            return age_s
        return max(sum(self._service_times) / len(self._service_times), age_s / 2)

    def wait_s(self, num_departures: int, num_slots: int, now: float) -> float:
        """Time until so many have left, while all `num_slots` are taken."""
        return num_departures * self.service_time_s(now) / max(1, num_slots)

    def first_token_s(self) -> float:
        """Mean time from a slot to the first token; 0 before the first one."""
        return sum(self._first_tokens) / len(self._first_tokens) if self._first_tokens else 0.0


class RetryAfterSpread:
    """Spreads the Retry-After times of refused requests over the departures to come. Between `min_s` and `max_s`."""

    def __init__(self, min_s: float, max_s: float) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._spread_until = 0.0

    def assign(self, wait_s: float, gap_s: float, now: float) -> float:
        """Seconds to wait: at least `wait_s`, and `gap_s` after the request refused before."""
        at = now + wait_s
        if self._spread_until > now:
            at = max(at, self._spread_until + SPREAD_FACTOR * gap_s)
        self._spread_until = min(at, now + self._max_s)
        return min(self._max_s, max(self._min_s, at - now))
