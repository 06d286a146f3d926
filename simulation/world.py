"""A world: a whole cluster with its clients in one virtual loop, from a scenario to a verdict.

1. processes start and find each other           4. everybody's deadline passes (I8)
2. clients arrive, faults happen                 5. it is quiet: nothing is left behind (I5), the book agrees (I9)
3. all is calm again: new clients must be served
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from typing import Any, cast

from baton.domain.ids import Incarnation, RequestId
from baton.domain.lifecycle import RequestState
from baton.state.memory import MemoryBook
from baton.state.options import BookOptions
from simulation.client import GRACE_S, RECORDED_AS, Client, Outcome
from simulation.clock import Stalled, VirtualLoop, engines_on
from simulation.decode import SimDecode
from simulation.network import Network
from simulation.oracle import Violation
from simulation.parts import SIZES, Parts
from simulation.prefill import SimPrefill
from simulation.process import Process, current_name, task_factory
from simulation.reads import Wires
from simulation.router import SimRouter
from simulation.scenario import CALM_S, ClientPlan, FaultKind, FaultPlan, Scenario
from simulation.trace import Trace, product_logs_in

PROBE_S = CALM_S + 3.4
"""By now links are up again, suspicion is over, and dead workers are forgotten."""

QUIET_S = 6.0
"""Longer than every lease, promise and read."""

Room = SimPrefill | SimDecode | SimRouter


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a scenario: how its clients fared, and the first violation, if there was one."""

    scenario: Scenario
    violation: Violation | None
    trace: Trace
    outcomes: tuple[str, ...]


def run(scenario: Scenario, parts: Parts | None = None) -> Verdict:
    """Runs a scenario to its end, or to the first violation."""
    loop = VirtualLoop()
    loop.set_task_factory(cast(Any, task_factory))
    trace = Trace(loop.time)
    with ExitStack() as stack:
        stack.callback(loop.close)
        stack.enter_context(engines_on(loop.time))
        stack.enter_context(product_logs_in(trace, current_name))
        world = _World(scenario, parts or Parts(), trace)
        try:
            loop.run_until_complete(world.live())
        except Stalled as error:
            world.violated(Violation("I7", str(error)))
        loop.run_until_complete(world.end())
        loop.run_until_complete(loop.shutdown_asyncgens())
    outcomes = tuple(f"{c.plan.name} {c.outcome.value if c.outcome else 'open'} {c.code}" for c in world.clients)
    return Verdict(scenario, world.violation, trace, outcomes)


class _World:
    """Owns the processes and what lies between them."""

    def __init__(self, scenario: Scenario, parts: Parts, trace: Trace) -> None:
        self._scenario = scenario
        self._parts = parts
        self._trace = trace
        self._rng = Random(f"world {scenario.seed}")
        self._network = Network(scenario.seed, scenario.noise, trace)
        self._wires = Wires(scenario.noise)
        self._rooms: dict[str, Room] = {}
        self._processes: dict[str, Process] = {}
        self._dead: list[Process] = []
        self._stopped = asyncio.Event()
        self._names = [
            "router-0",
            *(f"prefill-{n}" for n in range(scenario.num_prefills)),
            *(f"decode-{n}" for n in range(scenario.num_decodes)),
        ]
        self.clients: list[Client] = []
        self.violation: Violation | None = None

    async def live(self) -> None:
        """Everything, until the end or the first violation."""
        loop = asyncio.get_running_loop()
        options = BookOptions(worker_ttl_s=SIZES.worker_ttl_s, heartbeat_s=SIZES.heartbeat_s)
        self._book = MemoryBook(options, clock=loop.time)
        for name in self._names:
            self._start(name)
        for plan in self._scenario.clients:
            loop.call_at(plan.at_s, self._arrive, plan)
        for fault in self._scenario.faults:
            loop.call_at(fault.at_s, self._strike, fault)
        loop.call_at(CALM_S, self._calm)
        story = loop.create_task(self._story(), name="story")
        stopped = loop.create_task(self._stopped.wait(), name="stopped")
        await asyncio.wait((story, stopped), return_when=asyncio.FIRST_COMPLETED)
        for task in (story, stopped):
            task.cancel()
        await asyncio.gather(story, stopped, return_exceptions=True)

    async def end(self) -> None:
        """Every process ends, and is waited for."""
        for process in self._processes.values():
            process.kill()
        for process in (*self._processes.values(), *self._dead):
            await process.gone()

    def violated(self, violation: Violation) -> None:
        """The run is over; the first violation counts."""
        if self.violation is None:
            self.violation = violation
            self._trace.note("oracle", f"VIOLATION {violation}", violation.subject)
        self._stopped.set()

    async def _story(self) -> None:
        try:
            await self._until(PROBE_S)
            probes = self._probe()
            deadline_s = max(c.plan.at_s + c.plan.deadline_s for c in self.clients) + GRACE_S
            await self._ended(deadline_s)
            for client in self.clients:
                client.must_have_ended()
            for client in probes:
                if client.outcome is not Outcome.FINISHED:
                    raise Violation("I8", f"all is well, and yet: {client.outcome} {client.code}", client.plan.name)
            await self._until(asyncio.get_running_loop().time() + QUIET_S)
            for room in self._rooms.values():
                room.check_idle()
            await self._check_book()
        except Violation as violation:
            self.violated(violation)

    async def _until(self, at_s: float) -> None:
        """Lets virtual time pass."""
        await asyncio.sleep(at_s - asyncio.get_running_loop().time())

    async def _ended(self, deadline_s: float) -> None:
        """Waits for all clients, until they should have heard."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline_s):
                for client in self.clients:
                    await client.ended.wait()

    def _start(self, name: str) -> None:
        incarnation = Incarnation(self._rng.randrange(1, 1 << 62))
        process = Process(name, incarnation, Random(f"{name} {incarnation}"), self._crashed)
        self._processes[name] = process
        process.enter(lambda: self._open(name, process))
        self._trace.note(name, "starts")

    def _open(self, name: str, process: Process) -> None:
        scenario, common = self._scenario, (process, self._network, self._wires, self._book, self._parts)
        if name.startswith("prefill"):
            self._rooms[name] = SimPrefill(*common, scenario.digests, self._crashed)
        elif name.startswith("decode"):
            self._rooms[name] = SimDecode(*common, scenario.digests, scenario.num_host_pages, self._crashed)
        else:
            clock = asyncio.get_running_loop().time
            self._rooms[name] = SimRouter(process, self._network, self._book, clock)

    def _crashed(self, process: Process, error: BaseException) -> None:
        if isinstance(error, Violation):
            self.violated(error)
        else:
            self.violated(Violation("crash", f"{process.name}: {type(error).__name__}: {error}"))

    def _arrive(self, plan: ClientPlan) -> Client:
        client = Client(plan, self._trace)
        self.clients.append(client)
        router = self._rooms["router-0"]
        assert isinstance(router, SimRouter)
        self._trace.note("client", f"arrives, {len(plan.prompt)} tokens, max {plan.max_tokens}", plan.name)
        client.arrive(router)
        return client

    def _probe(self) -> list[Client]:
        """A few clients more than can be served at once anywhere; all of them must be."""
        now, prompt = asyncio.get_running_loop().time(), (0, 1, 2, 0, 1)
        plans = [ClientPlan(RequestId(f"probe{n}"), now, (*prompt, n % 3), 6, n, 5.0) for n in range(3)]
        return [self._arrive(plan) for plan in plans]

    def _calm(self) -> None:
        self._network.calm()
        self._wires.calm()

    def _strike(self, fault: FaultPlan) -> None:
        self._trace.note("fault", str(fault))
        process, until_s = self._processes[fault.target], asyncio.get_running_loop().time() + fault.duration_s
        match fault.kind:
            case FaultKind.KILL:
                self._kill(fault, process)
            case FaultKind.FREEZE:
                process.frozen_until_s = max(until_s, process.frozen_until_s)
                self._network.isolate(fault.target, [*self._names, "book"], fault.duration_s)
            case FaultKind.STICK:
                process.stick(until_s)
            case FaultKind.CUT if fault.peer is not None:
                self._network.cut(fault.target, fault.peer, fault.duration_s)
                self._wires.cut(fault.target, fault.peer, fault.duration_s)
            case _:
                raise ValueError(f"a cut has two ends: {fault}")

    def _kill(self, fault: FaultPlan, process: Process) -> None:
        if process.alive:
            process.kill()
            self._dead.append(process)
            self._wires.died(process)
            self._network.died(process)
            asyncio.get_running_loop().call_later(fault.duration_s, self._start, fault.target)

    async def _check_book(self) -> None:
        """What the book says of every request is what its client has seen. The end of a request whose router died soon
        after may not have reached the book: it is written behind the request's back."""
        for client in self.clients:
            expected = RECORDED_AS.get(client.outcome) if client.outcome else None
            if expected is None or client.router is not self._rooms["router-0"]:
                continue
            record = await self._book.get(client.plan.name)
            state: RequestState | None = None if record is None else record.state
            if state is not expected:
                raise Violation("I9", f"{client.outcome} for the client, {state} in the book", client.plan.name)
