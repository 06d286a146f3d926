"""Serves sessions of routers: attempts come as streams, and a step's rows for one router leave in one frame.

While nothing else of an attempt is left to send, its plain tokens go from the engine's effects into the session in one
chain of calls. All else is sent by the attempt's task, in the same order.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from baton.domain.ids import Incarnation
from baton.domain.trace_context import TraceContext
from baton.domain.trust import ClusterTrust
from baton.rpc.gen import decode_pb2
from baton.services.decode.effects import EmitTokens
from baton.services.decode.serving.attempts import AttemptServer, DecodeStreamEvent
from baton.services.decode.serving.event_codec import encode_session_events
from baton.session.listener import SessionListener
from baton.session.pump import SessionPump
from baton.session.session import SessionLimits
from baton.worker.sessions.served_calls import NO_CALLS, ServedCalls
from baton.worker.sessions.served_streams import Answer, ServedStreams, WriteTokens
from baton.worker.streams import Take


def listen_for_sessions(
    attempts: AttemptServer, trust: ClusterTrust, incarnation: Incarnation, max_prompt_tokens: int, calls: ServedCalls
) -> SessionListener:
    """The listener of a decode worker. Needs a running event loop, which owns it. `calls`: reservations, aborts."""

    def make_owner(pump: SessionPump) -> ServedStreams:
        return serve_streams(attempts, pump, max_prompt_tokens, calls)

    return SessionListener(trust, incarnation, SessionLimits(), make_owner)


def serve_streams(
    attempts: AttemptServer, pump: SessionPump, max_prompt_tokens: int, calls: ServedCalls = NO_CALLS
) -> ServedStreams:
    """Serves the attempts of one session."""

    async def serve(
        request: decode_pb2.GenerateRequest, trace: TraceContext, write: WriteTokens
    ) -> AsyncGenerator[Answer, None]:
        async with aclosing(attempts.events(request, trace, token_taker(write))) as events:
            async for event in events:
                for answer in encode_session_events(event):
                    yield answer

    return ServedStreams(pump, serve, max_prompt_tokens, calls)


def token_taker(write: WriteTokens) -> Take[DecodeStreamEvent]:
    """Writes an attempt's plain tokens; leaves the last row, scores and all other events to its task."""

    def take(event: DecodeStreamEvent) -> bool:
        if type(event) is not EmitTokens or event.finish is not None or event.tokens[0].logprobs is not None:
            return False
        tokens = event.tokens  # one, unless drafts were accepted
        write(tokens[0].index, [tokens[0].token] if len(tokens) == 1 else [token.token for token in tokens])
        return True

    return take
