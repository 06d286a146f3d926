"""Minutes of mixed load under random faults, in rounds; each ends in a lull, in which nothing may be held any more.

    load -> a fault at a random moment, undone after a random time -> ... -> pause -> all answers there, no page held,
    every process in service, histories without contradiction -> count what processes hold -> load again

Faults come from a seed, one at a time: the next waits until the last one is mended, so that nobody who was accepted may
be told of an error. Kills hit only the last process of each kind: the others live all the time, or there would be
no line to measure a slope of. Everything else hits anyone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace

from chaos.census import Count, Growth, growths
from chaos.cluster import REDIS, Cluster, NotInTime
from chaos.faults import Fault, calm_book, strike
from chaos.load import Load, LoadReport
from chaos.processes import weight_of
from chaos.stage import Scene, Stage
from chaos.witness import Witness

log = logging.getLogger(__name__)

ROUND_S = 45.0
MAX_FAULT_S = 6.0
MAX_CALM_S = 6.0
PAUSE_TIMEOUT_S = 120.0
WHOLE_TIMEOUT_S = 120.0
STALL_STEP_S = 0.05
KILLS = (Fault.KILL_PREFILL, Fault.KILL_DECODE, Fault.KILL_ROUTER)
OTHERS = (
    Fault.STOP_PREFILL, Fault.STOP_DECODE, Fault.STOP_ROUTER, Fault.PART_WORKERS, Fault.PART_ROUTER_PREFILL,
    Fault.PART_ROUTER_DECODE, Fault.SLOW_LINK, Fault.FLIP_ONCE, Fault.FLIP_ALWAYS, Fault.KILL_BOOK, Fault.RESTART_BOOK,
    Fault.FULL_BOOK, Fault.SLOW_BOOK, Fault.PART_BOOK,
)  # fmt: skip


@dataclass(slots=True)
class SoakReport:
    """Everything that was measured. `problems` empty: passed."""

    seed: int
    minutes: float = 0.0
    num_rounds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    load: LoadReport = field(default_factory=LoadReport)
    growths: list[Growth] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    longest_stall_s: float = 0.0
    """Of this process, which all connections pass through: a stall is a fault that nobody drew."""

    def as_json(self) -> str:
        """All of it."""
        written = asdict(replace(self, faults=Counter(), load=replace(self.load, ends=Counter())))  # asdict breaks them
        written["faults"], written["load"]["ends"] = dict(self.faults), dict(self.load.ends)
        return json.dumps(written, indent=1)


class Soak:
    """One run. `stage`'s oracle has been taught."""

    def __init__(self, stage: Stage, seed: int, num_clients: int) -> None:
        self._stage = stage
        self._rng = random.Random(f"soak {seed}")
        self._seed = seed
        cluster = stage.cluster
        self._load = Load(stage.client, stage.oracle, lambda: _urls(cluster), num_clients)
        self.report = SoakReport(seed, load=self._load.report)

    async def run(self, minutes: float) -> SoakReport:
        """Takes that long, and the time of the last lull."""
        began_s = time.monotonic()
        self._load.start(self._seed)
        measuring = asyncio.create_task(self._measure_stalls())
        try:
            while time.monotonic() - began_s < minutes * 60:
                await self._round(time.monotonic() + ROUND_S)
                await self._lull(began_s)
        finally:
            measuring.cancel()
            await self._load.end()
        report = self.report
        report.minutes = (time.monotonic() - began_s) / 60
        report.growths = growths(report.counts)
        report.problems += [problem for growth in report.growths for problem in growth.problems]
        report.problems += report.load.problems
        return report

    async def _round(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            await asyncio.sleep(self._rng.uniform(0.5, MAX_CALM_S))  # load without any fault
            fault = self._rng.choice(KILLS) if self._rng.random() < 0.25 else self._rng.choice(OTHERS)
            self.report.faults[fault.value] += 1
            log.info("strike %s", fault.value)
            await strike(fault, self._stage, self._scene(fault))
            await asyncio.sleep(self._rng.uniform(0.2, MAX_FAULT_S))  # load under the fault
            await self._undo()

    def _scene(self, fault: Fault) -> Scene:
        names = {role: self._stage.cluster.names(role) for role in ("router", "prefill", "decode")}
        chosen = {role: known[-1] if fault in KILLS else self._rng.choice(known) for role, known in names.items()}
        return Scene([], chosen["router"], names["router"][0], chosen["prefill"], chosen["decode"])

    async def _undo(self) -> None:
        await self._stage.cluster.revive()
        await calm_book(self._stage)
        self.report.problems += self._stage.cluster.unasked_deaths()
        try:
            await self._stage.cluster.wait_in_service(WHOLE_TIMEOUT_S)
        except NotInTime as late:
            self.report.problems.append(f"round {self.report.num_rounds + 1}: {late}")
        log.info("mended")

    async def _lull(self, began_s: float) -> None:
        """Everything must come to rest; then it is counted."""
        cluster = self._stage.cluster
        self.report.num_rounds += 1
        try:
            await self._load.pause(PAUSE_TIMEOUT_S)
            await cluster.wait_in_service(WHOLE_TIMEOUT_S)
            await cluster.wait_idle(WHOLE_TIMEOUT_S)
        except (NotInTime, TimeoutError) as late:
            self.report.problems.append(f"round {self.report.num_rounds} does not come to rest: {late or 'answers'}")
        heard = self._load.heard()
        self.report.problems += await Witness(cluster.book).contradictions(heard)
        await self._count(time.monotonic() - began_s)
        self._load.go_on()

    async def _measure_stalls(self) -> None:
        """How much later than asked for this process is woken."""
        while True:
            asked_s = time.monotonic()
            await asyncio.sleep(STALL_STEP_S)
            self.report.longest_stall_s = max(self.report.longest_stall_s, time.monotonic() - asked_s - STALL_STEP_S)

    async def _count(self, at_s: float) -> None:
        cluster = self._stage.cluster
        gauges = await cluster.all_gauges()
        for name, process in cluster.processes.items():
            if process.running:
                busy = gauges[name].busy_pages if name in gauges else 0
                self.report.counts.append(Count(at_s, name, process.pid, process.weight(), busy))
        if cluster.redis.pid is not None:
            self.report.counts.append(Count(at_s, REDIS, cluster.redis.pid, weight_of(cluster.redis.pid), 0))


def _urls(cluster: Cluster) -> list[str]:
    return [cluster.processes[name].url for name in cluster.names("router")]
