"""Errors of workers: those that fail the attempt, those that end the request, and what the next attempt avoids."""

from __future__ import annotations

import pytest

from baton.domain.errors import from_code
from baton.domain.worker import WorkerRole
from services.router.dispatch.worker_errors import AttemptFailure, FaultSource, classify_reported


@pytest.mark.parametrize(
    ("code", "from_prefill", "from_decode"),
    [
        ("worker_lost", FaultSource.DECODE, FaultSource.PREFILL),
        ("link_broken", FaultSource.LINK, FaultSource.LINK),
        ("integrity_failure", FaultSource.LINK, FaultSource.LINK),
        ("lease_ended", FaultSource.NOTHING, FaultSource.NOTHING),
        ("sent_back", FaultSource.PREFILL, FaultSource.DECODE),
        ("draining", FaultSource.PREFILL, FaultSource.DECODE),
        ("cancelled", FaultSource.PREFILL, FaultSource.DECODE),
        ("broken", FaultSource.PREFILL, FaultSource.DECODE),
    ],
)
def test_a_reported_failure_names_what_to_avoid(code, from_prefill, from_decode):
    for role, expected in ((WorkerRole.PREFILL, from_prefill), (WorkerRole.DECODE, from_decode)):
        failure = classify_reported(from_code(code, "said so"), role)
        assert isinstance(failure, AttemptFailure)
        assert failure.fault_source is expected


@pytest.mark.parametrize("code", ["superseded", "deadline_exceeded", "context_length_exceeded", "invalid_request"])
def test_an_error_that_no_attempt_can_mend_is_final(code):
    error = from_code(code, "said so")
    assert classify_reported(error, WorkerRole.DECODE) is error


@pytest.mark.parametrize(("code", "counted"), [("sent_back", False), ("draining", False), ("link_broken", True)])
def test_a_worker_that_makes_room_costs_no_attempt(code, counted):
    failure = classify_reported(from_code(code, "said so"), WorkerRole.DECODE)
    assert isinstance(failure, AttemptFailure)
    assert failure.counted is counted
