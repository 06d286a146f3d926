"""The sessions of a simulated worker with those whose pages it reads: the product's, over the simulated network."""

from __future__ import annotations

from baton.domain.ids import WorkerId
from baton.rpc.codec import decode_id
from baton.rpc.gen import session_pb2 as pb
from baton.session.dialler import SessionDialler
from baton.worker.handoff.link_session import LinkSession, LinkStream
from baton.worker.handoff.link_sessions import LinkSessions
from simulation.nodes.environment import SimEnvironment
from simulation.runtime.network import SimNetwork
from simulation.runtime.process import SimProcess
from simulation.runtime.session_ports import sim_wires
from simulation.runtime.session_wire import SimWire

_NOTED = ("watch", "open_export", "commit", "abort")


def sim_link_sessions(environment: SimEnvironment, process: SimProcess) -> LinkSessions | None:
    """The sessions of one life of a worker; None where workers ask each other by calls."""
    return SimLinkSessions(environment.network, process) if environment.scenario.link_sessions else None


class SimLinkSessions(LinkSessions):
    """The real sessions. The trace names the workers that are asked, as it does for calls: see `silence`."""

    def __init__(self, network: SimNetwork, process: SimProcess) -> None:
        super().__init__(SimWire(network, process), WorkerId(process.name), process.incarnation)
        self._wires = sim_wires(network, process)
        self._network, self._name = network, process.name

    def _make(self, dialler: SessionDialler) -> LinkSession:
        return _NotedSession(dialler, self._network, self._name)


class _NotedSession(LinkSession):
    def __init__(self, dialler: SessionDialler, network: SimNetwork, name: str) -> None:
        super().__init__(dialler)
        self._note, self._name = network.trace.note, name
        self._peer = dialler.peer.address

    def open(self, request: pb.LinkRequest) -> LinkStream:
        kind = request.WhichOneof("request") or ""
        if kind in _NOTED:
            id = decode_id(getattr(request, kind).id)
            self._note(f"{self._name}->{self._peer}", f"{kind} {id}", id.request_id)
        return super().open(request)
