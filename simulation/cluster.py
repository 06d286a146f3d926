"""The simulated cluster: its processes, the network between them, and the faults. Used by `run`.

A name has one life after another; `nodes` holds the present one of each. Knows no client and no scenario.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import cast

from baton.domain.ids import Incarnation, OwnerId, RequestId
from baton.store.options import StoreOptions
from baton.store.store import StateStore
from baton.worker.budget_control import BudgetChange
from simulation.checks.checked_store import BrokenRule, CheckedStore
from simulation.checks.invariants import Violation, check_no_tasks
from simulation.checks.router_health import RouterHealth
from simulation.nodes.decode import SimDecode
from simulation.nodes.encode import SimEncode
from simulation.nodes.environment import SimEnvironment
from simulation.nodes.file_tier import SimFiles
from simulation.nodes.prefill import SimPrefill
from simulation.nodes.router import SimRouter
from simulation.nodes.state_store import StoreServer
from simulation.nodes.store_snapshot import Snapshot
from simulation.policies import CONFIG, PolicyClasses, random_budgets
from simulation.runtime.network import SimNetwork
from simulation.runtime.page_reads import PageNetwork
from simulation.runtime.process import SimProcess
from simulation.runtime.trace import Trace
from simulation.scenario import STORE, VERSIONS, FaultPlan, Scenario, SimFaultKind

ROT_INTERVAL_S = 0.02
"""Pause between two looks for settled pages."""

SimNode = SimPrefill | SimDecode | SimEncode | SimRouter


class SimCluster:
    """All processes of a run. Created inside the running loop.

    `on_violation` receives crashes of processes. `broken_rule`: the rule that a sequence's tokens break, for the
    checked store.
    """

    def __init__(
        self,
        scenario: Scenario,
        policies: PolicyClasses,
        trace: Trace,
        on_violation: Callable[[Violation], None],
        broken_rule: BrokenRule,
    ) -> None:
        self._scenario = scenario
        self._policies = policies
        self._trace = trace
        self._on_violation = on_violation
        self._rng = Random(f"world {scenario.seed}")
        self._network = SimNetwork(scenario.seed, scenario.noise, trace)
        self._page_network = PageNetwork(scenario.noise, trace)
        self._processes: dict[str, SimProcess] = {}
        self._exited: list[SimProcess] = []
        self._names = [*scenario.routers, *scenario.prefills, *scenario.decodes, *scenario.encoders]
        self._router_health = RouterHealth(scenario)
        self._broken_rule = broken_rule
        self._versions = dict.fromkeys([*scenario.prefills, *scenario.decodes], VERSIONS[0])
        self.nodes: dict[str, SimNode] = {}
        self.owners: dict[RequestId, tuple[OwnerId, float]] = {}
        self._rot_rng = Random(f"rot of {scenario.seed}")
        self._budget_rng = Random(f"budgets of {scenario.seed}")
        self._disks: dict[tuple[str, str], SimFiles] = {}
        self.store_server = StoreServer(self._make_store)
        for name in self._names:
            self._start(name)

    @property
    def store(self) -> StateStore:
        """The store, without a network in between."""
        return self.store_server.store

    def router(self, name: str) -> SimRouter:
        """The present life of a router."""
        node = self.nodes[name]
        assert isinstance(node, SimRouter)
        return node

    def stop_faults(self) -> None:
        """Stops random failures."""
        self._network.stop_faults()
        self._page_network.stop_faults()

    @property
    def num_open(self) -> int:
        """Requests that the routers have admitted."""
        return sum(node.dispatcher.num_open for node in self.nodes.values() if isinstance(node, SimRouter))

    def check_idle(self) -> None:
        """Raises `Violation` if anything is left behind anywhere."""
        for node in self.nodes.values():
            node.check_idle()
            check_no_tasks(node.process.name, node.process.tasks())

    async def end(self) -> None:
        """Ends all processes and waits for them."""
        for process in self._processes.values():
            process.kill()
        for process in (*self._processes.values(), *self._exited):
            await process.wait_exited()

    def inject(self, fault: FaultPlan) -> None:
        """Injects a fault."""
        self._trace.note("fault", str(fault))
        self._router_health.inject(fault, asyncio.get_running_loop().time())
        if fault.target == STORE and fault.peer is None:
            self._inject_store_fault(fault)
        elif fault.peer is None:
            self._inject_process_fault(fault, self._processes[fault.target])
        else:
            self._inject_link_fault(fault, fault.target, fault.peer)

    def _inject_store_fault(self, fault: FaultPlan) -> None:
        match fault.kind:
            case SimFaultKind.WIPE:
                self.store_server.empty()
            case SimFaultKind.ROLL_BACK:
                kept = self.store_server.snapshot()
                asyncio.get_running_loop().call_later(fault.duration_s, self._roll_back, kept)
            case _:
                self._network.isolate(STORE, self._names, fault.duration_s)
        if fault.kind is SimFaultKind.KILL:
            wiping = asyncio.ensure_future(self.store_server.wipe())
            wiping.add_done_callback(lambda lost: lost.result())

    def _roll_back(self, kept: Snapshot) -> None:
        self._trace.note("fault", "the store is rolled back")
        self.store_server.roll_back(kept)

    def _inject_process_fault(self, fault: FaultPlan, process: SimProcess) -> None:
        until_s = asyncio.get_running_loop().time() + fault.duration_s
        if fault.kind is SimFaultKind.UPGRADE:
            self._versions[process.name] = VERSIONS[-1]
        match fault.kind:
            case SimFaultKind.KILL:
                self._end(process, fault.duration_s, cleanly=False)
            case SimFaultKind.DRAIN | SimFaultKind.UPGRADE if process.alive:
                process.spawn(self._drain(process, fault.duration_s), f"{process.name} leaves")
            case SimFaultKind.FREEZE:
                process.frozen_until_s = max(until_s, process.frozen_until_s)
                self._network.isolate(fault.target, [*self._names, STORE], fault.duration_s)
            case SimFaultKind.HANG:
                process.hang(until_s)
            case SimFaultKind.ROT:
                self._rot(process.name, until_s)
            case SimFaultKind.BUDGETS:
                self._change_budgets(process.name, fault.duration_s)

    def _rot(self, name: str, until_s: float) -> None:
        """Flips bytes of settled pages or of embeddings, as soon as there are any."""
        loop, node = asyncio.get_running_loop(), self.nodes[name]
        assert not isinstance(node, SimRouter)
        if flipped := node.rot(self._rot_rng):
            self._trace.note(name, f"{'embeddings' if isinstance(node, SimEncode) else 'pages'} rot: {flipped}")
        elif loop.time() < until_s:
            loop.call_later(ROT_INTERVAL_S, self._rot, name, until_s)

    def _change_budgets(self, name: str, duration_s: float) -> None:
        """Changes the budgets of a worker's present life, and back in the life that it has by then."""
        self._set_budgets(name, random_budgets(self._budget_rng, is_prefill=name in self._scenario.prefills))
        asyncio.get_running_loop().call_later(duration_s, self._set_budgets, name, None)

    def _set_budgets(self, name: str, change: BudgetChange | None) -> None:
        node = self.nodes[name]
        assert not isinstance(node, SimRouter)
        if node.process.alive:
            node.process.spawn(node.change_budgets(change), f"{name} changes its budgets")

    def _inject_link_fault(self, fault: FaultPlan, one: str, other: str) -> None:
        match fault.kind:
            case SimFaultKind.CUT:
                self._network.cut(one, other, fault.duration_s)
                self._page_network.cut(one, other, fault.duration_s)
            case SimFaultKind.CUT_ONE_WAY:
                self._network.cut_one_way(one, other, fault.duration_s)
                self._page_network.cut(one, other, fault.duration_s)
            case SimFaultKind.SLOW:
                self._network.slow_down(one, other, fault.duration_s)
            case _:
                raise ValueError(f"not between two: {fault}")

    async def _drain(self, process: SimProcess, away_s: float) -> None:
        await self.nodes[process.name].leave()
        self._trace.note(process.name, "has left")
        self._end(process, away_s, cleanly=True)

    def _end(self, process: SimProcess, away_s: float, cleanly: bool) -> None:
        if process.alive:
            process.kill()
            self._exited.append(process)
            self._page_network.on_process_exit(process)
            self._network.on_process_exit(process, cleanly)
            asyncio.get_running_loop().call_later(away_s, self._start, process.name)

    def _start(self, name: str) -> None:
        incarnation = Incarnation(self._rng.randrange(1, 1 << 62))
        process = SimProcess(name, incarnation, Random(f"{name} {incarnation}"), self._crashed)
        self._processes[name] = process
        process.enter(lambda: self._open(name, process))
        self._trace.note(name, "starts")

    def _open(self, name: str, process: SimProcess) -> None:
        scenario = self._scenario
        environment = SimEnvironment(
            self._network, self._page_network, self.store_server, self._policies, scenario, self._crashed,
            self._disks,
        )  # fmt: skip
        if name in scenario.prefills:
            self.nodes[name] = SimPrefill(process, environment, self._versions[name])
        elif name in scenario.decodes:
            self.nodes[name] = SimDecode(process, environment, self._versions[name])
        elif name in scenario.encoders:
            self.nodes[name] = SimEncode(process, environment)
        else:
            clock = asyncio.get_running_loop().time
            self.nodes[name] = SimRouter(process, self._network, self.store_server, self._policies, scenario, clock)

    def _crashed(self, process: SimProcess, error: BaseException) -> None:
        if isinstance(error, Violation):
            self._on_violation(error)
        else:
            self._on_violation(Violation("crash", f"{process.name}: {type(error).__name__}: {error}"))

    def _make_store(self) -> StateStore:
        config, clock = CONFIG, asyncio.get_running_loop().time
        options = StoreOptions(
            worker_ttl_s=config.worker_ttl_s, owner_ttl_s=config.owner_ttl_s, heartbeat_s=config.heartbeat_s
        )
        store = self._policies.store(options, clock=clock)
        return cast(
            StateStore, CheckedStore(store, self._is_healthy, self._broken_rule, self._on_violation, self.owners)
        )

    def was_well(self, owner: OwnerId, at_s: float) -> bool:
        """True if this life of a router has not ended, and no fault hit it or the store for a while before `at_s`."""
        return self._is_alive(owner) and self._router_health.is_healthy(owner.partition("/")[0], at_s)

    def _is_alive(self, owner: OwnerId) -> bool:
        name, _, incarnation = owner.partition("/")
        process = self._processes.get(name)  # none: nobody's call
        return process is not None and process.alive and f"{process.incarnation:x}" == incarnation

    def _is_healthy(self, owner: OwnerId) -> bool:
        """True if a router has had no reason to lose its lease."""
        return self.was_well(owner, asyncio.get_running_loop().time())
