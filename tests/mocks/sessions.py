"""Sessions of a scripted worker: what it serves in calls goes through the real listener and its streams, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from baton.domain.errors import WorkerLost
from baton.domain.ids import Incarnation
from baton.domain.request import OutputToken
from baton.domain.trace_context import TraceContext
from baton.domain.trust import OPEN_CLUSTER
from baton.rpc.codec import decode_id, decode_token
from baton.rpc.gen import common_pb2, decode_pb2, prefill_pb2
from baton.rpc.gen import session_pb2 as pb
from baton.rpc.request_metadata import request_metadata
from baton.rpc.tokens.row_codec import encode_row
from baton.session.lifecycle import SessionState
from baton.session.listener import SessionListener
from baton.session.pump import SessionPump
from baton.session.session import SessionLimits
from baton.session.wires.socket_server import SessionEndpoint, SocketServer
from baton.session.wires.wire import WireConnection
from baton.worker.sessions.served_streams import ServedStreams
from baton.worker.sessions.session_handlers import Answer, SessionHandlers, WriteTokens
from tests.mocks.lies import Lie, lie_in

CONNECTED_STATES = (SessionState.OPEN, SessionState.LEAVING)
MAX_PROMPT_TOKENS = 1 << 20
LIMITS = SessionLimits(silent_s=4.0, resume_s=8.0, dial_s=10.0)
"""Patient ones, at both ends: a busy machine that runs tests loses no session."""


class SessionContext:
    """The part of a call's context that a scripted worker uses."""

    def __init__(self, id: common_pb2.AttemptId, trace: TraceContext) -> None:
        self._metadata = request_metadata(decode_id(id), trace)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata


class SentMessages:
    """Lets a scripted worker wait until the pump has sent what was posted, as a handler of a call waits at its `yield`.

    Otherwise a worker that posts an event and crashes in the same pass of the loop takes the event with it.
    """

    def __init__(self, pump: SessionPump) -> None:
        self._session = pump.session
        self._sent_seq = 0
        self._changed = asyncio.Event()
        self._run, self._close = pump.run, pump.close
        pump.run = self._run_watched  # type: ignore[method-assign]
        pump.close = self._on_closed  # type: ignore[method-assign]

    async def wait(self) -> None:
        """Returns once all that was posted before has been handed to the transport. Without a connection, at once."""
        while self._session.state in CONNECTED_STATES and self._is_behind():
            await self._changed.wait()

    def on_sent(self, seq: int) -> None:
        """A frame has left; 0: one without messages."""
        self._sent_seq = max(self._sent_seq, seq)
        self._wake()

    def _is_behind(self) -> bool:
        outbox = self._session.outbox
        retained = outbox._retained  # a frame that a broken connection brought after all is retained no more
        return bool(outbox._waiting) or bool(retained and self._sent_seq < retained[-1].seq)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _run_watched(self, connection: WireConnection) -> None:
        self._wake()
        try:
            await self._run(_WatchedConnection(connection, self))
        finally:
            self._wake()

    def _on_closed(self) -> None:
        self._close()
        self._wake()


class _WatchedConnection:
    """A `WireConnection` that tells which frames have left."""

    def __init__(self, connection: WireConnection, sent: SentMessages) -> None:
        self._connection = connection
        self._sent = sent
        self.wire = connection.wire
        self.receive, self.close = connection.receive, connection.close

    async def send(self, message: pb.SessionMessage) -> None:
        await self._connection.send(message)
        self._sent.on_sent(pb.Frame.FromString(message.body).seq)


class MockSessions:
    """Serves a worker's own `Generate`, `Reserve`, `Prefill` and `Abort`, and counts what came."""

    def __init__(self, worker: Any, incarnation: Incarnation) -> None:
        self._worker = worker
        self._aborting: set[asyncio.Task[Any]] = set()
        self._sent: list[SentMessages] = []  # one for each session there has been
        self.lies: list[Lie] = []
        self.num_opens = 0  # reservations, prompts and aborts
        self.listener = SessionListener(OPEN_CLUSTER, incarnation, LIMITS, self._make_owner)
        self.port = SocketServer(self.listener.serve, OPEN_CLUSTER, incarnation, SessionEndpoint())
        self.proxy_port: int | None = None  # announced instead of `port`

    def address(self, *, behind_proxy: bool) -> str:
        """What the worker announces; "" where calls alone come through a proxy."""
        if self.proxy_port is not None:
            return str(self.proxy_port)
        return "" if behind_proxy else self.port.address

    def _make_owner(self, pump: SessionPump) -> ServedStreams:
        async def serve(
            request: decode_pb2.GenerateRequest, trace: TraceContext, write: WriteTokens
        ) -> AsyncGenerator[Answer, None]:
            context = SessionContext(request.request.id, trace)
            async with aclosing(self._worker.Generate(request, context)) as events:
                async for event in events:
                    yield answer_of(event)
                    await sent.wait()  # so each token is a row of its own, as of a step of an engine

        sent, check = SentMessages(pump), self._check_of(pump)
        self._sent.append(sent)
        lie_in(pump, self.lies)
        reserve, prefill = partial(self._reserve, check), partial(self._prefill, check, sent)
        return ServedStreams(pump, SessionHandlers(self._abort, serve, reserve, prefill), MAX_PROMPT_TOKENS)

    async def all_sent(self) -> None:
        """Waits for all that was posted in every session."""
        await asyncio.gather(*(sent.wait() for sent in self._sent))

    def _check_of(self, pump: SessionPump) -> Callable[[], None]:
        """Counts an open. Ends the session of a worker that has become another incarnation, as its process would."""
        incarnation = self._worker.incarnation

        def check() -> None:
            self.num_opens += 1
            if self._worker.incarnation != incarnation:
                pump.session.lose("the process has ended")
                pump.close()
                raise WorkerLost("the process has ended")

        return check

    def _abort(self, request: common_pb2.AbortRequest) -> None:
        self.num_opens += 1
        task = asyncio.create_task(self._worker.Abort(request, None))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _reserve(
        self, check: Callable[[], None], request: decode_pb2.ReserveRequest, trace: TraceContext
    ) -> decode_pb2.ReserveReply:
        check()
        reply: decode_pb2.ReserveReply = await self._worker.Reserve(request, SessionContext(request.id, trace))
        return reply

    async def _prefill(
        self, check: Callable[[], None], sent: SentMessages, request: prefill_pb2.PrefillRequest, trace: TraceContext
    ) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        check()
        context = SessionContext(request.request.id, trace)
        async with aclosing(self._worker.Prefill(request, context)) as events:
            async for event in events:
                yield event
                await sent.wait()


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
