"""The states of a session as a table. Pure.

    DIALLING -> OPEN <-> BROKEN -> LOST       OPEN -> LEAVING -> CLOSED

BROKEN has no connection and keeps all streams. LOST and CLOSED end them all. LEAVING: this end has said goodbye, and
the other one has not heard it yet.
"""

from __future__ import annotations

import enum

from baton.domain.errors import Broken


class SessionState(enum.Enum):
    """State at one end; the other end may lag behind."""

    DIALLING = "dialling"
    OPEN = "open"
    BROKEN = "broken"
    LEAVING = "leaving"
    LOST = "lost"
    CLOSED = "closed"

    __hash__ = object.__hash__  # members are singletons; that of `Enum` hashes their names, in Python


class SessionEvent(enum.Enum):
    """Cause of a change of state."""

    CONNECT = "connect"
    BREAK = "break"
    LEAVE = "leave"
    LOSE = "lose"
    CLOSE = "close"


_S, _E = SessionState, SessionEvent

SESSION_TABLE: dict[tuple[SessionState, SessionEvent], SessionState] = {
    (_S.DIALLING, _E.CONNECT): _S.OPEN,
    (_S.DIALLING, _E.LOSE): _S.LOST,
    (_S.DIALLING, _E.CLOSE): _S.CLOSED,
    (_S.OPEN, _E.CONNECT): _S.OPEN,  # a newer connection replaces the one in use
    (_S.OPEN, _E.BREAK): _S.BROKEN,
    (_S.OPEN, _E.LEAVE): _S.LEAVING,
    (_S.OPEN, _E.CLOSE): _S.CLOSED,  # the other end has said goodbye
    (_S.OPEN, _E.LOSE): _S.LOST,
    (_S.BROKEN, _E.CONNECT): _S.OPEN,
    (_S.BROKEN, _E.LOSE): _S.LOST,
    (_S.BROKEN, _E.CLOSE): _S.CLOSED,
    (_S.LEAVING, _E.BREAK): _S.CLOSED,
    (_S.LEAVING, _E.CLOSE): _S.CLOSED,
    (_S.LEAVING, _E.LOSE): _S.LOST,
}

ENDED_STATES = frozenset({SessionState.LOST, SessionState.CLOSED})


def advance_session(state: SessionState, event: SessionEvent) -> SessionState:
    """The next state. Raises `Broken` for an event that does not fit."""
    after = SESSION_TABLE.get((state, event))
    if after is None:
        raise Broken(f"a session that is {state.value} cannot {event.value}")
    return after
