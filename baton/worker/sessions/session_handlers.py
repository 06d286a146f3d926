"""What a worker does with what its routers open in sessions: attempts of decode, reservations, prompts and aborts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from baton.domain.errors import InvalidRequest
from baton.domain.trace_context import TraceContext
from baton.rpc.gen import common_pb2, decode_pb2, prefill_pb2
from baton.rpc.gen import session_pb2 as pb

Answer = pb.StreamMessage | pb.TokenRow
WriteTokens = Callable[[int, list[int]], None]
"""Posts the next tokens of one stream, from an index on. Neither raises nor waits; keeps the list."""
ServeAttempt = Callable[[decode_pb2.GenerateRequest, TraceContext, WriteTokens], AsyncGenerator[Answer, None]]
"""Serves one attempt until it ends or is closed. Sets no stream number. Ends after a row with a finish or `Ended`.

Tokens may be written instead of given, while the stream is served and all answers before them have been taken.
"""
ServeReserve = Callable[[decode_pb2.ReserveRequest, TraceContext], Awaitable[decode_pb2.ReserveReply]]
"""Asks the engine for room. Cancelled when the router does not wait any more; the router sends an abort, too."""
ServePrompt = Callable[[prefill_pb2.PrefillRequest, TraceContext], AsyncGenerator[prefill_pb2.PrefillEvent, None]]
"""Computes a prompt. Ends after `sealed` or `failed`; closing it before aborts the attempt."""


def _abort_nothing(request: common_pb2.AbortRequest) -> None:
    raise InvalidRequest("this worker takes no aborts in sessions")


@dataclass(frozen=True, slots=True)
class SessionHandlers:
    """Of one worker. `abort` ends an attempt in every state, and must not wait. None: not of its role."""

    abort: Callable[[common_pb2.AbortRequest], None] = _abort_nothing
    generate: ServeAttempt | None = None
    reserve: ServeReserve | None = None
    prefill: ServePrompt | None = None

    async def reserve_answers(
        self, request: decode_pb2.ReserveRequest, trace: TraceContext
    ) -> AsyncGenerator[pb.StreamMessage, None]:
        """The reply, as the one answer of its stream. Raises `InvalidRequest` where none are served."""
        if self.reserve is None:
            raise InvalidRequest("this worker takes no reservations")
        yield pb.StreamMessage(reserve_reply=await self.reserve(request, trace))

    async def prompt_answers(
        self, request: prefill_pb2.PrefillRequest, trace: TraceContext
    ) -> AsyncGenerator[pb.StreamMessage, None]:
        """The events of a prompt. Raises `InvalidRequest` where none are served."""
        if self.prefill is None:
            raise InvalidRequest("this worker takes no prompts")
        async with aclosing(self.prefill(request, trace)) as events:
            async for event in events:
                yield pb.StreamMessage(prefill_event=event)
