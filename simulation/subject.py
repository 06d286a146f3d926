"""Which request a message is about, for the trace."""

from __future__ import annotations

from typing import Any

from baton.domain.ids import AttemptId
from baton.rpc import codec
from baton.rpc.gen import common_pb2, decode_pb2, handoff_pb2, prefill_pb2

_NAMES_IT = (common_pb2.AbortRequest, decode_pb2.PromiseRequest, handoff_pb2.WatchRequest, handoff_pb2.CommitRequest)
_CARRIES_IT = (decode_pb2.GenerateRequest, prefill_pb2.PrefillRequest)


def subject_of(message: Any) -> AttemptId | None:
    """The attempt that a request message names; None for one about a whole worker."""
    if isinstance(message, _NAMES_IT):
        return codec.decode_id(message.id)
    if isinstance(message, _CARRIES_IT):
        return codec.decode_id(message.request.id)
    return None
