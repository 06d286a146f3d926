"""Serves sessions of routers: attempts come as streams, and a step's rows for one router leave in one frame."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from baton.domain.ids import Incarnation
from baton.domain.trace_context import TraceContext
from baton.domain.trust import ClusterTrust
from baton.rpc.gen import decode_pb2
from baton.services.decode.serving.attempts import AttemptServer
from baton.services.decode.serving.event_codec import encode_session_events
from baton.session.listener import SessionListener
from baton.session.pump import SessionPump
from baton.session.session import SessionLimits
from baton.worker.sessions.served_streams import Answer, ServedStreams


def listen_for_sessions(
    attempts: AttemptServer, trust: ClusterTrust, incarnation: Incarnation, max_prompt_tokens: int
) -> SessionListener:
    """The listener of a decode worker. Needs a running event loop, which owns it."""

    async def serve(request: decode_pb2.GenerateRequest, trace: TraceContext) -> AsyncGenerator[Answer, None]:
        async with aclosing(attempts.events(request, trace)) as events:
            async for event in events:
                for answer in encode_session_events(event):
                    yield answer

    def make_owner(pump: SessionPump) -> ServedStreams:
        return ServedStreams(pump, serve, max_prompt_tokens)

    return SessionListener(trust, incarnation, SessionLimits(), make_owner)
