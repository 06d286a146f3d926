"""A run: a whole cluster with its clients in one virtual loop, from a scenario to a result.

1. processes start and find each other           4. all deadlines pass (I8)
2. clients arrive, faults happen                 5. it is quiet: nothing is left behind (I5), the store agrees (I9)
3. faults are over: new clients must be served
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from unittest.mock import patch

from baton.domain.errors import Overloaded
from baton.domain.ids import RequestId
from simulation.checks.end_of_run import check_only_drains, check_store
from simulation.checks.invariants import Violation
from simulation.checks.silence import check_silence
from simulation.clients.client import ClientOutcome, SimClient
from simulation.cluster import SimCluster
from simulation.policies import PolicyClasses
from simulation.runtime.process import current_name, task_factory
from simulation.runtime.trace import Trace, product_logs_in
from simulation.runtime.virtual_clock import Deadlock, VirtualLoop, patched_engine_clocks
from simulation.scenario import FAULTS_END_S, ClientPlan, ImagePlan, Scenario
from simulation.vision.image_parser import ImageRequestParser

PROBE_AT_S = FAULTS_END_S + 3.4
"""Time after the last fault until links are up and dead workers are forgotten."""

QUIET_S = 3.5
"""Longer than every lease and reservation; late reads are over by then."""

KEEP_S = 2.0
"""Longest wait of an image for its prompt. The stores are small."""

POLL_S = 0.1

MAX_LATENESS_S = 5.0
"""Bound on the delay of a call's end after its deadline for a journal reader."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of a scenario: outcomes of its clients, and the first violation, if any."""

    scenario: Scenario
    violation: Violation | None
    trace: Trace
    outcomes: tuple[str, ...]


def run(scenario: Scenario, policies: PolicyClasses | None = None) -> RunResult:
    """Runs a scenario to its end, or to the first violation."""
    loop = VirtualLoop()
    loop.set_task_factory(cast(Any, task_factory))
    trace = Trace(loop.time)
    with ExitStack() as stack:
        stack.callback(loop.close)
        stack.enter_context(patched_engine_clocks(loop.time))
        stack.enter_context(product_logs_in(trace, current_name))
        stack.enter_context(patch("baton.services.router.frontend.RequestParser", ImageRequestParser))
        stack.enter_context(patch("baton.engine.media.store.KEEP_S", KEEP_S))
        active_run = _Run(scenario, policies or PolicyClasses(), trace)
        try:
            loop.run_until_complete(active_run.run_to_end())
        except Deadlock as error:
            active_run.on_violation(Violation("I7", str(error)))
        loop.run_until_complete(active_run.end())
        loop.run_until_complete(loop.shutdown_asyncgens())
    outcomes = tuple(f"{c.plan.name} {c.outcome.value if c.outcome else 'open'} {c.code}" for c in active_run.clients)
    return RunResult(scenario, active_run.violation, trace, outcomes)


class _Run:
    """Owns the cluster and its clients, and runs the phases."""

    def __init__(self, scenario: Scenario, policies: PolicyClasses, trace: Trace) -> None:
        self._scenario = scenario
        self._policies = policies
        self._trace = trace
        self._cluster: SimCluster | None = None
        self._stopped = asyncio.Event()
        self.clients: list[SimClient] = []
        self.violation: Violation | None = None

    async def run_to_end(self) -> None:
        """Runs all phases until the end or the first violation."""
        loop = asyncio.get_running_loop()
        cluster = self._cluster = SimCluster(
            self._scenario, self._policies, self._trace, self.on_violation, self._broken_rule
        )
        for plan in self._scenario.clients:
            loop.call_at(plan.at_s, self._arrive, cluster, plan)
        for fault in self._scenario.faults:
            loop.call_at(fault.at_s, cluster.inject, fault)
        loop.call_at(FAULTS_END_S, cluster.stop_faults)
        phases = loop.create_task(self._run_phases(cluster), name="phases")
        stopped = loop.create_task(self._stopped.wait(), name="stopped")
        await asyncio.wait((phases, stopped), return_when=asyncio.FIRST_COMPLETED)
        for task in (phases, stopped):
            task.cancel()
        await asyncio.wait((phases, stopped))
        if not phases.cancelled():
            phases.result()

    async def end(self) -> None:
        """Ends all processes and waits for them."""
        for client in self.clients:
            await client.wait_closed()
        if self._cluster is not None:
            await self._cluster.end()

    def on_violation(self, violation: Violation) -> None:
        """Ends the run; the first violation counts."""
        if self.violation is None:
            self.violation = violation
            self._trace.note("oracle", f"VIOLATION {violation}", violation.request_id)
        self._stopped.set()

    def _check_probes(self, probes: Sequence[SimClient]) -> None:
        """All are answered. By fits, which may be absurd, an objective on TPOT may have rows for one of them only."""
        num_finished = sum(client.outcome is ClientOutcome.FINISHED for client in probes)
        for client in probes:
            refused = client.outcome is ClientOutcome.REFUSED and client.code == Overloaded.code
            if client.outcome is not ClientOutcome.FINISHED and not (refused and num_finished and self._scenario.fits):
                raise Violation("I8", f"all is well, and yet: {client.outcome} {client.code}", client.plan.name)

    async def _run_phases(self, cluster: SimCluster) -> None:
        try:
            await self._until(PROBE_AT_S)
            probes = self._probe(cluster)
            await self._ended(PROBE_AT_S + 2 * (self._scenario.deadline_s + MAX_LATENESS_S))
            for client in self.clients:
                client.check_ended()
            if self._scenario.only_drains:
                check_only_drains(self._scenario, self.clients)
            self._check_probes(probes)
            await self._settled(cluster, PROBE_AT_S + 2 * (self._scenario.deadline_s + MAX_LATENESS_S))
            await self._until(asyncio.get_running_loop().time() + QUIET_S)
            cluster.check_idle()
            await check_store(cluster, self._scenario.deadline_s, self.clients)
            check_silence(self._scenario, self._trace)
        except Violation as violation:
            self.on_violation(violation)

    async def _until(self, at_s: float) -> None:
        """Lets virtual time pass."""
        await asyncio.sleep(at_s - asyncio.get_running_loop().time())

    async def _ended(self, deadline_s: float) -> None:
        """Waits for all clients, at most until their ends are due."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline_s):
                for client in self.clients:
                    await client.ended.wait()

    async def _settled(self, cluster: SimCluster, deadline_s: float) -> None:
        """Waits for calls that routers took over without a client, at most until their ends are due."""
        now = asyncio.get_running_loop().time
        while cluster.num_open and now() < deadline_s:
            await self._until(now() + POLL_S)

    def _arrive(self, cluster: SimCluster, plan: ClientPlan) -> SimClient:
        others = [name for name in self._scenario.routers if name != plan.router]
        client = SimClient(plan, self._trace, self.on_violation)
        self.clients.append(client)
        self._trace.note("client", f"arrives, {len(plan.prompt)} tokens, max {plan.max_tokens}", plan.name)
        client.start([partial(cluster.router, name) for name in (plan.router, *others)])
        return client

    def _broken_rule(self, sequence: RequestId, tokens: Sequence[int]) -> str:
        """The rule that the tokens break, when the sequence is a client's."""
        for client in self.clients:
            sequences = [client.call_id, *(f"{client.call_id}-{n}" for n in range(1, client.plan.num_choices))]
            if sequence in sequences:
                return client.answer.broken_rule(sequences.index(sequence), tokens)
        return ""

    def _probe(self, cluster: SimCluster) -> list[SimClient]:
        """Sends a few more clients than any router serves at once; see `_check_probes`."""
        now, prompt = asyncio.get_running_loop().time(), (0, 1, 2, 0, 1)
        images = (ImagePlan(1, 0, 2),) if self._scenario.images else ()
        plans = [
            ClientPlan(
                RequestId(f"probe{n}"),
                now,
                (*prompt, n % 3),
                6,
                n,
                routers[n % len(routers)],
                images=images if n else (),
            )
            for routers in [self._scenario.routers]
            for n in range(3)
        ]
        return [self._arrive(cluster, plan) for plan in plans]
