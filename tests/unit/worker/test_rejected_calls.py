"""Rejected calls are all counted and some of them logged."""

from structlog.testing import capture_logs

from baton.rpc.auth_interceptor import Malformed, RejectedCall
from baton.rpc.call_token import CallTokenFault
from baton.telemetry import metrics
from baton.worker.rejected_calls import LOG_INTERVAL_S, RejectedCallLog


def count(reason: str) -> float:
    return metrics.REJECTED_CALLS_TOTAL.labels(reason)._value.get()


def test_every_rejection_is_counted_and_one_an_interval_is_logged():
    now = 100.0
    rejected_calls = RejectedCallLog(lambda: now)
    forged, garbage = (
        RejectedCall(fault, "/x/Y", "ipv4:1.2.3.4:5") for fault in (CallTokenFault.FORGED, Malformed.MALFORMED)
    )
    before = count("forged")
    with capture_logs() as lines:
        for _ in range(50):
            rejected_calls.record(forged)
        rejected_calls.record(garbage)
        now += LOG_INTERVAL_S
        rejected_calls.record(forged)
    assert count("forged") == before + 51
    assert [line["kind"] for line in lines] == ["forged", "malformed", "forged"]
    assert lines[0]["peer"] == "ipv4:1.2.3.4:5"
    assert "secrets of caller and worker differ" in lines[0]["why"]
