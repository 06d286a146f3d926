"""Counts what happens to one session of this process. Owned by its pump."""

from __future__ import annotations

from baton.session.lifecycle import SessionState
from baton.session.session import MessageSession
from baton.telemetry.metrics import SESSION_EVENTS_TOTAL, SESSIONS


class SessionMeter:
    """Takes the session's own totals into the process's metrics."""

    def __init__(self, session: MessageSession) -> None:
        self._session = session
        self._counted = self._totals()
        self._is_open = False

    def open(self) -> None:
        """The session has begun."""
        self._is_open = True
        SESSIONS.inc()
        SESSION_EVENTS_TOTAL.labels("opened").inc()

    def observe(self) -> None:
        """Adds what was not counted yet."""
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
            if self._session.state is SessionState.LOST:
                SESSION_EVENTS_TOTAL.labels("lost").inc()

    def _totals(self) -> dict[str, int]:
        session = self._session
        return {
            "broken": session.num_breaks,
            "bad_frame": session.num_bad_frames,
            "replayed_frame": session.outbox.num_replayed,
        }
