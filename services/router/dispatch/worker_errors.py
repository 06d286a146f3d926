"""Decides which errors of workers end a request and which only an attempt. Used by `reserve` and `attempt`.

An error that ends the request is returned unchanged. Any other becomes an `AttemptFailure`, with what the next attempt
should avoid.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import grpc

from baton.domain.errors import (
    BatonError,
    Cancelled,
    ConstraintFailed,
    ContextOverflow,
    DeadlineExceeded,
    Draining,
    IntegrityFailure,
    Interrupted,
    InvalidRequest,
    LeaseEnded,
    LinkBroken,
    ModelNotFound,
    NeedMedia,
    Overloaded,
    PageVerdict,
    SentBack,
    Superseded,
    WorkerLost,
)
from baton.domain.worker import WorkerRole
from baton.rpc.codec import error_from_rpc
from baton.services.router.dispatch.placement.pair import Pair
from baton.services.router.dispatch.placement.query import Avoided

GRACE_S = 1.0
"""Calls to workers end this much after the request's deadline. So the attempt reports the deadline, and no worker
counts as lost."""


class FaultSource(enum.Enum):
    """Part that the next attempt avoids if it can."""

    PREFILL = "prefill"
    DECODE = "decode"
    LINK = "link"
    NOTHING = "nothing"


class AttemptFailure(Exception):
    """Ends one attempt, but not its request. Never leaves `dispatch`."""

    def __init__(
        self,
        error: Interrupted,
        fault_source: FaultSource,
        *,
        second_hand: bool = False,
        unready: bool = False,
        counted: bool = True,
        refusal: BatonError | None = None,
    ) -> None:
        """`second_hand`: one worker reports the loss of the other; their link may be broken instead.

        `unready`: the worker at fault takes no requests for a while. `refusal`: the error that ends the request if the
        next attempt is refused, too.
        """
        super().__init__(str(error))
        self.error = error
        self.fault_source = fault_source
        self.second_hand = second_hand
        self.unready = unready
        self.refusal = refusal
        self.counted = counted
        """False for the probe of a bad link, a refusal and a preempted row: only the deadline bounds those. All other
        failures count towards `max_attempts`."""
        self.retry_after_s: float | None = None
        """When an unready worker may take requests again, as it says; None if it does not."""
        self.unreached = False
        """True if a worker was lost before prefill had the request. Does not count, for a while."""

    @property
    def blames_link(self) -> bool:
        """True when the link between the two workers may be broken."""
        return self.fault_source is FaultSource.LINK or self.second_hand

    def avoid(self, avoided: Avoided, pair: Pair) -> Avoided:
        """Adds what failed in an attempt on `pair` to `avoided`."""
        match self.fault_source:
            case FaultSource.PREFILL:
                return avoided.with_worker(pair.prefill.incarnation)
            case FaultSource.DECODE:
                return avoided.with_worker(pair.decode.incarnation)
            case FaultSource.LINK:
                return avoided.with_link(pair)
            case FaultSource.NOTHING:
                return avoided


# The router has checked the request, the room for it and the deadline itself. A worker that disagrees may have received
# other bytes, so another attempt confirms its refusal.
_DOUBTED = (DeadlineExceeded, InvalidRequest, ContextOverflow, ModelNotFound, ConstraintFailed)

_OWN_SOURCE = {WorkerRole.PREFILL: FaultSource.PREFILL, WorkerRole.DECODE: FaultSource.DECODE}


def classify_reported(error: BatonError, role: WorkerRole) -> BatonError | AttemptFailure:
    """Classifies an error that the worker of `role` reported. The caller raises the result."""
    if isinstance(error, Superseded):
        return error
    if isinstance(error, _DOUBTED):
        doubted = LinkBroken(f"{role.value} refused the request: {error.code}: {error}")
        return AttemptFailure(doubted, _OWN_SOURCE[role], refusal=error)
    if isinstance(error, SentBack):
        # Prefill adds a token at each attempt, so the sequence ends.
        return AttemptFailure(error, _OWN_SOURCE[role], counted=False)
    if isinstance(error, Interrupted):
        return AttemptFailure(error, _source_of(error, role), second_hand=isinstance(error, WorkerLost))
    if isinstance(error, Draining | Overloaded):
        lost = WorkerLost(f"{role.value} takes no requests now: {error.code}: {error}")
        return AttemptFailure(lost, _OWN_SOURCE[role], unready=True, counted=False)
    return AttemptFailure(WorkerLost(f"{role.value} failed: {error.code}: {error}"), _OWN_SOURCE[role])


def classify_rpc_error(error: grpc.aio.AioRpcError, role: WorkerRole) -> BatonError | AttemptFailure:
    """Classifies the gRPC error of a call to the worker of `role`. The caller raises the result."""
    reported = error_from_rpc(error)
    if isinstance(reported, WorkerLost):
        return AttemptFailure(reported, _OWN_SOURCE[role])
    return classify_reported(reported, role)


def classify_upload_error(error: grpc.aio.AioRpcError) -> BatonError | AttemptFailure:
    """Classifies the gRPC error of an upload to prefill. Decode and the link to it have no part in it."""
    failure = classify_rpc_error(error, WorkerRole.PREFILL)
    if isinstance(failure, AttemptFailure):
        failure.fault_source, failure.second_hand = FaultSource.PREFILL, False
    return failure


def abort_reason(error: BaseException | None) -> str:
    """What workers are told when `error` ends an attempt: its code. All else is a request that was cancelled."""
    if isinstance(error, AttemptFailure):
        return error.error.code
    return error.code if isinstance(error, BatonError) else Cancelled.code


def lost_worker(role: WorkerRole, message: str) -> AttemptFailure:
    """The failure of an attempt whose worker of `role` is gone or ended its stream early."""
    return AttemptFailure(WorkerLost(f"{role.value} {message}"), _OWN_SOURCE[role])


def damaged(why: str, source: FaultSource = FaultSource.LINK) -> AttemptFailure:
    """The failure of an attempt with a message that cannot be what was sent. `source`: where it can only come from."""
    return AttemptFailure(LinkBroken(f"a damaged message: {why}"), source)


def guarded(call: Callable[..., Any], *arguments: object) -> Any:
    """What `call` returns. Raises `AttemptFailure` if a message is not what was sent."""
    try:
        return call(*arguments)
    except LinkBroken as error:
        raise AttemptFailure(error, FaultSource.LINK) from None


def _source_of(error: Interrupted, role: WorkerRole) -> FaultSource:
    if isinstance(error, NeedMedia):
        return FaultSource.NOTHING  # the same worker gets the images again
    if isinstance(error, LeaseEnded):
        return FaultSource.NOTHING  # the same pair still has the pages of the prompt cached
    if isinstance(error, WorkerLost):
        return FaultSource.PREFILL if role is WorkerRole.DECODE else FaultSource.DECODE  # the peer of the reporter
    if isinstance(error, IntegrityFailure) and error.verdict is PageVerdict.SOURCE:
        return FaultSource.PREFILL
    if isinstance(error, IntegrityFailure) and error.verdict is PageVerdict.PULLER:
        return FaultSource.NOTHING  # decode has taken the page out of use
    return FaultSource.LINK
