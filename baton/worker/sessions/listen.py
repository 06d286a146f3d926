"""The listener of a worker that decodes nothing: its routers' prompts and aborts come in sessions."""

from __future__ import annotations

from baton.domain.ids import Incarnation
from baton.domain.trust import ClusterTrust
from baton.session.listener import SessionListener
from baton.session.pump import SessionPump
from baton.session.session import SessionLimits
from baton.worker.sessions.served_calls import ServedCalls
from baton.worker.sessions.served_streams import ServedStreams


def listen_for_calls(
    calls: ServedCalls, trust: ClusterTrust, incarnation: Incarnation, max_prompt_tokens: int
) -> SessionListener:
    """Serves `calls` to each router. Needs a running event loop, which owns the listener."""

    def make_owner(pump: SessionPump) -> ServedStreams:
        return ServedStreams(pump, None, max_prompt_tokens, calls)

    return SessionListener(trust, incarnation, SessionLimits(), make_owner)
