"""Errors of workers: those that fail the attempt, those that end the request, and what the next attempt avoids."""

from __future__ import annotations

import grpc
import pytest

from baton.domain.errors import IntegrityFailure, LeaseEnded, LinkBroken, PageVerdict, WorkerLost, from_code
from baton.domain.worker import WorkerRole
from baton.rpc.codec import CODE_METADATA_KEY
from baton.services.router.dispatch.worker_errors import (
    AttemptFailure,
    FaultSource,
    classify_reported,
    classify_rpc_error,
)


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


@pytest.mark.parametrize("role", [WorkerRole.PREFILL, WorkerRole.DECODE])
def test_a_superseded_attempt_is_not_retried_here(role):
    error = from_code("superseded", "said so")
    assert classify_reported(error, role) is error


@pytest.mark.parametrize("role", [WorkerRole.PREFILL, WorkerRole.DECODE])
@pytest.mark.parametrize("code", ["deadline_exceeded", "context_length_exceeded", "invalid_request", "model_not_found"])
def test_a_refusal_that_the_router_ruled_out_is_doubted_once(code, role):
    """The bytes that the worker received may not be those that were sent."""
    error = from_code(code, "said so")
    failure = classify_reported(error, role)
    assert isinstance(failure, AttemptFailure)
    assert type(failure.error) is LinkBroken
    assert failure.refusal is error
    assert failure.counted


OUTCOMES = [
    (grpc.StatusCode.ABORTED, "link_broken", LinkBroken, FaultSource.LINK),  # also a reply that cannot be read
    (grpc.StatusCode.ABORTED, "lease_ended", LeaseEnded, FaultSource.NOTHING),
    (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request", LinkBroken, None),
    (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline_exceeded", LinkBroken, None),
    (grpc.StatusCode.INTERNAL, "broken", WorkerLost, None),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded", WorkerLost, None),
    (grpc.StatusCode.ABORTED, "cpde", WorkerLost, None),  # a damaged code
    *[(status, None, WorkerLost, None) for status in grpc.StatusCode if status is not grpc.StatusCode.OK],
]
"""Status and code of a failed call, the attempt's error, and what to avoid (None: the called worker)."""


@pytest.mark.parametrize("role", [WorkerRole.PREFILL, WorkerRole.DECODE])
@pytest.mark.parametrize(("status", "code", "expected", "avoided"), OUTCOMES)
def test_every_outcome_of_a_call_but_superseded_is_retried(status, code, expected, avoided, role):
    trailing = grpc.aio.Metadata(*[(CODE_METADATA_KEY, code)] if code else [])
    error = grpc.aio.AioRpcError(status, grpc.aio.Metadata(), trailing, "why")
    failure = classify_rpc_error(error, role)
    assert isinstance(failure, AttemptFailure)
    assert type(failure.error) is expected
    assert failure.fault_source is (avoided or FaultSource(role.value))


@pytest.mark.parametrize(("code", "counted"), [("sent_back", False), ("draining", False), ("link_broken", True)])
def test_a_worker_that_makes_room_costs_no_attempt(code, counted):
    failure = classify_reported(from_code(code, "said so"), WorkerRole.DECODE)
    assert isinstance(failure, AttemptFailure)
    assert failure.counted is counted


@pytest.mark.parametrize("role", [WorkerRole.PREFILL, WorkerRole.DECODE])
@pytest.mark.parametrize(
    ("verdict", "fault_source"),
    [
        (None, FaultSource.LINK),
        (PageVerdict.LINK, FaultSource.LINK),
        (PageVerdict.SOURCE, FaultSource.PREFILL),
        (PageVerdict.PULLER, FaultSource.NOTHING),
    ],
)
def test_damage_in_memory_does_not_count_against_the_link(
    role: WorkerRole, verdict: PageVerdict | None, fault_source: FaultSource
):
    failure = classify_reported(IntegrityFailure("a page is wrong", verdict), role)
    assert isinstance(failure, AttemptFailure)
    assert failure.fault_source is fault_source
    assert failure.blames_link == (fault_source is FaultSource.LINK)
