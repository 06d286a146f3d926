"""What a worker says of the calls it turned away: counted always, logged once in a while. Called by both `app`s."""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.rpc.door import Turned
from baton.telemetry import metrics
from baton.telemetry.logs import get_logger

QUIET_S = 10.0
"""Between two lines of one kind: whoever can reach the port can call as often as they like."""

log = get_logger()


class Reception:
    """Owned by one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    def turned(self, call: Turned) -> None:
        """A call was turned away at the door."""
        kind = call.fault.value
        metrics.CALLS_TURNED_AWAY_TOTAL.labels(kind).inc()
        now = self._clock()
        if now - self._logged_at.get(kind, now - QUIET_S) >= QUIET_S:
            self._logged_at[kind] = now
            log.warning("call_turned_away", kind=kind, peer=call.peer, method=call.method, why=call.why)
