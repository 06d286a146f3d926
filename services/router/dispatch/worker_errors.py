"""How an attempt is lost: by which error, and what the next one should keep away from. Used by `reserve`, `attempt`.

Workers answer with any error of the tree. Here it is decided which of them end the request (they are returned as they
are) and which only the attempt (they become an `AttemptFailure`).
"""

from __future__ import annotations

import enum

import grpc

from baton.domain.errors import (
    BatonError,
    ContextOverflow,
    DeadlineExceeded,
    Draining,
    Interrupted,
    InvalidRequest,
    LeaseEnded,
    ModelNotFound,
    Overloaded,
    SentBack,
    Superseded,
    WorkerLost,
)
from baton.domain.worker import WorkerRole
from baton.rpc.codec import error_from_rpc
from services.router.dispatch.placement import Avoided, Pair


class FaultSource(enum.Enum):
    """What the next attempt should avoid if it can."""

    PREFILL = "prefill"
    DECODE = "decode"
    LINK = "link"
    NOTHING = "nothing"


class AttemptFailure(Exception):
    """One attempt is over, the request is not. Never leaves the router's lower half."""

    def __init__(
        self,
        error: Interrupted,
        fault_source: FaultSource,
        *,
        second_hand: bool = False,
        unready: bool = False,
        counted: bool = True,
    ) -> None:
        """`second_hand`: one worker says that the other is gone; it may as well be the link between them.

        `unready`: the worker at fault takes nothing just now, and is to be left alone for a while.
        """
        super().__init__(str(error))
        self.error = error
        self.fault_source = fault_source
        self.second_hand = second_hand
        self.unready = unready
        self.counted = counted
        """Whether the failure is one of the `max_attempts`: not when the attempt was the probe of a bad link, was
        refused, or had to make room. The request's deadline bounds those."""

    @property
    def blames_link(self) -> bool:
        """Whether the link between the two workers may be broken, and other requests should keep away from it."""
        return self.fault_source is FaultSource.LINK or self.second_hand

    def avoid(self, avoided: Avoided, pair: Pair) -> Avoided:
        """`avoided` and what this failure of an attempt on `pair` adds to it."""
        match self.fault_source:
            case FaultSource.PREFILL:
                return avoided.with_worker(pair.prefill.incarnation)
            case FaultSource.DECODE:
                return avoided.with_worker(pair.decode.incarnation)
            case FaultSource.LINK:
                return avoided.with_link(pair)
            case FaultSource.NOTHING:
                return avoided


# A newer attempt owns the request, its time is over, or no worker would ever take it: trying again cannot help.
_FINAL = (Superseded, DeadlineExceeded, InvalidRequest, ContextOverflow, ModelNotFound)

_OWN_SOURCE = {WorkerRole.PREFILL: FaultSource.PREFILL, WorkerRole.DECODE: FaultSource.DECODE}


def classify_reported(error: BatonError, role: WorkerRole) -> BatonError | AttemptFailure:
    """What a failure means that the worker of `role` reported itself; to be raised."""
    if isinstance(error, _FINAL):
        return error
    if isinstance(error, SentBack):
        return AttemptFailure(
            error, _OWN_SOURCE[role], counted=False
        )  # prefill adds a token each time: it comes to an end
    if isinstance(error, Interrupted):
        return AttemptFailure(error, _source_of(error, role), second_hand=isinstance(error, WorkerLost))
    if isinstance(error, Draining | Overloaded):
        lost = WorkerLost(f"{role.value} takes nothing now: {error.code}: {error}")
        return AttemptFailure(lost, _OWN_SOURCE[role], unready=True, counted=False)
    return AttemptFailure(WorkerLost(f"{role.value} gave up: {error.code}: {error}"), _OWN_SOURCE[role])


def classify_rpc_error(error: grpc.aio.AioRpcError, role: WorkerRole) -> BatonError | AttemptFailure:
    """What a call to the worker of `role` means that ended with a gRPC error; to be raised."""
    reported = error_from_rpc(error)
    if isinstance(reported, WorkerLost):
        return AttemptFailure(reported, _OWN_SOURCE[role])
    return classify_reported(reported, role)


def lost_worker(role: WorkerRole, message: str) -> AttemptFailure:
    """The worker of `role` ended a stream early, restarted, or was taken for dead."""
    return AttemptFailure(WorkerLost(f"{role.value} {message}"), _OWN_SOURCE[role])


def _source_of(error: Interrupted, role: WorkerRole) -> FaultSource:
    if isinstance(error, LeaseEnded):
        return FaultSource.NOTHING  # the same pair finds the prompt's pages still cached
    if isinstance(error, WorkerLost):
        return FaultSource.PREFILL if role is WorkerRole.DECODE else FaultSource.DECODE  # the peer of the one who tells
    return FaultSource.LINK
