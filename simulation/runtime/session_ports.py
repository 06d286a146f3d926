"""Ports of sessions in the simulated network: one a worker, which some links cannot reach for a while.

Such a link behaves as behind a firewall whose rules change: calls pass, connections to the port break, and new ones are
refused or not answered. What dials the port, and goes to gRPC instead, is the product's.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation
from baton.session.wires.socket_wire import REACH_TIMEOUT_S
from baton.session.wires.worker_wires import WorkerWires
from simulation.runtime.network import SimNetwork
from simulation.runtime.process import SimProcess
from simulation.runtime.session_wire import SimConnection, SimWire
from simulation.scenario import END_S

PORT = 7070
CLOSED_SHARE = 0.5
"""Of the links: those whose port closes."""
MAX_CLOSED_S = 3.0
CLOSED = "the port is closed"


def session_address(name: str, has_port: bool) -> str:
    """As a worker announces it."""
    return f"{name}:{PORT}" if has_port else ""


def sim_wires(network: SimNetwork, process: SimProcess) -> WorkerWires:
    """What the sessions of one process are carried by."""
    loop = asyncio.get_running_loop()
    return WorkerWires(SimWire(network, process), socket=SimPortWire(network, process), clock=loop.time)


@dataclass(frozen=True, slots=True)
class _PortState:
    """`is_silent`: connections are not answered, instead of refused."""

    from_s: float
    until_s: float
    is_silent: bool


class SimPortWire:
    """`Wire` of one process to the ports of others."""

    def __init__(self, network: SimNetwork, process: SimProcess) -> None:
        self._network = network
        self._process = process
        self._wire = SimWire(network, process)

    async def connect(self, address: str, incarnation: Incarnation) -> SimConnection:
        """See `Wire`. `address`: as `session_address` gives it."""
        loop, host = asyncio.get_running_loop(), address.rpartition(":")[0]
        closed = self._state_of(host)
        if closed is not None and closed.from_s <= loop.time() < closed.until_s:
            link = self._network.link(self._process.name, host)
            await asyncio.sleep(REACH_TIMEOUT_S if closed.is_silent else link.delay_s(loop.time()))
            self._network.trace.note(f"{self._process.name}->{host}", CLOSED)
            raise LinkBroken(CLOSED)
        connection = await self._wire.connect(host, incarnation)
        connection.wire = connection.peer.wire = "socket"
        if closed is not None and loop.time() < closed.from_s:
            loop.call_at(closed.from_s, connection.break_off, CLOSED)
        return connection

    def _state_of(self, host: str) -> _PortState | None:
        """The same for every process of this name."""
        rng = Random(f"{self._network.seed} port {self._process.name} {host}")
        if rng.random() >= CLOSED_SHARE:
            return None
        from_s = rng.choice([0.0, rng.uniform(0.0, END_S)])
        return _PortState(from_s, from_s + rng.uniform(0.1, MAX_CLOSED_S), rng.random() < 0.5)
