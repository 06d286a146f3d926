"""Paces journal flushes: an interval after what is due first, sooner for a sequence with many tokens, and for a small
part of the time, unless more writes of records wait than a flush takes.

Pure: time is an argument, in seconds of any one clock. Owned by `Flusher`.
"""

from __future__ import annotations

REST_RATIO = 10.0
"""The next flush waits this many times as long as the last one took, so flushing takes one part in `REST_RATIO` + 1."""

MAX_REST_S = 1.0
"""Longest rest: bounds how far a slow store lags behind."""


class FlushPacer:
    """`interval_s` lies between flushes; 0 flushes at once, except for the rest after a flush."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next_at = 0.0
        self._rest_until = 0.0

    def wait_s(self, now: float, *, urgent: bool) -> float:
        """Seconds until the next flush may begin; `urgent` skips the interval, but not the rest."""
        return max(0.0, (self._rest_until if urgent else self._next_at) - now)

    def begin(self, now: float) -> None:
        """Something is due, and nothing was before: it waits an interval for what follows."""
        self._next_at = max(self._next_at, now + self._interval_s)

    def record(self, began: float, ended: float, *, more: bool = False) -> None:
        """A flush lasted from `began` to `ended`. `more`: it left writes of records, which follow at once.

        Journals that did not fit are no reason: streams that go on would have new ones each time, of a token each.
        """
        if more:
            self._next_at = self._rest_until = ended
            return
        self._rest_until = ended + min(MAX_REST_S, REST_RATIO * (ended - began))
        self._next_at = max(self._rest_until, began + self._interval_s)
