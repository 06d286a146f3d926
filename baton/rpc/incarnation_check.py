"""Checks that a request is meant for this incarnation of the worker. Used by the server's interceptor.

A request names the incarnation in its field `incarnation`. `Hello` is the exception: its field is the caller's own.
"""

from __future__ import annotations

from google.protobuf.message import Message

from baton.domain.errors import WorkerLost
from baton.domain.ids import Incarnation
from baton.rpc.gen.handoff_pb2 import HelloRequest

FIELD = "incarnation"


def names_other_incarnation(request: object, incarnation: Incarnation) -> bool:
    """True if `request` is meant for another process than the one of `incarnation`."""
    if not isinstance(request, Message) or isinstance(request, HelloRequest):
        return False
    if FIELD not in request.DESCRIPTOR.fields_by_name:
        return False
    return bool(getattr(request, FIELD) != incarnation)


def check_incarnation(request: object, incarnation: Incarnation) -> None:
    """Raises `WorkerLost` for a request that is meant for another process."""
    if names_other_incarnation(request, incarnation):
        raise WorkerLost("the call is meant for an earlier incarnation of this worker")
