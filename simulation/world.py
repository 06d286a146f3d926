"""A world: a whole cluster with its clients in one virtual loop, from a scenario to a verdict.

1. processes start and find each other           4. everybody's deadline passes (I8)
2. clients arrive, faults happen                 5. it is quiet: nothing is left behind (I5), the book agrees (I9)
3. all is calm again: new clients must be served
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from baton.domain.ids import RequestId
from simulation.client import Client, Outcome
from simulation.clock import Stalled, VirtualLoop, engines_on
from simulation.cluster import Cluster
from simulation.oracle import Violation
from simulation.parts import Parts
from simulation.process import current_name, task_factory
from simulation.reckoning import check_book, check_gently_treated
from simulation.scenario import CALM_S, ClientPlan, Scenario
from simulation.trace import Trace, product_logs_in

PROBE_S = CALM_S + 3.4
"""By now links are up again, suspicion is over, and dead workers are forgotten."""

QUIET_S = 3.5
"""Longer than every lease, promise and last word; reads that came late are over by now."""

LATENESS_S = 5.0
"""How much later than its deadline a call may end for somebody who follows its journal."""


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
    """Owns the cluster and its clients, and tells the story."""

    def __init__(self, scenario: Scenario, parts: Parts, trace: Trace) -> None:
        self._scenario = scenario
        self._parts = parts
        self._trace = trace
        self._cluster: Cluster | None = None
        self._stopped = asyncio.Event()
        self.clients: list[Client] = []
        self.violation: Violation | None = None

    async def live(self) -> None:
        """Everything, until the end or the first violation."""
        loop = asyncio.get_running_loop()
        cluster = self._cluster = Cluster(self._scenario, self._parts, self._trace, self.violated, self._breach)
        for plan in self._scenario.clients:
            loop.call_at(plan.at_s, self._arrive, cluster, plan)
        for fault in self._scenario.faults:
            loop.call_at(fault.at_s, cluster.strike, fault)
        loop.call_at(CALM_S, cluster.calm)
        story = loop.create_task(self._story(cluster), name="story")
        stopped = loop.create_task(self._stopped.wait(), name="stopped")
        await asyncio.wait((story, stopped), return_when=asyncio.FIRST_COMPLETED)
        for task in (story, stopped):
            task.cancel()
        await asyncio.wait((story, stopped))
        if not story.cancelled():
            story.result()

    async def end(self) -> None:
        """Every process ends, and is waited for."""
        for client in self.clients:
            await client.gone()
        if self._cluster is not None:
            await self._cluster.end()

    def violated(self, violation: Violation) -> None:
        """The run is over; the first violation counts."""
        if self.violation is None:
            self.violation = violation
            self._trace.note("oracle", f"VIOLATION {violation}", violation.subject)
        self._stopped.set()

    async def _story(self, cluster: Cluster) -> None:
        try:
            await self._until(PROBE_S)
            probes = self._probe(cluster)
            await self._ended(PROBE_S + 2 * (self._scenario.deadline_s + LATENESS_S))
            for client in self.clients:
                client.must_have_ended()
            if self._scenario.is_gentle:
                check_gently_treated(self._scenario, self.clients)
            for client in probes:
                if client.outcome is not Outcome.FINISHED:
                    raise Violation("I8", f"all is well, and yet: {client.outcome} {client.code}", client.plan.name)
            await self._until(asyncio.get_running_loop().time() + QUIET_S)
            cluster.check_idle()
            await check_book(cluster, self._scenario.deadline_s, self.clients)
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

    def _arrive(self, cluster: Cluster, plan: ClientPlan) -> Client:
        others = [name for name in self._scenario.routers if name != plan.router]
        client = Client(plan, self._trace, self.violated)
        self.clients.append(client)
        self._trace.note("client", f"arrives, {len(plan.prompt)} tokens, max {plan.max_tokens}", plan.name)
        client.arrive([partial(cluster.router, name) for name in (plan.router, *others)])
        return client

    def _breach(self, job: RequestId, said: Sequence[int]) -> str:
        """The rule that the tokens break, when the job is a client's."""
        for client in self.clients:
            jobs = [client.call_id, *(f"{client.call_id}-{n}" for n in range(1, client.plan.num_choices))]
            if job in jobs:
                return client.answer.breach(jobs.index(job), said)
        return ""

    def _probe(self, cluster: Cluster) -> list[Client]:
        """A few clients more than can be served at once anywhere; all of them must be."""
        now, prompt = asyncio.get_running_loop().time(), (0, 1, 2, 0, 1)
        plans = [
            ClientPlan(RequestId(f"probe{n}"), now, (*prompt, n % 3), 6, n, routers[n % len(routers)])
            for routers in [self._scenario.routers]
            for n in range(3)
        ]
        return [self._arrive(cluster, plan) for plan in plans]
