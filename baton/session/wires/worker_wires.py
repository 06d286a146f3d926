"""Chooses what carries the sessions with each worker: its port of sessions, or gRPC.

Used by routers, and by workers that read pages of others. Owned by one event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial

import structlog

from baton.domain.ids import Incarnation
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.session.wires.socket_wire import ReachingWire, SocketWire
from baton.session.wires.wire import Wire

log = structlog.get_logger(__name__)


class WorkerWires:
    """The wires to workers. They know which ports were not reached, so one lasts longer than a session.

    `grpc` carries the sessions with workers that announce no port, and all of them where `trust` has certificates:
    nothing is encrypted at a port. `socket` connects to ports; None: a `SocketWire`.
    """

    def __init__(
        self,
        grpc: Wire,
        trust: ClusterTrust = OPEN_CLUSTER,
        socket: Wire | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._grpc = grpc
        self._socket = None if trust.tls is not None else socket or SocketWire(trust)
        self._clock = clock
        self._reaching: dict[Incarnation, Wire] = {}

    def get(self, address: str, incarnation: Incarnation, session_address: str) -> Wire:
        """The wire to a worker. `address`: its gRPC one. `session_address`: as announced; "": none."""
        if not session_address or self._socket is None:
            return self._grpc
        wire = self._reaching.get(incarnation)
        if wire is None:
            on_fallback = partial(_log_unreached, address)
            wire = ReachingWire(self._socket, self._grpc, session_address, on_fallback, self._clock)
            self._reaching[incarnation] = wire
        return wire

    def forget(self, incarnation: Incarnation) -> None:
        """The worker has left. Idempotent."""
        self._reaching.pop(incarnation, None)

    def retain(self, incarnations: Collection[Incarnation]) -> None:
        """Forgets all workers except `incarnations`."""
        for left in self._reaching.keys() - set(incarnations):
            del self._reaching[left]


def _log_unreached(address: str, why: str) -> None:
    hint = "Its sessions go through gRPC, at more CPU time."
    log.warning("session_port_not_reached", worker=address, why=why, hint=hint)
