"""When journals are written: every so often, sooner for a sequence with much to write, and never for most of the time.

Pure: time is an argument, in seconds of any one clock. Owned by `StoreWriter`.
"""

from __future__ import annotations

REST_RATIO = 10.0
"""The next flush waits this many times as long as the last one took, so flushing takes one part in `REST_RATIO` + 1."""

MAX_REST_S = 1.0
"""However slow the store is, what it holds is no older than this and one round."""


class FlushPacer:
    """`interval_s` between rounds; 0 writes at once, but for the rest."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next_at = 0.0
        self._rest_until = 0.0

    def wait_s(self, now: float, *, urgent: bool) -> float:
        """How long until the next round may begin; if urgent, only the rest is kept."""
        return max(0.0, (self._rest_until if urgent else self._next_at) - now)

    def record(self, began: float, ended: float) -> None:
        """A round is over."""
        self._rest_until = ended + min(MAX_REST_S, REST_RATIO * (ended - began))
        self._next_at = max(self._rest_until, began + self._interval_s)
