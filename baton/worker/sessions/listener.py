"""The listener of a worker: its routers' attempts, reservations, prompts and aborts come in sessions."""

from __future__ import annotations

from baton.domain.ids import Incarnation
from baton.domain.trust import ClusterTrust
from baton.session.listener import SessionListener
from baton.session.pump import SessionPump
from baton.session.session import SessionLimits
from baton.worker.sessions.served_streams import ServedStreams
from baton.worker.sessions.session_handlers import SessionHandlers


def listen_for_sessions(
    handlers: SessionHandlers, trust: ClusterTrust, incarnation: Incarnation, max_prompt_tokens: int
) -> SessionListener:
    """Serves `handlers` to each router that dials. Needs a running event loop, which owns the listener."""

    def make_owner(pump: SessionPump) -> ServedStreams:
        return ServedStreams(pump, handlers, max_prompt_tokens)

    return SessionListener(trust, incarnation, SessionLimits(), make_owner)
