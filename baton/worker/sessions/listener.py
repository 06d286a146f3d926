"""The listener of a worker: its routers' attempts, reservations, prompts and aborts come in sessions, and so does what
other workers ask about its pages."""

from __future__ import annotations

from functools import partial

from baton.domain.ids import Incarnation
from baton.domain.trust import ClusterTrust
from baton.session.listener import SessionListener
from baton.session.pump import SessionPump
from baton.session.session import SessionLimits
from baton.worker.handoff.handoff_handlers import HandoffHandlers
from baton.worker.handoff.served_link import ServedLink
from baton.worker.sessions.served_streams import ServedStreams
from baton.worker.sessions.session_handlers import SessionHandlers


def listen_for_sessions(
    handlers: SessionHandlers,
    trust: ClusterTrust,
    incarnation: Incarnation,
    max_prompt_tokens: int,
    handoffs: HandoffHandlers | None = None,
) -> SessionListener:
    """Serves `handlers` to each router that dials, and `handoffs` to each worker; None: this worker gives no pages.

    Needs a running event loop, which owns the listener.
    """

    def make_owner(pump: SessionPump) -> ServedStreams:
        return ServedStreams(pump, handlers, max_prompt_tokens)

    make_link_owner = None if handoffs is None else partial(ServedLink, handlers=handoffs)
    return SessionListener(trust, incarnation, SessionLimits(), make_owner, make_link_owner)
