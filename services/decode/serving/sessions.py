"""Serves attempts in sessions of routers: they come as streams, and a step's rows for one router leave in one frame.

While nothing else of an attempt is left to send, its plain tokens go from the engine's effects into the session in one
chain of calls. All else is sent by the attempt's task, in the same order.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from baton.domain.trace_context import TraceContext
from baton.rpc.gen import decode_pb2
from baton.services.decode.effects import EmitTokens
from baton.services.decode.serving.attempts import AttemptServer, DecodeStreamEvent
from baton.services.decode.serving.event_codec import encode_session_events
from baton.worker.sessions.session_handlers import Answer, ServeAttempt, WriteTokens
from baton.worker.streams import Take


def serve_attempts(attempts: AttemptServer) -> ServeAttempt:
    """The handler of the attempts that come in sessions."""

    async def serve(
        request: decode_pb2.GenerateRequest, trace: TraceContext, write: WriteTokens
    ) -> AsyncGenerator[Answer, None]:
        async with aclosing(attempts.events(request, trace, token_taker(write))) as events:
            async for event in events:
                for answer in encode_session_events(event):
                    yield answer

    return serve


def token_taker(write: WriteTokens) -> Take[DecodeStreamEvent]:
    """Writes an attempt's plain tokens; leaves the last row, scores and all other events to its task."""

    def take(event: DecodeStreamEvent) -> bool:
        if type(event) is not EmitTokens or event.finish is not None or event.tokens[0].logprobs is not None:
            return False
        tokens = event.tokens  # one, unless drafts were accepted
        write(tokens[0].index, [tokens[0].token] if len(tokens) == 1 else [token.token for token in tokens])
        return True

    return take
