"""A router finds running and recent requests, logs each once, and keeps a bounded number."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from baton.domain.errors import WorkerLost
from baton.domain.trace_context import TraceContext
from baton.telemetry import metrics, request_traces
from baton.telemetry.request_timer import RequestOrigin, RequestTimer
from baton.telemetry.request_trace import Outcome, RequestTrace, decode_trace
from baton.telemetry.request_traces import RequestLog, RequestTraces


def begin(traces: RequestTraces, id: str) -> RequestTimer:
    timer = traces.start(RequestOrigin("/v1/completions"), 0.0)
    timer.begin(id, 1, 5, stream=False)
    traces.begin(timer)
    return timer


def finish(traces: RequestTraces, id: str) -> None:
    timer = begin(traces, id)
    timer.sequences[0].finish("stop")
    timer.end(Outcome.FINISHED, "stop")


def fail(traces: RequestTraces, id: str) -> None:
    begin(traces, id).fail(WorkerLost("x"), 500)


def test_a_request_is_found_while_it_runs_and_after_its_end():
    traces = RequestTraces("router-0", "m")
    timer = begin(traces, "a")
    running = traces.find("a")
    assert running is not None
    assert running.outcome is Outcome.RUNNING
    ended = timer.end(Outcome.FINISHED, "stop")
    assert traces.find("a") == ended
    assert traces.find("b") is None


def test_good_requests_do_not_push_out_a_failed_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request_traces, "MAX_RECENT", 4)
    traces = RequestTraces("router-0", "m")
    fail(traces, "bad")
    for number in range(10):
        finish(traces, f"good-{number}")
    assert traces.find("good-0") is None
    bad = traces.find("bad")
    assert bad is not None
    assert bad.outcome is Outcome.FAILED
    assert [trace.id for trace in traces.recent()] == ["good-9", "good-8", "good-7", "good-6"]
    assert [trace.id for trace in traces.recent(notable=True)] == ["bad"]


def finish_with_token(traces: RequestTraces, id: str, *, sampled: bool) -> None:
    context = TraceContext(trace_id="0af7651916cd43dd8448eb211c80319c", sampled=sampled)
    timer = traces.start(RequestOrigin("/v1/completions", context=context), time.monotonic())
    timer.begin(id, 1, 5, stream=False)
    timer.sequences[0].token(time.monotonic())
    timer.sequences[0].finish("stop")
    timer.end(Outcome.FINISHED, "stop")


def exemplar_lines(id: str) -> list[str]:
    content, content_type = metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    return [line for line in content.decode().splitlines() if f'request_id="{id}"' in line]


def test_a_sampled_request_is_the_exemplar_of_its_latencies():
    finish_with_token(RequestTraces("router-0", "m"), "cmpl-sampled", sampled=True)
    lines = exemplar_lines("cmpl-sampled")
    assert {line.split("{")[0] for line in lines} == {"baton_ttft_seconds_bucket", "baton_e2e_seconds_bucket"}
    assert all('trace_id="0af7651916cd43dd8448eb211c80319c"' in line for line in lines)


def test_a_usual_request_is_no_exemplar_and_a_notable_one_is(monkeypatch: pytest.MonkeyPatch):
    traces = RequestTraces("router-0", "m")
    finish_with_token(traces, "cmpl-usual", sampled=False)
    assert exemplar_lines("cmpl-usual") == []
    monkeypatch.setattr(traces, "_is_notable", lambda trace: True)
    finish_with_token(traces, "cmpl-notable", sampled=False)
    assert len(exemplar_lines("cmpl-notable")) == 2


def test_exemplars_are_not_in_the_plain_text_format():
    finish_with_token(RequestTraces("router-0", "m"), "cmpl-plain", sampled=True)
    assert b"cmpl-plain" not in metrics.render()[0]


@pytest.mark.parametrize(
    ("request_log", "logged"),
    [(RequestLog.ALL, ["good", "bad"]), (RequestLog.NOTABLE, ["bad"]), (RequestLog.OFF, [])],
)
def test_each_request_is_logged_once(request_log: RequestLog, logged: list[str]):
    traces = RequestTraces("router-0", "m", request_log)
    with capture_logs() as lines:
        finish(traces, "good")
        fail(traces, "bad")
    assert [line["request_id"] for line in lines if line["event"] == "request_end"] == logged


def test_a_sink_gets_each_trace_with_its_bytes():
    got: list[tuple[RequestTrace, bytes]] = []
    traces = RequestTraces("router-0", "m", sinks=(lambda trace, data: got.append((trace, data)),))
    finish(traces, "a")
    ((trace, data),) = got
    assert (trace.id, decode_trace(data)) == ("a", trace)


def test_a_sink_that_fails_fails_no_request():
    traces = RequestTraces("router-0", "m")
    traces.add_sink(_raise(RuntimeError("sink")))
    with capture_logs() as lines:
        finish(traces, "a")
    assert [line["event"] for line in lines] == ["request_end", "request_trace_failed"]
    assert traces.find("a") is not None


def _raise(error: Exception) -> Callable[[RequestTrace, bytes], None]:
    def sink(trace: RequestTrace, data: bytes) -> None:
        raise error

    return sink


def test_a_trace_that_cannot_be_judged_fails_no_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(RequestTraces, "_is_notable", lambda self, trace: trace.no_such_field)
    traces = RequestTraces("router-0", "m")
    with capture_logs() as lines:
        finish(traces, "a")
    assert [line["event"] for line in lines] == ["request_trace_failed"]
