"""Spans of a request: one tree, on one clock, each in the process whose time it is."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from baton.domain.errors import WorkerLost
from baton.domain.timing.attempt_times import DecodeTimes
from baton.telemetry.request_trace import Outcome, RequestTrace
from baton.telemetry.spans import SpanSink, otlp_exporter, spans_of
from tests.unit.telemetry.test_request_timer import Run, split_request


def finished() -> RequestTrace:
    run = split_request()
    run.sequence(0.26).decoded(DecodeTimes(2, 20_000, 5_000, 0, 0))
    return run.at(0.263).end(Outcome.FINISHED, "stop")


def tree(spans: list[ReadableSpan]) -> dict[str, str | None]:
    """Span name -> name of its parent."""
    names = {span.context.span_id: span.name for span in spans}
    return {span.name: None if span.parent is None else names.get(span.parent.span_id) for span in spans}


def us(span: ReadableSpan, trace: RequestTrace) -> tuple[int, int]:
    start, end = span.start_time or 0, span.end_time or 0
    return start // 1000 - trace.arrived_unix_us, end // 1000 - trace.arrived_unix_us


def test_a_split_request_is_one_tree():
    trace = finished()
    spans = spans_of(trace)
    assert tree(spans) == {
        "request": None,
        "edge": "request",
        "admit": "request",
        "attempt 1": "request",
        "reserve": "attempt 1",
        "prefill": "attempt 1",
        "transfer": "attempt 1",
        "decode": "attempt 1",
    }
    assert {span.name: us(span, trace) for span in spans} == {
        "request": (0, 263_000),
        "edge": (0, 2_000),
        "admit": (2_000, 4_000),
        "attempt 1": (4_000, 260_000),
        "reserve": (4_000, 10_000),
        "prefill": (10_000, 190_000),
        "transfer": (60_000, 220_000),
        "decode": (225_000, 260_000),
    }
    assert {span.context.trace_id for span in spans} == {int("ab" * 16, 16)}


def test_a_span_belongs_to_the_process_whose_time_it_is():
    owners = {span.name: span.resource.attributes["service.instance.id"] for span in spans_of(finished())}
    assert (owners["admit"], owners["prefill"], owners["transfer"]) == ("router-0", "prefill-0", "decode-0")


def test_prefill_chunks_are_events():
    (prefill,) = [span for span in spans_of(finished()) if span.name == "prefill"]
    assert [event.attributes for event in prefill.events] == [{"baton.tokens": 512}, {"baton.tokens": 300}]


def test_a_failed_request_and_its_lost_attempt_are_errors():
    run = Run()
    run.sequence(1.0).lost("worker_lost", "reserved")
    spans = {span.name: span for span in spans_of(run.at(2.0).fail(WorkerLost("x"), 500))}
    assert spans["request"].status.status_code is StatusCode.ERROR
    assert spans["attempt 1"].status.description == "worker_lost"


@pytest.mark.parametrize(
    ("parent", "sampled", "ratio", "exported"),
    [("", False, 1.0, True), ("", True, 0.0, False), ("cd" * 8, True, 0.0, True), ("cd" * 8, False, 1.0, False)],
)
def test_a_request_follows_its_parents_flag_or_the_ratio(parent: str, sampled: bool, ratio: float, exported: bool):
    exporter = InMemorySpanExporter()
    sink = SpanSink(exporter, ratio)
    sink(msgspec.structs.replace(finished(), parent_span_id=parent, sampled=sampled), b"")
    sink.close()
    spans = exporter.get_finished_spans()
    assert bool(spans) is exported
    if exported:
        (root,) = [span for span in spans if span.name == "request"]
        assert (root.parent.span_id if root.parent else 0) == int(parent or "0", 16)


def test_spans_reach_a_collector_over_http():
    got: list[tuple[str, int]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, len(self.rfile.read(int(self.headers["content-length"])))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        sink = SpanSink(otlp_exporter(f"http://127.0.0.1:{server.server_port}/"))
        sink(finished(), b"")
        sink.close()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    ((path, size),) = got
    assert path == "/v1/traces"
    assert size > 0
