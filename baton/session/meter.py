"""Counts what happens to one session of this process. Owned by its pump."""

from __future__ import annotations

from baton.session.lifecycle import SessionState
from baton.session.session import MessageSession
from baton.telemetry.series.session_series import (
    SESSION_EVENTS_TOTAL,
    SESSION_RTT_SECONDS,
    SESSION_UNACKED_BYTES,
    SESSION_WAITING_BYTES,
    SESSIONS,
)

_ENDS = {SessionState.LOST: "lost", SessionState.CLOSED: "closed"}


class SessionMeter:
    """Takes the session's own totals into the process's metrics: when its timer goes off, and at the end."""

    def __init__(self, session: MessageSession) -> None:
        self._session = session
        self._counted = self._totals()
        self._is_open = False
        self._num_round_trips = 0
        self._unacknowledged_bytes = self._waiting_bytes = 0

    def open(self) -> None:
        """The session has begun."""
        self._is_open = True
        SESSIONS.inc()
        SESSION_EVENTS_TOTAL.labels("opened").inc()

    def observe(self) -> None:
        """Adds what was not counted yet."""
        session = self._session
        if session.num_round_trips != self._num_round_trips:
            self._num_round_trips = session.num_round_trips
            SESSION_RTT_SECONDS.observe(session.rtt_s)
        if self._is_open:
            self._observe_window(session.outbox.retained_bytes, session.outbox.waiting_bytes)
        now = self._totals()
        for event, total in now.items():
            SESSION_EVENTS_TOTAL.labels(event).inc(total - self._counted[event])
        self._counted = now

    def end(self) -> None:
        """The session has ended, or its process ends. Idempotent."""
        self.observe()
        if self._is_open:
            self._is_open = False
            SESSIONS.dec()
            self._observe_window(0, 0)
            SESSION_EVENTS_TOTAL.labels(_ENDS[self._session.state]).inc()

    def _observe_window(self, unacknowledged_bytes: int, waiting_bytes: int) -> None:
        """The gauges are sums over the sessions of the process."""
        SESSION_UNACKED_BYTES.inc(unacknowledged_bytes - self._unacknowledged_bytes)
        SESSION_WAITING_BYTES.inc(waiting_bytes - self._waiting_bytes)
        self._unacknowledged_bytes, self._waiting_bytes = unacknowledged_bytes, waiting_bytes

    def _totals(self) -> dict[str, int]:
        session = self._session
        return {
            "broken": session.num_breaks,
            "bad_frame": session.num_bad_frames,
            "replayed_frame": session.outbox.num_replayed,
            "duplicate_frame": session.num_duplicates,
        }
