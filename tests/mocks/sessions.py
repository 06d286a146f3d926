"""Sessions of a scripted decode worker: what it sends in a call goes through the real listener and its streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from baton.domain.ids import Incarnation
from baton.domain.request import OutputToken
from baton.domain.trace_context import TraceContext
from baton.domain.trust import OPEN_CLUSTER
from baton.rpc.codec import decode_id, decode_token
from baton.rpc.gen import decode_pb2
from baton.rpc.gen import session_pb2 as pb
from baton.rpc.request_metadata import request_metadata
from baton.rpc.tokens.row_codec import encode_row
from baton.session.listener import SessionListener
from baton.session.pump import SessionPump
from baton.session.session import SessionLimits
from baton.worker.sessions.served_streams import Answer, ServedStreams, WriteTokens

MAX_PROMPT_TOKENS = 1 << 20
LIMITS = SessionLimits(silent_s=4.0, resume_s=8.0, dial_s=10.0)
"""Patient ones, at both ends: a busy machine that runs tests loses no session."""

Generate = Callable[[decode_pb2.GenerateRequest, Any], AsyncGenerator[decode_pb2.GenerateEvent, None]]


class SessionContext:
    """The part of a call's context that a scripted worker uses."""

    def __init__(self, request: decode_pb2.GenerateRequest, trace: TraceContext) -> None:
        self._metadata = request_metadata(decode_id(request.request.id), trace)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata


def listen_for_sessions(incarnation: Incarnation, generate: Generate) -> SessionListener:
    """A listener whose attempts are served by `generate`."""

    def make_owner(pump: SessionPump) -> ServedStreams:
        async def serve(
            request: decode_pb2.GenerateRequest, trace: TraceContext, write: WriteTokens
        ) -> AsyncGenerator[Answer, None]:
            async with aclosing(generate(request, SessionContext(request, trace))) as events:
                async for event in events:
                    yield answer_of(event)
                    pump.session.outbox._open_rows.clear()  # each token is a row of its own, as of a step of an engine

        return ServedStreams(pump, serve, MAX_PROMPT_TOKENS)

    return SessionListener(OPEN_CLUSTER, incarnation, LIMITS, make_owner)


def answer_of(event: decode_pb2.GenerateEvent) -> Answer:
    """The same event in a session."""
    match event.WhichOneof("event"):
        case "tokens":
            tokens: list[OutputToken] = [decode_token(token) for token in event.tokens.tokens]
            row = encode_row(tokens, None, None)
            row.finish_reason = event.tokens.finish_reason
            return row
        case "imported":
            imported = event.imported
            return pb.StreamMessage(joined=pb.Joined(times=imported.times, first_token=imported.first_token))
        case "scores":
            return pb.StreamMessage(scores=event.scores)
    return pb.StreamMessage(ended=pb.Ended(failure=event.failed))
