"""OpenTelemetry spans of a request, built from its `RequestTrace` after its end. Needs the extra `otel`.

    request > edge, admit, attempt n > reserve, prefill (chunks as events), transfer, decode

A span belongs to the process whose time it is (its resource), but the router alone exports: workers' durations are
placed between the router's stamps, so all spans are on one clock. Export runs on a thread of the SDK.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

import baton
from baton.domain.trace_context import new_span_id, new_trace_id
from baton.telemetry.request_trace import AttemptTrace, Outcome, RequestTrace, Stage

BATCH_SPANS = 512
QUEUE_SPANS = 4096
DELAY_MS = 5000.0
TRACES_PATH = "/v1/traces"

Attributes = Mapping[str, str | bool | int]


class SpanSink:
    """A sink of `RequestTraces`. Drops spans when the collector is slow: the queue is bounded, nothing waits."""

    def __init__(
        self, exporter: SpanExporter, sample_ratio: float = 1.0, chance: Callable[[], float] = random.random
    ) -> None:
        """`sample_ratio`: the share of requests without a `traceparent` that is exported; others follow their flag."""
        self._processor = BatchSpanProcessor(
            exporter,
            max_queue_size=QUEUE_SPANS,
            schedule_delay_millis=DELAY_MS,
            max_export_batch_size=BATCH_SPANS,
        )
        self._sample_ratio = sample_ratio
        self._chance = chance

    def __call__(self, trace: RequestTrace, data: bytes) -> None:
        """Queues the request's spans if it is sampled."""
        if trace.sampled if trace.parent_span_id else self._chance() < self._sample_ratio:
            for span in spans_of(trace):
                self._processor.on_end(span)

    def close(self) -> None:
        """Exports what is queued and stops; blocks for seconds at most."""
        self._processor.shutdown()


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Exports over HTTP to `endpoint`, the URL of a collector without a path."""
    return OTLPSpanExporter(endpoint=endpoint.rstrip("/") + TRACES_PATH)


def spans_of(trace: RequestTrace) -> list[ReadableSpan]:
    """The spans of one request: the root first."""
    return _Spans(trace).spans


@dataclass(slots=True)
class _Spans:
    """The spans of one trace while they are built. Times are microseconds since the arrival."""

    trace: RequestTrace
    spans: list[ReadableSpan] = field(default_factory=list)
    trace_id: int = 0

    def __post_init__(self) -> None:
        trace = self.trace
        self.trace_id = int(trace.trace_id or new_trace_id(), 16)
        root = self._root()
        ends = {part.stage: part.start_us + part.duration_us for part in trace.stages}
        edge_us = max(ends.get(Stage.READ, 0), ends.get(Stage.PARSE, 0))
        self._add("edge", root, (0, edge_us))
        if Stage.ADMIT in ends:
            self._add("admit", root, (edge_us, ends[Stage.ADMIT]))
        for sequence in trace.sequences:
            for attempt in sequence.attempts:
                self._add_attempt(attempt, root, sequence.index, sequence.first_token_us)

    def _root(self) -> SpanContext:
        trace = self.trace
        parent = self._context(trace.parent_span_id, is_remote=True) if trace.parent_span_id else None
        attributes: Attributes = {
            "baton.request_id": trace.id,
            "baton.outcome": trace.outcome.value,
            "baton.code": trace.code,
            "baton.prompt_tokens": trace.prompt_tokens,
            "baton.cached_tokens": trace.cached_tokens,
            "baton.output_tokens": trace.output_tokens,
            "baton.attempts": trace.num_attempts,
            "http.route": trace.endpoint,
            "http.response.status_code": trace.status,
        }
        failed = trace.outcome is Outcome.FAILED
        return self._add(
            "request", parent, (0, trace.e2e_us), attributes, kind=SpanKind.SERVER, error=trace.code if failed else ""
        )

    def _add_attempt(self, attempt: AttemptTrace, root: SpanContext, choice: int, first_us: int | None) -> None:
        attributes: Attributes = {
            "baton.attempt": attempt.attempt,
            "baton.choice": choice,
            "baton.path": attempt.path,
            "baton.prefill": attempt.prefill,
            "baton.decode": attempt.decode,
            "baton.phase": attempt.end_phase,
        }
        whole = (attempt.start_us, attempt.end_us)
        context = self._add(f"attempt {attempt.attempt}", root, whole, attributes, error=attempt.end_code)
        if attempt.reserve_us is None:
            return
        called_us = attempt.start_us + attempt.reserve_us  # both workers got their calls then
        self._add("reserve", context, (attempt.start_us, called_us), {"baton.busy_replies": attempt.busy_replies})
        for name, worker, start_us, end_us, facts, chunks in _worker_parts(attempt, called_us, first_us):
            part = (min(start_us, attempt.end_us), min(end_us, attempt.end_us))
            self._add(name, context, part, facts, worker=worker, events=chunks)

    def _add(
        self,
        name: str,
        parent: SpanContext | None,
        interval_us: tuple[int, int],
        attributes: Attributes | None = None,
        *,
        worker: str = "",
        kind: SpanKind = SpanKind.INTERNAL,
        error: str = "",
        events: Sequence[tuple[int, str, Attributes]] = (),
    ) -> SpanContext:
        context = self._context(new_span_id(), is_remote=False)
        start_us, end_us = interval_us
        role = "router" if not worker else "prefill" if name == "prefill" else "decode"
        self.spans.append(
            ReadableSpan(
                name,
                context,
                parent,
                _resource(role, worker or self.trace.router),
                attributes or {},
                [Event(event, facts, self._ns(at_us)) for at_us, event, facts in events],
                kind=kind,
                status=Status(StatusCode.ERROR, error) if error else Status(),
                start_time=self._ns(start_us),
                end_time=self._ns(max(start_us, end_us)),
            )
        )
        return context

    def _context(self, span_id: str, *, is_remote: bool) -> SpanContext:
        return SpanContext(self.trace_id, int(span_id, 16), is_remote, TraceFlags(TraceFlags.SAMPLED))

    def _ns(self, us: int) -> int:
        return 1000 * (self.trace.arrived_unix_us + us)


_Part = tuple[str, str, int, int, Attributes, Sequence[tuple[int, str, Attributes]]]


def _worker_parts(attempt: AttemptTrace, called_us: int, first_us: int | None) -> Iterator[_Part]:
    """Name, worker, start, end, attributes and events of each span that a worker's times give."""
    if (prefill := attempt.prefill_times) is not None:
        begun_us = called_us - attempt.early_us
        chunks = [(begun_us + start_us, "chunk", {"baton.tokens": tokens}) for start_us, tokens in prefill.chunks]
        facts: Attributes = {"baton.computed_tokens": prefill.computed_tokens, "baton.queue_us": prefill.queue_us}
        if prefill.encode_us:
            facts = {**facts, "baton.encode_us": prefill.encode_us}
        yield "prefill", attempt.prefill, begun_us, begun_us + prefill.seal_us, facts, chunks
    if (pulled := attempt.import_times) is not None:
        facts = {"baton.bytes": pulled.bytes, "baton.transport": pulled.transport, "baton.proof": pulled.proof}
        start_us, end_us = called_us + pulled.first_chunk_us, called_us + pulled.commit_us
        yield "transfer", attempt.decode, start_us, end_us, facts, ()
    joined_us = None if attempt.import_times is None else called_us + attempt.import_times.join_us
    start = first_us if joined_us is None else joined_us
    if start is not None and attempt.decode_times is not None:
        facts = {"baton.steps": attempt.decode_times.steps, "baton.preemptions": attempt.decode_times.num_preemptions}
        yield "decode", attempt.decode, start, attempt.end_us, facts, ()


@lru_cache(maxsize=1024)
def _resource(role: str, instance: str) -> Resource:
    return Resource(
        {"service.name": f"baton-{role}", "service.instance.id": instance, "service.version": baton.__version__}
    )
