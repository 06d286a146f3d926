"""The codec and the views of a request's record."""

from __future__ import annotations

import msgspec

from baton.domain.timing.attempt_times import DecodeTimes
from baton.telemetry.request_trace import (
    MAX_TRACE_BYTES,
    Outcome,
    RequestTrace,
    TraceEvent,
    decode_trace,
    encode_trace,
    log_fields,
    trace_from_json,
    trace_json,
)
from tests.unit.telemetry.test_request_timer import Run, split_request


def finished() -> RequestTrace:
    run = split_request()
    run.sequence(0.26).decoded(DecodeTimes(2, 20_000, 5_000, 0, 0))
    return run.at(0.263).end(Outcome.FINISHED, "stop")


def test_a_trace_survives_both_codecs():
    trace = finished()
    assert decode_trace(encode_trace(trace)) == trace
    assert trace_from_json(trace_json(trace)) == trace


def test_a_usual_trace_is_small():
    assert len(encode_trace(finished())) < 1_600


def test_a_large_trace_loses_details_and_stays_bounded():
    trace = finished()
    attempt = trace.sequences[0].attempts[0]
    large = msgspec.structs.replace(
        trace,
        sequences=tuple(msgspec.structs.replace(trace.sequences[0], attempts=(attempt,) * 8) for _ in range(16)),
        events=tuple(TraceEvent(i, "attempt_failed", "x" * 80) for i in range(32)),
    )
    data = encode_trace(large)
    assert len(data) <= MAX_TRACE_BYTES
    kept = decode_trace(data)
    assert (kept.id, kept.stages, kept.e2e_us) == (trace.id, trace.stages, trace.e2e_us)


def test_a_newer_field_is_ignored_and_an_absent_one_has_its_default():
    fields = msgspec.msgpack.decode(encode_trace(finished()))
    assert "durable" not in fields
    old = decode_trace(msgspec.msgpack.encode(fields | {"of_a_later_version": 1}))
    assert old == finished_without_clock(old)


def finished_without_clock(like: RequestTrace) -> RequestTrace:
    return msgspec.structs.replace(finished(), arrived_unix_us=like.arrived_unix_us)


def test_the_log_line_has_stages_that_add_up():
    fields = log_fields(finished())
    assert fields == {
        "request_id": "call-1",
        "outcome": "finished",
        "code": "stop",
        "status": 200,
        "attempts": 1,
        "prefill": "prefill-0",
        "decode": "decode-0",
        "prompt_tokens": 812,
        "cached_tokens": 0,
        "output_tokens": 3,
        "queue_s": 0.011,
        "prefill_s": 0.190,
        "transfer_s": 0.034,
        "decode_s": 0.028,
        "ttft_s": 0.201,
        "e2e_s": 0.263,
        "tenant": "acme",
        "http_request_id": "http-1",
        "trace_id": "ab" * 16,
    }


def test_the_log_line_of_a_refused_request_names_no_worker():
    fields = log_fields(Run().timer.end(Outcome.REFUSED, "overloaded", 429))
    assert (fields["attempts"], fields["prefill"], fields["ttft_s"], fields["status"]) == (0, "", None, 429)
