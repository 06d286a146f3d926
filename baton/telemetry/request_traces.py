"""A router's requests by id: those that run, and bounded rings of those that ended. Makes every `RequestTimer`.

Two rings: `recent` holds all requests, `notable` the failed, replayed, preempted and slowest ones, so that many good
requests cannot push out the evidence. One event loop owns it. A view that fails is logged and fails no request.
"""

from __future__ import annotations

import enum
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

from baton.telemetry.logs import get_logger, log_info, shows
from baton.telemetry.request_timer import RequestOrigin, RequestTimer
from baton.telemetry.request_trace import Outcome, RequestTrace, TraceEvent, decode_trace, log_fields
from baton.telemetry.series import request_series
from baton.telemetry.series.tenant_series import TenantSeries

MAX_RECENT = 2048
MAX_NOTABLE = 512
SLOW_FRACTION = 0.01
_SAMPLE_REQUESTS = 200
"""The slowest 1 % are found among this many latest requests."""

TraceSink = Callable[[RequestTrace, bytes], None]
"""Gets each trace once, with its encoding. Called on the event loop; may not block."""

EventSink = Callable[[RequestTimer, TraceEvent], None]
"""Gets the events of running requests. Called on the event loop; may not block or raise."""

log = get_logger()


class RequestLog(enum.StrEnum):
    """The requests that get a log line at their end."""

    ALL = "all"
    NOTABLE = "notable"
    OFF = "off"


class RequestTraces:
    """Memory is bounded by the rings' sizes and the requests that run."""

    def __init__(
        self, router: str, model: str, request_log: RequestLog = RequestLog.ALL, sinks: tuple[TraceSink, ...] = ()
    ) -> None:
        self._router = router
        self._model = model
        self._request_log = request_log
        self._sinks = list(sinks)
        self._event_sink: EventSink | None = None
        self._tenants = TenantSeries()
        self._running: dict[str, RequestTimer] = {}
        self._recent = _Ring(MAX_RECENT)
        self._notable = _Ring(MAX_NOTABLE)
        self._latencies: deque[int] = deque(maxlen=_SAMPLE_REQUESTS)
        self._slow_us: int | None = None
        self._num_until_sample = _SAMPLE_REQUESTS

    def add_sink(self, sink: TraceSink) -> None:
        """`sink` gets every later trace."""
        self._sinks.append(sink)

    def on_event(self, sink: EventSink) -> None:
        """`sink` gets the events of all later requests as they happen."""
        self._event_sink = sink

    def start(self, origin: RequestOrigin, arrived_s: float) -> RequestTimer:
        """The timer of a new request; `RequestTimer.end` brings its trace here."""
        timer = RequestTimer(origin, arrived_s, self._router, self._model, self._end)
        timer.on_event = self._event_sink
        return timer

    def begin(self, timer: RequestTimer) -> None:
        """`timer` has its id now: `find` shows the running request."""
        if not timer.ended:
            self._running[timer.id] = timer

    def find(self, id: str) -> RequestTrace | None:
        """The trace of a running or recent request; None when this router no longer has it."""
        timer = self._running.get(id)
        if timer is not None:
            return timer.snapshot()
        data = self._recent.get(id) or self._notable.get(id)
        return None if data is None else decode_trace(data)

    def recent(self, *, notable: bool = False) -> Iterator[RequestTrace]:
        """Traces of requests that ended, newest first."""
        return (decode_trace(data) for data in (self._notable if notable else self._recent).newest())

    def _end(self, timer: RequestTimer) -> bool:
        """Records the trace; returns whether it is notable."""
        trace, notable = timer.snapshot(), False
        self._running.pop(trace.id, None)
        try:
            self._tenants.observe(trace)
            request_series.observe(trace)
            notable = self._is_notable(trace)
            self._record(timer, trace, notable)
        except Exception:
            log.exception("request_trace_failed", request_id=trace.id)
        return notable

    def _record(self, timer: RequestTimer, trace: RequestTrace, notable: bool) -> None:
        is_logged = self._request_log is RequestLog.ALL or (notable and self._request_log is RequestLog.NOTABLE)
        if is_logged and shows(logging.INFO):
            log_info("request_end", log_fields(trace))
        if not trace.id:
            return  # refused before it had an id
        data = timer.encoded
        self._recent.add(trace.id, data)
        if notable:
            self._notable.add(trace.id, data)
        for sink in self._sinks:
            sink(trace, data)

    def _is_notable(self, trace: RequestTrace) -> bool:
        slow = self._is_slow(trace.e2e_us)
        return slow or trace.outcome is Outcome.FAILED or trace.num_attempts > trace.n or _was_preempted(trace)

    def _is_slow(self, e2e_us: int) -> bool:
        self._latencies.append(e2e_us)
        self._num_until_sample -= 1
        if not self._num_until_sample:
            self._num_until_sample = _SAMPLE_REQUESTS
            self._slow_us = sorted(self._latencies)[int((1 - SLOW_FRACTION) * len(self._latencies))]
        return self._slow_us is not None and e2e_us >= self._slow_us


def _was_preempted(trace: RequestTrace) -> bool:
    for sequence in trace.sequences:
        for attempt in sequence.attempts:
            if attempt.decode_times is not None and attempt.decode_times.num_preemptions:
                return True
    return False


class _Ring:
    """The newest `capacity` values by id."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._values: OrderedDict[str, bytes] = OrderedDict()

    def add(self, id: str, value: bytes) -> None:
        self._values.pop(id, None)
        self._values[id] = value
        if len(self._values) > self._capacity:
            self._values.popitem(last=False)

    def get(self, id: str) -> bytes | None:
        return self._values.get(id)

    def newest(self) -> list[bytes]:
        return list(reversed(self._values.values()))
