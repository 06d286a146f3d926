"""Finds the request of a message, for the trace."""

from __future__ import annotations

from typing import Any

from baton.domain.ids import AttemptId
from baton.rpc import codec
from baton.rpc.gen import common_pb2, decode_pb2, handoff_pb2, prefill_pb2

_WITH_ID = (common_pb2.AbortRequest, decode_pb2.ReserveRequest, handoff_pb2.WatchRequest, handoff_pb2.CommitRequest)
_WITH_REQUEST = (decode_pb2.GenerateRequest, prefill_pb2.PrefillRequest)


def attempt_of(message: Any) -> AttemptId | None:
    """The attempt that a request message names; None for one about a whole worker."""
    if isinstance(message, _WITH_ID):
        return codec.decode_id(message.id)
    if isinstance(message, _WITH_REQUEST):
        return codec.decode_id(message.request.id)
    return None
