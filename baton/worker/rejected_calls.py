"""Counts every rejected call and logs some of them. Used by both workers' `app`."""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.rpc.auth_interceptor import Malformed, RejectedCall
from baton.rpc.call_token import CallTokenFault
from baton.telemetry import metrics
from baton.telemetry.logs import get_logger

LOG_INTERVAL_S = 10.0
"""Shortest time between two lines of one kind: any process that reaches the port can cause them."""

log = get_logger()


class RejectedCallLog:
    """May be used from any thread: at worst one more line is logged."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        for fault in (*CallTokenFault, *Malformed):  # counters start at 0
            metrics.REJECTED_CALLS_TOTAL.labels(fault.value)

    def record(self, call: RejectedCall) -> None:
        """Counts a rejected call; logs it unless one of its kind was logged within `LOG_INTERVAL_S`."""
        kind = call.fault.value
        metrics.REJECTED_CALLS_TOTAL.labels(kind).inc()
        if call.fault is CallTokenFault.OTHER_INCARNATION:
            metrics.STALE_MESSAGES_TOTAL.labels("incarnation").inc()
        now = self._clock()
        if now - self._logged_at.get(kind, now - LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._logged_at[kind] = now
            log.warning("call_rejected", kind=kind, peer=call.peer, method=call.method, why=call.why)
