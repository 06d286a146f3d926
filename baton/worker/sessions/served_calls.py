"""What a worker serves in sessions besides attempts of decode: reservations, prompts and aborts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from baton.domain.errors import InvalidRequest
from baton.domain.trace_context import TraceContext
from baton.rpc.gen import common_pb2, decode_pb2, prefill_pb2
from baton.rpc.gen import session_pb2 as pb

ServeReserve = Callable[[decode_pb2.ReserveRequest, TraceContext], Awaitable[decode_pb2.ReserveReply]]
"""Asks the engine for room. Cancelled when the router does not wait any more; the router sends an abort, too."""
ServePrompt = Callable[[prefill_pb2.PrefillRequest, TraceContext], AsyncGenerator[prefill_pb2.PrefillEvent, None]]
"""Computes a prompt. Ends after `sealed` or `failed`; closing it before aborts the attempt."""


@dataclass(frozen=True, slots=True)
class ServedCalls:
    """Handlers of one worker. `abort` ends an attempt in every state, and must not wait. None: not of its role."""

    abort: Callable[[common_pb2.AbortRequest], None]
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


def _abort_nothing(request: common_pb2.AbortRequest) -> None:
    raise InvalidRequest("this worker takes no aborts in sessions")


NO_CALLS = ServedCalls(_abort_nothing)
"""Of a worker that serves attempts alone."""
