"""A request's ids travel as gRPC metadata and come out as log fields."""

from __future__ import annotations

import pytest

from baton.domain.ids import AttemptId, RequestId
from baton.domain.trace_context import TraceContext
from baton.rpc.request_metadata import Metadata, log_fields, request_metadata

ID = AttemptId(RequestId("chatcmpl-1-0"), 2)


def test_ids_survive_the_metadata():
    context = TraceContext("http-1", "ab" * 16, "cd" * 8, True)
    assert log_fields(request_metadata(ID, context)) == {
        "request_id": "chatcmpl-1-0",
        "attempt": 2,
        "http_request_id": "http-1",
        "trace_id": "ab" * 16,
    }
    assert log_fields(request_metadata(ID)) == {"request_id": "chatcmpl-1-0", "attempt": 2}


@pytest.mark.parametrize(
    "metadata",
    [(), (("baton-attempt", "-1"),), (("traceparent", "x"),), (("baton-request-id", ""), ("other", "y"))],
)
def test_metadata_without_usable_ids_gives_no_fields(metadata: Metadata):
    assert log_fields(metadata) == {}
