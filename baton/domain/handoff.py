"""The two sides of a handoff as tables `(state, event) -> state`; see `docs/protocol.md`."""

from __future__ import annotations

import enum

from baton.domain.errors import Broken


class SourceState(enum.Enum):
    """An offer on the prefill side. Pages are pinned in the first three states only.

    FORSAKEN: given up, but decode was granted a lease and may be reading until that is over or it says otherwise.
    """

    PINNED = "pinned"
    SEALED = "sealed"
    FORSAKEN = "forsaken"
    COMMITTED = "committed"
    EXPIRED = "expired"
    ABORTED = "aborted"


class SourceEvent(enum.Enum):
    """What can happen to an offer."""

    PUBLISH = "publish"
    SEAL = "seal"
    RENEW = "renew"
    COMMIT = "commit"
    LEASE_END = "lease_end"
    ABORT = "abort"
    FORSAKE = "forsake"


class LandingState(enum.Enum):
    """A landing on the decode side. A row may run only from COMMITTED."""

    PROMISED = "promised"
    BOUND = "bound"
    PULLING = "pulling"
    COMMITTED = "committed"
    DRAINING = "draining"
    RELEASED = "released"


class LandingEvent(enum.Enum):
    """What can happen to a landing."""

    BIND = "bind"
    PULL = "pull"
    COMMIT = "commit"
    ABORT = "abort"
    DRAINED = "drained"


_S, _SE, _L, _LE = SourceState, SourceEvent, LandingState, LandingEvent

SOURCE_TABLE: dict[tuple[SourceState, SourceEvent], SourceState] = {
    (_S.PINNED, _SE.PUBLISH): _S.PINNED,
    (_S.PINNED, _SE.SEAL): _S.SEALED,
    **{(s, _SE.RENEW): s for s in (_S.PINNED, _S.SEALED)},
    (_S.SEALED, _SE.COMMIT): _S.COMMITTED,
    **{(s, _SE.FORSAKE): _S.FORSAKEN for s in (_S.PINNED, _S.SEALED)},
    **{(s, _SE.LEASE_END): _S.EXPIRED for s in (_S.PINNED, _S.SEALED, _S.FORSAKEN)},
    **{(s, _SE.ABORT): _S.ABORTED for s in (_S.PINNED, _S.SEALED, _S.FORSAKEN)},
}

LANDING_TABLE: dict[tuple[LandingState, LandingEvent], LandingState] = {
    (_L.PROMISED, _LE.BIND): _L.BOUND,
    (_L.BOUND, _LE.PULL): _L.PULLING,
    (_L.PULLING, _LE.PULL): _L.PULLING,
    (_L.BOUND, _LE.COMMIT): _L.COMMITTED,  # everything was in decode's own prefix cache but the last page
    (_L.PULLING, _LE.COMMIT): _L.COMMITTED,
    **{(s, _LE.ABORT): _L.DRAINING for s in (_L.PROMISED, _L.BOUND, _L.PULLING)},
    (_L.COMMITTED, _LE.ABORT): _L.RELEASED,
    (_L.DRAINING, _LE.DRAINED): _L.RELEASED,
}


def advance_source(state: SourceState, event: SourceEvent) -> SourceState:
    """The offer's state after `event`. Raises `Broken` for a pair that is not in the table."""
    try:
        return SOURCE_TABLE[state, event]
    except KeyError:
        raise Broken(f"offer in state {state.value} cannot {event.value}") from None


def advance_landing(state: LandingState, event: LandingEvent) -> LandingState:
    """The landing's state after `event`. Raises `Broken` for a pair that is not in the table."""
    try:
        return LANDING_TABLE[state, event]
    except KeyError:
        raise Broken(f"landing in state {state.value} cannot {event.value}") from None
