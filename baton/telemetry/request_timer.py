"""Stamps one client request while it runs; the source of its latency metrics and of its `RequestTrace`.

The edge creates a `RequestTimer` for each HTTP request, the validator calls `begin`, the dispatcher stamps a
`SequenceTimer` for each choice, and `end` makes the trace. One event loop owns it. Stamps are seconds on one monotonic
clock; each is converted to whole microseconds since arrival once, so the stages add up exactly.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from baton.domain.errors import BatonError, Broken, Cancelled, Refused
from baton.domain.trace_context import NO_TRACE_CONTEXT, TraceContext
from baton.telemetry import metrics
from baton.telemetry.request_trace import (
    MAX_EVENTS,
    MAX_SEQUENCES,
    MAX_TEXT_CHARS,
    Outcome,
    RequestTrace,
    Stage,
    TraceEvent,
    encode_trace,
)
from baton.telemetry.sequence_timer import SequenceTimer

Clock = Callable[[], float]

MAX_EXEMPLAR_CHARS = 64
"""Of one label; OpenMetrics allows 128 characters for all names and values together."""

_requests_total = cache(metrics.REQUESTS_TOTAL.labels)  # the metric keeps its children, too
_FINISHED = Outcome.FINISHED.value


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """Facts of a request that the edge knows before it reads the body."""

    endpoint: str
    tenant: str = ""
    context: TraceContext = NO_TRACE_CONTEXT


class RequestTimer:
    """`arrived_s` is a time of `clock`. `on_end` gets the ended timer, once; it returns whether it is notable."""

    def __init__(
        self,
        origin: RequestOrigin,
        arrived_s: float,
        router: str = "",
        model: str = "",
        on_end: Callable[[RequestTimer], bool] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.origin = origin
        self.arrived_s = arrived_s
        self.clock = clock
        self.id = ""
        self.cached_tokens = 0
        self.durable = False
        self.private = False
        self.on_event: Callable[[RequestTimer, TraceEvent], None] | None = None
        self.sequences: list[SequenceTimer] = []
        self.stamps: dict[Stage, float] = {}
        self._router = router
        self._model = model
        self._on_end = on_end
        self.arrived_unix_us = round(1e6 * (time.time() - (clock() - arrived_s)))
        self._num_prompt_tokens = 0
        self._stream = False
        self._events: list[TraceEvent] = []
        self._trace: RequestTrace | None = None
        self._encoded: bytes | None = None

    @property
    def context(self) -> TraceContext:
        """The ids that travel with the request."""
        return self.origin.context

    @property
    def ended(self) -> bool:
        """True after `end`."""
        return self._trace is not None

    @property
    def encoded(self) -> bytes:
        """`encode_trace` of the trace, made once. Only after `end`."""
        assert self._trace is not None
        if self._encoded is None:
            self._encoded = encode_trace(self._trace)
        return self._encoded

    def stamp(self, stage: Stage) -> None:
        """READ or PARSE is over."""
        self.stamps.setdefault(stage, self.clock())

    def begin(self, id: str, num_sequences: int, num_prompt_tokens: int, *, stream: bool) -> None:
        """The request is valid: a `SequenceTimer` for each sequence from now on. Ends PARSE."""
        self.id = id
        self._num_prompt_tokens = num_prompt_tokens
        self._stream = stream
        self.stamp(Stage.PARSE)
        self.sequences = [SequenceTimer(self, index) for index in range(num_sequences)]

    def event(self, kind: str, text: str) -> None:
        """Adds to the trace's events; no effect beyond `MAX_EVENTS`. Calls `on_event` at once."""
        if len(self._events) < MAX_EVENTS:
            event = TraceEvent(self.us(self.clock()), kind, text[:MAX_TEXT_CHARS])
            self._events.append(event)
            if self.on_event is not None:
                self.on_event(self, event)

    def us(self, at_s: float) -> int:
        """Whole microseconds from the arrival to `at_s`, never negative."""
        us = round(1e6 * (at_s - self.arrived_s))
        return us if us > 0 else 0

    def end(self, outcome: Outcome, code: str = "", status: int = 200, *, client_gone: bool = False) -> RequestTrace:
        """Makes the trace, passes it on and records metrics. Later calls return the first call's trace.

        `code`: the finish reason or the error's code. It counts for each sequence that did not finish by itself.
        """
        if self._trace is None:
            now_s = self.clock()
            self._trace = self._make_trace(outcome, code, status, client_gone, now_s)
            notable = self._on_end is not None and self._on_end(self)
            self._record_metrics(self._trace, self._exemplar(notable))
            self.sequences = []  # they have this timer: all are freed at once, not by the garbage collector
        return self._trace

    def fail(self, error: BaseException, status: int, *, client_gone: bool = False) -> RequestTrace:
        """`end` with the outcome and code of `error`."""
        outcome, code = outcome_of(error)
        return self.end(outcome, code, status, client_gone=client_gone)

    def snapshot(self) -> RequestTrace:
        """The final trace, or one of the request so far with outcome RUNNING."""
        return self._trace or self._make_trace(Outcome.RUNNING, "", 0, False, self.clock())

    def _make_trace(self, outcome: Outcome, code: str, status: int, client_gone: bool, now_s: float) -> RequestTrace:
        shown, context = self._shown_sequence(), self.origin.context
        output_tokens = 0
        for sequence in self.sequences:
            output_tokens += sequence.num_tokens
        return RequestTrace(
            id=self.id,
            router=self._router,
            model=self._model,
            endpoint=self.origin.endpoint,
            arrived_unix_us=self.arrived_unix_us,
            outcome=outcome,
            e2e_us=self.us(now_s),
            http_request_id=context.http_request_id,
            trace_id=context.trace_id,
            parent_span_id=context.parent_span_id,
            sampled=context.sampled,
            tenant=self.origin.tenant,
            stream=self._stream,
            n=len(self.sequences),
            durable=self.durable,
            private=self.private,
            prompt_tokens=self._num_prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=output_tokens,
            code=code,
            status=status,
            client_gone=client_gone,
            ttft_us=None if shown.first_s is None else self.us(shown.first_s),
            stages=shown.stages(now_s, finished=outcome is Outcome.FINISHED),
            sequences=tuple([sequence.trace(now_s) for sequence in self.sequences[:MAX_SEQUENCES]]),
            events=tuple(self._events),
        )

    def _shown_sequence(self) -> SequenceTimer:
        """The one whose token came first; the first one before any token."""
        shown: SequenceTimer | None = None
        for sequence in self.sequences:
            if shown is None or (
                sequence.first_s is not None and (shown.first_s is None or sequence.first_s < shown.first_s)
            ):
                shown = sequence
        return SequenceTimer(self, 0) if shown is None else shown

    def _exemplar(self, notable: bool) -> dict[str, str] | None:
        """The labels of an OpenMetrics exemplar. Only sampled and notable requests have one: it doubles the cost."""
        if not (notable or self.context.sampled):
            return None
        ids = {"request_id": self.id, "trace_id": self.context.trace_id}
        return {name: id[:MAX_EXEMPLAR_CHARS] for name, id in ids.items() if id}

    def _record_metrics(self, trace: RequestTrace, exemplar: dict[str, str] | None) -> None:
        # A request of one sequence that finished has the sequence's stages, but for the end of the last one.
        known = trace.stages if len(self.sequences) == 1 and trace.outcome is Outcome.FINISHED else ()
        for sequence in self.sequences:
            if sequence.finish_reason:
                _requests_total(_FINISHED, sequence.finish_reason).inc()
                sequence.record_latencies(exemplar, known)
            else:
                _requests_total(trace.outcome._value_, trace.code).inc()
        if not self.sequences:
            _requests_total(trace.outcome._value_, trace.code).inc()


def outcome_of(error: BaseException) -> tuple[Outcome, str]:
    """Outcome and code of a request that ends with `error`."""
    match error:
        case Refused():
            return Outcome.REFUSED, error.code
        case Cancelled():
            return Outcome.CANCELLED, error.code
        case asyncio.CancelledError():
            return Outcome.CANCELLED, Cancelled.code
        case BatonError():
            return Outcome.FAILED, error.code
        case _:
            return Outcome.FAILED, Broken.code
