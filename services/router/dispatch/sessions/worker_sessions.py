"""The sessions of a router with its workers, one a worker incarnation. Owned by one event loop.

They are opened at the worker's port of sessions, and by gRPC where it has none or cannot be reached there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import lru_cache

from baton.domain.ids import Incarnation, new_incarnation
from baton.domain.trace_context import TraceContext
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.domain.worker import SESSION_OPENS, SESSION_PROMPTS, SESSIONS, WorkerRecord
from baton.rpc.gen import common_pb2, decode_pb2, prefill_pb2
from baton.rpc.request_metadata import Metadata, trace_context
from baton.services.router.dispatch.sessions.session_stream import SessionStream
from baton.services.router.dispatch.sessions.worker_session import WorkerSession
from baton.session.dialler import DialledPeer, SessionDialler
from baton.session.session import SessionLimits
from baton.session.wires.grpc_wire import GrpcWire
from baton.session.wires.wire import Wire
from baton.session.wires.worker_wires import WorkerWires


class WorkerSessions:
    """Dials a worker when it appears, and again when a lost session is needed. `id`: of this router process."""

    def __init__(
        self, wire: Wire, id: str, incarnation: Incarnation, trust: ClusterTrust = OPEN_CLUSTER,
        limits: SessionLimits | None = None,
    ) -> None:  # fmt: skip
        self._wires = WorkerWires(wire, trust)
        self._id = id
        self._incarnation = incarnation
        self._trust = trust
        self._limits = limits or SessionLimits()
        self._sessions: dict[Incarnation, WorkerSession] = {}
        self._running: set[asyncio.Task[None]] = set()

    def serves(self, worker: WorkerRecord) -> bool:
        """True if the worker speaks sessions of this version. Others keep a call an attempt."""
        session = self._sessions.get(worker.incarnation)
        return SESSIONS in worker.capabilities and not (session is not None and session.other_version)

    def open(self, worker: WorkerRecord, request: decode_pb2.GenerateRequest, metadata: Metadata) -> SessionStream:
        """Starts an attempt on `worker`. `metadata`: as of a call. Its failures come with the first read."""
        return self._current(worker).open(request, _trace_of(metadata))

    def takes_opens(self, worker: WorkerRecord) -> bool:
        """True if reservations, prompts and aborts go to the worker in its session, not by calls."""
        return SESSION_OPENS in worker.capabilities and self.serves(worker)

    def reserve(self, worker: WorkerRecord, request: decode_pb2.ReserveRequest, metadata: Metadata) -> SessionStream:
        """Asks a decode worker for room. The caller bounds its wait for the reply, and cancels the stream."""
        return self._current(worker).reserve(request, _trace_of(metadata))

    def prefill(self, worker: WorkerRecord, request: prefill_pb2.PrefillRequest, metadata: Metadata) -> SessionStream:
        """Starts a prompt on a prefill worker. The caller bounds its wait for the seal, and cancels the stream."""
        return self._current(worker).prefill(request, _trace_of(metadata))

    def abort(self, worker: WorkerRecord, request: common_pb2.AbortRequest) -> bool:
        """Sends an abort behind all that was opened. False if no session can bring it: then a call must."""
        session = self._sessions.get(worker.incarnation)
        return session is not None and self.takes_opens(worker) and session.abort(request)

    def follow(self, workers: Iterable[WorkerRecord]) -> None:
        """Dials workers that are new, and ends the sessions with all others than `workers`: they are lost."""
        current = {worker.incarnation: worker for worker in workers if SESSIONS in worker.capabilities}
        for incarnation in self._sessions.keys() - current.keys():
            self._sessions.pop(incarnation).task.cancel()
            self._wires.forget(incarnation)
        for incarnation in current.keys() - self._sessions.keys():
            self._dial(current[incarnation])

    async def close(self) -> None:
        """Ends all sessions as planned; workers hear of it, or `leave_s` passes."""
        for session in self._sessions.values():
            session.leave("the router leaves")
        await asyncio.gather(*self._running, return_exceptions=True)

    def _current(self, worker: WorkerRecord) -> WorkerSession:
        session = self._sessions.get(worker.incarnation)
        return self._dial(worker) if session is None or session.has_ended else session

    def _dial(self, worker: WorkerRecord) -> WorkerSession:
        peer = DialledPeer(worker.address, worker.incarnation, self._id, self._incarnation)
        wire = self._wires.get(worker.address, worker.incarnation, worker.session_address)
        dialler = SessionDialler(wire, self._trust, peer, self._limits)
        session = WorkerSession(dialler, opens_with_prompts=SESSION_PROMPTS in worker.capabilities)
        self._sessions[worker.incarnation] = session
        self._running.add(session.task)
        session.task.add_done_callback(self._running.discard)
        return session


@lru_cache(maxsize=64)
def _trace_of(metadata: Metadata) -> TraceContext:
    """An attempt asks up to three times."""
    return trace_context(dict(metadata))


@asynccontextmanager
async def open_sessions(wanted: bool, id: str, trust: ClusterTrust) -> AsyncIterator[WorkerSessions | None]:
    """Sessions that end with the context; None unless they are `wanted`. `id`: of this router process."""
    if not wanted:
        yield None
        return
    wire = GrpcWire(trust)
    sessions = WorkerSessions(wire, id, new_incarnation(), trust)
    try:
        yield sessions
    finally:
        await sessions.close()
        await wire.close()
