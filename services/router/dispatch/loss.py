"""How an attempt is lost: by which error, and what the next one should keep away from. Used by `booking`, `attempt`.

Workers answer with any error of the tree. Here it is decided which of them end the request (they are returned as they
are) and which only the attempt (they become an `AttemptLost`).
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
from baton.rpc.codec import error_of
from services.router.dispatch.placement import Avoided, Pair


class Side(enum.Enum):
    """Who said it."""

    PREFILL = "prefill"
    DECODE = "decode"


class Fault(enum.Enum):
    """What the next attempt should avoid if it can."""

    PREFILL = "prefill"
    DECODE = "decode"
    LINK = "link"
    NOTHING = "nothing"


class AttemptLost(Exception):
    """One attempt is over, the request is not. Never leaves the router's lower half."""

    def __init__(
        self, error: Interrupted, fault: Fault, *, hearsay: bool = False, unready: bool = False, counts: bool = True
    ) -> None:
        """`hearsay`: one worker says that the other is gone; it may as well be the link between them. `unready`: the
        worker at fault takes nothing just now, and is to be left alone for a while."""
        super().__init__(str(error))
        self.error = error
        self.fault = fault
        self.hearsay = hearsay
        self.unready = unready
        self.counts = counts
        """Whether the loss is one of the `max_attempts`: not when the attempt was the trial of a bad link, was turned
        away, or had to make room. The request's deadline bounds those."""

    @property
    def blames_link(self) -> bool:
        """Whether the link between the two workers may be broken, and other requests should keep away from it."""
        return self.fault is Fault.LINK or self.hearsay

    def avoid(self, avoided: Avoided, pair: Pair) -> Avoided:
        """`avoided` and what this loss of an attempt on `pair` adds to it."""
        match self.fault:
            case Fault.PREFILL:
                return avoided.with_worker(pair.prefill.incarnation)
            case Fault.DECODE:
                return avoided.with_worker(pair.decode.incarnation)
            case Fault.LINK:
                return avoided.with_link(pair)
            case Fault.NOTHING:
                return avoided


# A newer attempt owns the request, its time is over, or no worker would ever take it: trying again cannot help.
_FINAL = (Superseded, DeadlineExceeded, InvalidRequest, ContextOverflow, ModelNotFound)

_OWN_FAULT = {Side.PREFILL: Fault.PREFILL, Side.DECODE: Fault.DECODE}


def told(error: BatonError, side: Side) -> BatonError | AttemptLost:
    """What a failure means that the worker of `side` reported itself; to be raised."""
    if isinstance(error, _FINAL):
        return error
    if isinstance(error, SentBack):
        return AttemptLost(error, _OWN_FAULT[side], counts=False)  # prefill adds a token each time: it comes to an end
    if isinstance(error, Interrupted):
        return AttemptLost(error, _fault(error, side), hearsay=isinstance(error, WorkerLost))
    if isinstance(error, Draining | Overloaded):
        lost = WorkerLost(f"{side.value} takes nothing now: {error.code}: {error}")
        return AttemptLost(lost, _OWN_FAULT[side], unready=True, counts=False)
    return AttemptLost(WorkerLost(f"{side.value} gave up: {error.code}: {error}"), _OWN_FAULT[side])


def broken(error: grpc.aio.AioRpcError, side: Side) -> BatonError | AttemptLost:
    """What a call to the worker of `side` means that ended with a gRPC error; to be raised."""
    reported = error_of(error)
    if isinstance(reported, WorkerLost):
        return AttemptLost(reported, _OWN_FAULT[side])
    return told(reported, side)


def silent(side: Side, message: str) -> AttemptLost:
    """The worker of `side` ended a stream early, restarted, or was taken for dead."""
    return AttemptLost(WorkerLost(f"{side.value} {message}"), _OWN_FAULT[side])


def _fault(error: Interrupted, side: Side) -> Fault:
    if isinstance(error, LeaseEnded):
        return Fault.NOTHING  # the same pair finds the prompt's pages still cached
    if isinstance(error, WorkerLost):
        return Fault.PREFILL if side is Side.DECODE else Fault.DECODE  # the peer of the one who tells
    return Fault.LINK
