"""When journals are written: every so often, sooner for a job with much to write, and never for most of the time.

Pure: time is an argument, in seconds of any one clock. Owned by `BookWriter`.
"""

from __future__ import annotations

REST = 10.0
"""A round takes at most one part in `REST` + 1 of the time: so much longer than it took does the next one wait."""

MAX_REST_S = 1.0
"""However slow the book is, what it holds is no older than this and one round."""


class Pace:
    """`interval_s` between rounds; 0 writes at once, but for the rest."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next_at = 0.0
        self._rested_at = 0.0

    def wait_s(self, now: float, *, hurry: bool) -> float:
        """How long until the next round may begin; in a hurry, only the rest is kept."""
        return max(0.0, (self._rested_at if hurry else self._next_at) - now)

    def took(self, began: float, ended: float) -> None:
        """A round is over."""
        self._rested_at = ended + min(MAX_REST_S, REST * (ended - began))
        self._next_at = max(self._rested_at, began + self._interval_s)
