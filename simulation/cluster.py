"""The simulated cluster: its processes, what lies between them, and all that can be done to them. Used by `world`.

A name has one life after another; `rooms` has the present one of each. Knows no client and no scenario's course.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import cast

from baton.domain.ids import Incarnation, OwnerId
from baton.state.base import StateBook
from baton.state.options import BookOptions
from simulation.book import BookHost
from simulation.decode import SimDecode
from simulation.health import Health
from simulation.network import Network
from simulation.oracle import Violation, check_tasks
from simulation.parts import SIZES, Parts
from simulation.prefill import SimPrefill
from simulation.process import Process
from simulation.reads import Wires
from simulation.router import SimRouter
from simulation.scenario import BOOK, VERSIONS, FaultKind, FaultPlan, Scenario
from simulation.trace import Trace
from simulation.witness import Breach, WitnessedBook

Room = SimPrefill | SimDecode | SimRouter


class Cluster:
    """Every process of a world. Made inside the running loop.

    `violated` hears of processes that crash; `breach`: what is wrong with a job's tokens, for who watches the book.
    """

    def __init__(
        self,
        scenario: Scenario,
        parts: Parts,
        trace: Trace,
        violated: Callable[[Violation], None],
        breach: Breach,
    ) -> None:
        self._scenario = scenario
        self._parts = parts
        self._trace = trace
        self._violated = violated
        self._rng = Random(f"world {scenario.seed}")
        self._network = Network(scenario.seed, scenario.noise, trace)
        self._wires = Wires(scenario.noise)
        self._processes: dict[str, Process] = {}
        self._dead: list[Process] = []
        self._names = [*scenario.routers, *scenario.prefills, *scenario.decodes]
        self._health = Health(scenario)
        self._breach = breach
        self._versions = dict.fromkeys([*scenario.prefills, *scenario.decodes], VERSIONS[0])
        self.rooms: dict[str, Room] = {}
        self.book_host = BookHost(self._make_book)
        for name in self._names:
            self._start(name)

    @property
    def book(self) -> StateBook:
        """As it is, seen by nobody in particular."""
        return self.book_host.book

    def router(self, name: str) -> SimRouter:
        """The present life of a router."""
        room = self.rooms[name]
        assert isinstance(room, SimRouter)
        return room

    def calm(self) -> None:
        """From now on nothing goes wrong by chance."""
        self._network.calm()
        self._wires.calm()

    def check_idle(self) -> None:
        """Raises `Violation` if anything is left behind anywhere."""
        for room in self.rooms.values():
            room.check_idle()
            check_tasks(room.process.name, room.process.tasks())

    async def end(self) -> None:
        """Every process ends, and is waited for."""
        for process in self._processes.values():
            process.kill()
        for process in (*self._processes.values(), *self._dead):
            await process.gone()

    def strike(self, fault: FaultPlan) -> None:
        """A fault happens."""
        self._trace.note("fault", str(fault))
        self._health.strike(fault, asyncio.get_running_loop().time())
        if fault.target == BOOK and fault.peer is None:
            self._strike_book(fault)
        elif fault.peer is None:
            self._strike_process(fault, self._processes[fault.target])
        else:
            self._strike_link(fault, fault.target, fault.peer)

    def _strike_book(self, fault: FaultPlan) -> None:
        self._network.isolate(BOOK, self._names, fault.duration_s)
        if fault.kind is FaultKind.KILL:
            losing = asyncio.ensure_future(self.book_host.lose())
            losing.add_done_callback(lambda lost: lost.result())

    def _strike_process(self, fault: FaultPlan, process: Process) -> None:
        until_s = asyncio.get_running_loop().time() + fault.duration_s
        if fault.kind is FaultKind.UPGRADE:
            self._versions[process.name] = VERSIONS[-1]
        match fault.kind:
            case FaultKind.KILL:
                self._end(process, fault.duration_s, cleanly=False)
            case FaultKind.DRAIN | FaultKind.UPGRADE if process.alive:
                process.spawn(self._drain(process, fault.duration_s), f"{process.name} leaves")
            case FaultKind.FREEZE:
                process.frozen_until_s = max(until_s, process.frozen_until_s)
                self._network.isolate(fault.target, [*self._names, BOOK], fault.duration_s)
            case FaultKind.STICK:
                process.stick(until_s)

    def _strike_link(self, fault: FaultPlan, one: str, other: str) -> None:
        match fault.kind:
            case FaultKind.CUT:
                self._network.cut(one, other, fault.duration_s)
                self._wires.cut(one, other, fault.duration_s)
            case FaultKind.MUTE:
                self._network.mute(one, other, fault.duration_s)
                self._wires.cut(one, other, fault.duration_s)
            case FaultKind.SLOW:
                self._network.slow_down(one, other, fault.duration_s)
            case _:
                raise ValueError(f"not between two: {fault}")

    async def _drain(self, process: Process, away_s: float) -> None:
        await self.rooms[process.name].leave()
        self._trace.note(process.name, "has left")
        self._end(process, away_s, cleanly=True)

    def _end(self, process: Process, away_s: float, cleanly: bool) -> None:
        if process.alive:
            process.kill()
            self._dead.append(process)
            self._wires.died(process)
            self._network.died(process, cleanly)
            asyncio.get_running_loop().call_later(away_s, self._start, process.name)

    def _start(self, name: str) -> None:
        incarnation = Incarnation(self._rng.randrange(1, 1 << 62))
        process = Process(name, incarnation, Random(f"{name} {incarnation}"), self._crashed)
        self._processes[name] = process
        process.enter(lambda: self._open(name, process))
        self._trace.note(name, "starts")

    def _open(self, name: str, process: Process) -> None:
        scenario, common = self._scenario, (process, self._network, self._wires, self.book_host, self._parts)
        if name in scenario.prefills:
            self.rooms[name] = SimPrefill(*common, scenario, self._crashed, self._versions[name])
        elif name in scenario.decodes:
            self.rooms[name] = SimDecode(*common, scenario, self._crashed, self._versions[name])
        else:
            clock = asyncio.get_running_loop().time
            deadline_s = scenario.deadline_s
            self.rooms[name] = SimRouter(process, self._network, self.book_host, self._parts, deadline_s, clock)

    def _crashed(self, process: Process, error: BaseException) -> None:
        if isinstance(error, Violation):
            self._violated(error)
        else:
            self._violated(Violation("crash", f"{process.name}: {type(error).__name__}: {error}"))

    def _make_book(self) -> StateBook:
        sizes, clock = SIZES, asyncio.get_running_loop().time
        options = BookOptions(
            worker_ttl_s=sizes.worker_ttl_s, owner_ttl_s=sizes.owner_ttl_s, heartbeat_s=sizes.heartbeat_s
        )
        book = self._parts.book(options, clock=clock)
        return cast(StateBook, WitnessedBook(book, self._is_well, self._breach, self._violated))

    def _is_well(self, owner: OwnerId) -> bool:
        """Whether a router has had no reason to lose its lease."""
        name, _, incarnation = owner.partition("/")
        process = self._processes[name]
        lives = process.alive and f"{process.incarnation:x}" == incarnation
        return lives and self._health.is_well(name, asyncio.get_running_loop().time())
