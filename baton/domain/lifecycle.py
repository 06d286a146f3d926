"""The lifecycle of a sequence as a table `(state, event) -> state`. The router drives it, the store mirrors it."""

from __future__ import annotations

import enum

from baton.domain.errors import Broken


class RequestState(enum.Enum):
    """State of a sequence. The last four are terminal."""

    RECEIVED = "received"
    QUEUED = "queued"
    RESERVED = "reserved"
    PREFILLING = "prefilling"
    SEALED = "sealed"
    DECODING = "decoding"
    INTERRUPTED = "interrupted"
    FINISHED = "finished"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    FAILED = "failed"

    __hash__ = object.__hash__  # members are singletons; that of `Enum` hashes their names, in Python

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


class RequestEvent(enum.Enum):
    """Events of a sequence."""

    ENQUEUE = "enqueue"
    RESERVE = "reserve"
    PREFILL = "prefill"
    SEAL = "seal"
    DECODE = "decode"
    FINISH = "finish"
    INTERRUPT = "interrupt"
    RETRY = "retry"
    RESUME = "resume"
    REFUSE = "refuse"
    CANCEL = "cancel"
    FAIL = "fail"

    __hash__ = object.__hash__  # members are singletons; that of `Enum` hashes their names, in Python


TERMINAL = frozenset({RequestState.FINISHED, RequestState.REFUSED, RequestState.CANCELLED, RequestState.FAILED})
_S, _E = RequestState, RequestEvent

TABLE: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (_S.RECEIVED, _E.ENQUEUE): _S.QUEUED,
    (_S.RECEIVED, _E.REFUSE): _S.REFUSED,
    (_S.QUEUED, _E.REFUSE): _S.REFUSED,
    (_S.QUEUED, _E.RESERVE): _S.RESERVED,
    (_S.RESERVED, _E.PREFILL): _S.PREFILLING,
    (_S.RESERVED, _E.DECODE): _S.DECODING,  # the decode worker prefills for itself
    (_S.PREFILLING, _E.SEAL): _S.SEALED,
    (_S.SEALED, _E.DECODE): _S.DECODING,
    (_S.SEALED, _E.FINISH): _S.FINISHED,  # the first token is the last one
    (_S.DECODING, _E.FINISH): _S.FINISHED,
    **{(s, _E.INTERRUPT): _S.INTERRUPTED for s in (_S.RESERVED, _S.PREFILLING, _S.SEALED, _S.DECODING)},
    (_S.INTERRUPTED, _E.RETRY): _S.QUEUED,
    # A takeover of what another router lost, or of what was cancelled until its client came back.
    **{(s, _E.RESUME): _S.QUEUED for s in _S if s not in TERMINAL or s is _S.CANCELLED},
    **{(s, _E.CANCEL): _S.CANCELLED for s in _S if s not in TERMINAL},
    **{(s, _E.FAIL): _S.FAILED for s in _S if s not in TERMINAL},
}


def advance(state: RequestState, event: RequestEvent) -> RequestState:
    """The state after `event`. Raises `Broken` for a pair that is not in the table."""
    try:
        return TABLE[state, event]
    except KeyError:
        raise Broken(f"request in state {state.value} cannot {event.value}") from None
