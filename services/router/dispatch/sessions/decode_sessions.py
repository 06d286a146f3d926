"""The sessions of a router with decode workers, one a worker incarnation. Owned by one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from baton.domain.ids import Incarnation, new_incarnation
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.domain.worker import SESSIONS, WorkerRecord
from baton.rpc.gen import decode_pb2
from baton.rpc.request_metadata import Metadata, trace_context
from baton.services.router.dispatch.sessions.session_stream import SessionStream
from baton.services.router.dispatch.sessions.worker_session import WorkerSession
from baton.session.dialler import DialledPeer, SessionDialler
from baton.session.session import SessionLimits
from baton.session.wires.grpc_wire import GrpcWire
from baton.session.wires.wire import Wire


class DecodeSessions:
    """Dials a worker when it appears, and again when a lost session is needed. `id`: of this router process."""

    def __init__(
        self, wire: Wire, id: str, incarnation: Incarnation, trust: ClusterTrust = OPEN_CLUSTER,
        limits: SessionLimits | None = None,
    ) -> None:  # fmt: skip
        self._wire = wire
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
        session = self._sessions.get(worker.incarnation)
        if session is None or session.has_ended:
            session = self._dial(worker)
        return session.open(request, trace_context(dict(metadata)))

    def follow(self, workers: Iterable[WorkerRecord]) -> None:
        """Dials workers that are new, and ends the sessions with all others than `workers`: they are lost."""
        current = {worker.incarnation: worker for worker in workers if SESSIONS in worker.capabilities}
        for incarnation in self._sessions.keys() - current.keys():
            self._sessions.pop(incarnation).task.cancel()
        for incarnation in current.keys() - self._sessions.keys():
            self._dial(current[incarnation])

    async def close(self) -> None:
        """Ends all sessions as planned; workers hear of it, or `leave_s` passes."""
        for session in self._sessions.values():
            session.leave("the router leaves")
        await asyncio.gather(*self._running, return_exceptions=True)

    def _dial(self, worker: WorkerRecord) -> WorkerSession:
        peer = DialledPeer(worker.address, worker.incarnation, self._id, self._incarnation)
        session = WorkerSession(SessionDialler(self._wire, self._trust, peer, self._limits))
        self._sessions[worker.incarnation] = session
        self._running.add(session.task)
        session.task.add_done_callback(self._running.discard)
        return session


@asynccontextmanager
async def open_sessions(wanted: bool, id: str, trust: ClusterTrust) -> AsyncIterator[DecodeSessions | None]:
    """Sessions over gRPC that end with the context; None unless they are `wanted`. `id`: of this router process."""
    if not wanted:
        yield None
        return
    wire = GrpcWire(trust)
    sessions = DecodeSessions(wire, id, new_incarnation(), trust)
    try:
        yield sessions
    finally:
        await sessions.close()
        await wire.close()
