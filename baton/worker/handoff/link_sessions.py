"""The sessions of a worker with those whose pages it reads, one an exporter's process. Owned by one event loop.

They are opened at the exporter's port of sessions, and by gRPC where it has none or cannot be reached there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import AsyncExitStack

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.domain.worker import SESSION_LINKS, WorkerRecord
from baton.rpc.gen import session_pb2 as pb
from baton.session.dialler import DialledPeer, SessionDialler
from baton.session.session import SessionLimits
from baton.session.wires.grpc_wire import GrpcWire
from baton.session.wires.wire import Wire
from baton.session.wires.worker_wires import WorkerWires
from baton.worker.handoff.link_session import LinkSession


class LinkSessions:
    """Dials an exporter when it is first asked, and again when it is asked after its session was lost.

    `wire`: gRPC. `id` and `incarnation`: of this worker.
    """

    def __init__(
        self, wire: Wire, id: WorkerId, incarnation: Incarnation, trust: ClusterTrust = OPEN_CLUSTER,
        limits: SessionLimits | None = None,
    ) -> None:  # fmt: skip
        self._wires = WorkerWires(wire, trust)
        self._id = id
        self._incarnation = incarnation
        self._trust = trust
        self._limits = limits or SessionLimits()
        self._sessions: dict[Incarnation, LinkSession] = {}
        self._other_version: set[Incarnation] = set()
        self._running: set[asyncio.Task[None]] = set()

    def serves(self, worker: WorkerRecord) -> bool:
        """True if the worker is asked in a session. Others, and those of another protocol version, get calls."""
        return SESSION_LINKS in worker.capabilities and worker.incarnation not in self._other_version

    def get(self, address: str, incarnation: Incarnation, session_address: str = "") -> LinkSession:
        """The session with a worker, which is dialled if there is none. `session_address`: as announced; "": none."""
        session = self._sessions.get(incarnation)
        if session is None or not session.is_usable:
            peer = DialledPeer(address, incarnation, self._id, self._incarnation, pb.SESSION_ROLE_WORKER)
            wire = self._wires.get(address, incarnation, session_address)
            session = self._make(SessionDialler(wire, self._trust, peer, self._limits))
            self._sessions[incarnation] = session
            self._running.add(session.task)
            session.task.add_done_callback(self._running.discard)
        return session

    def end(self, incarnation: Incarnation, reason: str) -> None:
        """Ends the session with a worker whose link is down, and all that was asked in it. Idempotent."""
        session = self._sessions.pop(incarnation, None)
        if session is not None:
            if session.other_version:
                self._other_version.add(incarnation)
            session.leave(reason)

    def retain(self, incarnations: Collection[Incarnation]) -> None:
        """Forgets which workers speak another version or were not reached at their ports, except `incarnations`."""
        self._other_version.intersection_update(incarnations)
        self._wires.retain(incarnations)

    async def close(self) -> None:
        """Ends all sessions as planned; exporters hear of it, or `leave_s` passes."""
        for session in self._sessions.values():
            session.leave("the worker leaves")
        self._sessions.clear()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _make(self, dialler: SessionDialler) -> LinkSession:
        return LinkSession(dialler)


def open_link_sessions(
    wanted: bool, id: WorkerId, incarnation: Incarnation, trust: ClusterTrust, stack: AsyncExitStack
) -> LinkSessions | None:
    """Sessions that end with `stack`; None unless they are `wanted`."""
    if not wanted:
        return None
    wire = GrpcWire(trust)
    stack.push_async_callback(wire.close)
    sessions = LinkSessions(wire, id, incarnation, trust)
    stack.push_async_callback(sessions.close)
    return sessions
