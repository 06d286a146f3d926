"""Mixed load under random faults, in rounds; each ends in a quiet period, in which nothing may be held.

    load -> a fault at a random moment, undone after a random time -> ... -> pause -> all answers complete, no page
    held, every process in service, consistent histories -> count the processes' resources -> load again

Faults come from a seed, one at a time: the next waits until the last one is undone, so an admitted request may not end
with an error. Kills hit only the last process of each kind: the others live for the whole run, so that their growth can
be measured. Other faults hit any process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace

from chaos.checks.resource_monitor import ResourceGrowth, ResourceSample, resource_growths
from chaos.checks.store_watcher import StoreWatcher
from chaos.checks.tenant_shares import wrong_labels
from chaos.faults import ClusterFault, inject_fault, restore_redis_memory
from chaos.harness import ChaosHarness, PhaseContext, RouterUrl
from chaos.load import MixedLoad, MixedLoadReport
from chaos.testbed.cluster import REDIS, ChaosCluster, WaitTimeout
from chaos.testbed.process import resources_of

log = logging.getLogger(__name__)

ROUND_S = 45.0
MAX_FAULT_S = 6.0
MAX_PAUSE_S = 6.0
PAUSE_TIMEOUT_S = 120.0
RECOVERY_TIMEOUT_S = 120.0
STALL_STEP_S = 0.05
KILL_FAULTS = (ClusterFault.KILL_PREFILL, ClusterFault.KILL_DECODE, ClusterFault.KILL_ROUTER)
OTHER_FAULTS = (
    ClusterFault.STOP_PREFILL, ClusterFault.STOP_DECODE, ClusterFault.STOP_ROUTER, ClusterFault.PARTITION_WORKERS,
    ClusterFault.PARTITION_ROUTER_PREFILL, ClusterFault.PARTITION_ROUTER_DECODE, ClusterFault.SLOW_LINK,
    ClusterFault.FLIP_ONCE, ClusterFault.FLIP_ALWAYS, ClusterFault.KILL_REDIS, ClusterFault.RESTART_REDIS,
    ClusterFault.FULL_REDIS, ClusterFault.SLOW_REDIS, ClusterFault.PARTITION_REDIS,
)  # fmt: skip
STORE_FAULTS = (
    ClusterFault.KILL_REDIS, ClusterFault.RESTART_REDIS, ClusterFault.EMPTY_REDIS, ClusterFault.PARTITION_REDIS,
    ClusterFault.FULL_REDIS,
)  # fmt: skip
PAIR_SHARE = 0.6
MAX_PAIR_GAP_S = 3.0


@dataclass(slots=True)
class SoakReport:
    """Results of a soak. `problems` empty: passed."""

    seed: int
    minutes: float = 0.0
    num_rounds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    load: MixedLoadReport = field(default_factory=MixedLoadReport)
    growths: list[ResourceGrowth] = field(default_factory=list)
    samples: list[ResourceSample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    longest_stall_s: float = 0.0
    """Longest stall of this process, which all connections pass through."""

    def as_json(self) -> str:
        """All fields, for JSON."""
        written = asdict(replace(self, faults=Counter(), load=replace(self.load, ends=Counter())))  # asdict breaks them
        written["faults"], written["load"]["ends"] = dict(self.faults), dict(self.load.ends)
        return json.dumps(written, indent=1)


class Soak:
    """One soak. The oracle of `harness` knows all answers."""

    def __init__(self, harness: ChaosHarness, seed: int, num_clients: int, *, pairs: bool = False) -> None:
        """`pairs`: most faults of a process or a link come with one of the store."""
        self._harness = harness
        self._pairs = pairs
        self._rng = random.Random(f"soak {seed}")
        self._seed = seed
        cluster = harness.cluster
        tenants = cluster.shape.tenants
        self._load = MixedLoad(harness.client, harness.oracle, lambda: _urls(cluster), num_clients, tenants)
        self.report = SoakReport(seed, load=self._load.report)

    async def run(self, minutes: float) -> SoakReport:
        """Runs for `minutes`, plus the last quiet period."""
        began_s = time.monotonic()
        self._load.start(self._seed)
        measuring = asyncio.create_task(self._measure_stalls())
        try:
            while time.monotonic() - began_s < minutes * 60:
                await self._round(time.monotonic() + ROUND_S)
                await self._quiesce(began_s)
        finally:
            measuring.cancel()
            await self._load.end()
        report = self.report
        report.minutes = (time.monotonic() - began_s) / 60
        report.growths = resource_growths(report.samples)
        report.problems += [problem for growth in report.growths for problem in growth.problems]
        report.problems += [*report.load.problems, *report.load.shares.problems(self._harness.cluster.shape.tenants)]
        return report

    async def _round(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            await asyncio.sleep(self._rng.uniform(0.5, MAX_PAUSE_S))  # load without any fault
            fault = self._rng.choice(KILL_FAULTS) if self._rng.random() < 0.25 else self._rng.choice(OTHER_FAULTS)
            await self._inject(fault)
            if self._pairs and not fault.is_redis_fault and self._rng.random() < PAIR_SHARE:
                await asyncio.sleep(self._rng.uniform(0.0, MAX_PAIR_GAP_S))  # the first fault alone
                second = self._rng.choice(STORE_FAULTS)
                if fault is ClusterFault.KILL_ROUTER and second.loses_store:
                    self._load.allow_loss()
                await self._inject(second)
            await asyncio.sleep(self._rng.uniform(0.2, MAX_FAULT_S))  # load under the fault
            await self._recover()

    async def _inject(self, fault: ClusterFault) -> None:
        self.report.faults[fault.value] += 1
        log.info("fault %s", fault.value)
        await inject_fault(fault, self._harness, self._context(fault))

    def _context(self, fault: ClusterFault) -> PhaseContext:
        names = {role: self._harness.cluster.names(role) for role in ("router", "prefill", "decode")}
        chosen = {role: known[-1] if fault in KILL_FAULTS else self._rng.choice(known) for role, known in names.items()}
        return PhaseContext([], chosen["router"], names["router"][0], chosen["prefill"], chosen["decode"])

    async def _recover(self) -> None:
        await self._harness.cluster.recover()
        await restore_redis_memory(self._harness)
        self.report.problems += self._harness.cluster.unexpected_exits()
        try:
            await self._harness.cluster.wait_in_service(RECOVERY_TIMEOUT_S)
        except WaitTimeout as late:
            self.report.problems.append(f"round {self.report.num_rounds + 1}: {late}")
        log.info("recovered")

    async def _quiesce(self, began_s: float) -> None:
        """Waits until nothing is held, checks, and counts resources."""
        cluster = self._harness.cluster
        self.report.num_rounds += 1
        try:
            await self._load.pause(PAUSE_TIMEOUT_S)
            await cluster.wait_in_service(RECOVERY_TIMEOUT_S)
            await cluster.wait_idle(RECOVERY_TIMEOUT_S)
        except (WaitTimeout, TimeoutError) as late:
            self.report.problems.append(f"round {self.report.num_rounds} does not come to rest: {late or 'answers'}")
        transcripts = self._load.take_transcripts()
        self.report.problems += await StoreWatcher(cluster.store).contradictions(transcripts)
        if cluster.shape.tenants:
            self.report.problems += wrong_labels(await cluster.all_metrics("router"), cluster.shape.tenants)
        await self._sample_resources(time.monotonic() - began_s)
        self._load.resume()

    async def _measure_stalls(self) -> None:
        """Records how late this process wakes."""
        while True:
            asked_s = time.monotonic()
            await asyncio.sleep(STALL_STEP_S)
            self.report.longest_stall_s = max(self.report.longest_stall_s, time.monotonic() - asked_s - STALL_STEP_S)

    async def _sample_resources(self, at_s: float) -> None:
        cluster = self._harness.cluster
        metrics = await cluster.all_metrics()
        for name, process in cluster.processes.items():
            if process.running:
                busy = metrics[name].busy_pages if name in metrics else 0
                self.report.samples.append(ResourceSample(at_s, name, process.pid, process.resources(), busy))
        if cluster.redis.pid is not None:
            self.report.samples.append(
                ResourceSample(at_s, REDIS, cluster.redis.pid, resources_of(cluster.redis.pid), 0)
            )


def _urls(cluster: ChaosCluster) -> list[RouterUrl]:
    return [RouterUrl(cluster, name) for name in cluster.names("router")]
