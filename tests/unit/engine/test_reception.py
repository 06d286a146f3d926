"""Calls turned away are all counted and seldom logged."""

from structlog.testing import capture_logs

from baton.engine.reception import QUIET_S, Reception
from baton.rpc.door import Malformed, Turned
from baton.rpc.ticket import TicketFault
from baton.telemetry import metrics


def count(reason: str) -> float:
    return metrics.CALLS_TURNED_AWAY_TOTAL.labels(reason)._value.get()


def test_all_are_counted_and_one_a_while_is_logged():
    now = 100.0
    reception = Reception(lambda: now)
    forged, garbage = (Turned(fault, "/x/Y", "ipv4:1.2.3.4:5") for fault in (TicketFault.FORGED, Malformed.MALFORMED))
    before = count("forged")
    with capture_logs() as lines:
        for _ in range(50):
            reception.turned(forged)
        reception.turned(garbage)
        now += QUIET_S
        reception.turned(forged)
    assert count("forged") == before + 51
    assert [line["kind"] for line in lines] == ["forged", "malformed", "forged"]
    assert lines[0]["peer"] == "ipv4:1.2.3.4:5"
    assert "secrets of caller and worker differ" in lines[0]["why"]
