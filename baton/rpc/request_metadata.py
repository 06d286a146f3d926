"""A request's ids as gRPC metadata. The router and decode send them; the server binds them to its log context."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from baton.domain.ids import AttemptId
from baton.domain.trace_context import TraceContext, read_trace_context

REQUEST_ID_KEY = "baton-request-id"
ATTEMPT_KEY = "baton-attempt"
HTTP_REQUEST_ID_KEY = "x-request-id"
TRACEPARENT_KEY = "traceparent"
_MAX_ID_CHARS = 256
_KEYS = frozenset({REQUEST_ID_KEY, ATTEMPT_KEY, HTTP_REQUEST_ID_KEY, TRACEPARENT_KEY})

Metadata = tuple[tuple[str, str], ...]


def request_metadata(id: AttemptId, context: TraceContext | None = None) -> Metadata:
    """The `metadata` argument of a call that serves one attempt."""
    pairs = [(REQUEST_ID_KEY, id.request_id), (ATTEMPT_KEY, str(id.attempt))]
    if context is not None and context.http_request_id:
        pairs.append((HTTP_REQUEST_ID_KEY, context.http_request_id))
    if context is not None and context.trace_id:
        pairs.append((TRACEPARENT_KEY, context.traceparent))
    return tuple(pairs)


def log_fields(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str | int]:
    """The log context of a received call; empty for a call without ids."""
    received = {key: value[:_MAX_ID_CHARS] for key, value in metadata if key in _KEYS and isinstance(value, str)}
    fields: dict[str, str | int] = {}
    if request_id := received.get(REQUEST_ID_KEY):
        fields["request_id"] = request_id
    if (attempt := received.get(ATTEMPT_KEY, "")).isdecimal():
        fields["attempt"] = int(attempt)
    context = trace_context(received)
    if context.http_request_id:
        fields["http_request_id"] = context.http_request_id
    if context.trace_id:
        fields["trace_id"] = context.trace_id
    return fields


def received_trace_context(context: grpc.aio.ServicerContext[Any, Any]) -> TraceContext:
    """The trace context of the call that is being served."""
    metadata = context.invocation_metadata() or ()
    return trace_context({key: value for key, value in metadata if key in _KEYS and isinstance(value, str)})


def trace_context(received: dict[str, str]) -> TraceContext:
    """The trace context among received metadata, to be sent on."""
    return read_trace_context(received.get(HTTP_REQUEST_ID_KEY, ""), received.get(TRACEPARENT_KEY, ""))
