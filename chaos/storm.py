"""Kills of processes at a rate, under mixed load, in rounds of a minute; after each, nothing may be held.

Kills hit any routers and workers, one or several in the same moment, all of a role too: in service, while they drain,
and again while they start. The next ones wait until every process is in service, so the rate is an upper bound: the
report has what was reached, and what the kills met.
"""

from __future__ import annotations

import asyncio
import enum
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace

from chaos.checks.store_watcher import StoreWatcher
from chaos.checks.tenant_shares import wrong_labels
from chaos.harness import ChaosHarness, RouterUrl
from chaos.load import MixedLoad, MixedLoadReport
from chaos.testbed.cluster import WaitTimeout

log = logging.getLogger(__name__)

ROUND_S = 60.0
RECOVERY_TIMEOUT_S = 120.0
LONGEST_DRAIN_S, LONGEST_START_S = 0.4, 0.4
"""Bounds of the random times after which a process is killed that drains or starts."""


class KilledState(enum.Enum):
    """What a kill met."""

    IN_SERVICE = "in service"
    DRAINING = "draining"
    STARTING = "starting"  # a worker that is not registered, a router that is not ready


@dataclass(frozen=True, slots=True)
class StormSettings:
    """`kills_per_minute`: at most. `max_at_once`: most processes that die in one moment. `rest_s`: load without kills
    before each round. `drain_share`: of the processes that drain before they are killed. `start_share`: of the
    restarted ones that are killed again while they start. `max_kills`: after which the storm ends, with its round.
    """

    minutes: float
    kills_per_minute: float
    rest_s: float
    max_at_once: int = 1
    drain_share: float = 0.0
    start_share: float = 0.0
    max_kills: int | None = None


@dataclass(slots=True)
class StormReport:
    """Results of a storm. `problems` empty: passed.

    `kills`: by role. `met`: by `KilledState`. `num_left`: processes that had ended before they were killed, mostly
    drained ones; they are no kills. `num_in_flight`: requests of the clients in the moments of the kills.
    """

    seed: int
    minutes: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)
    num_left: int = 0
    num_in_flight: int = 0
    load: MixedLoadReport = field(default_factory=MixedLoadReport)
    problems: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """Counts, a line each."""
        num_kills, load = self.kills.total(), self.load
        kills = ", ".join(f"{role} {num}" for role, num in sorted(self.kills.items()))
        met = ", ".join(f"{state.value} {self.met[state.value]}" for state in KilledState)
        in_flight = self.num_in_flight / max(1, num_kills)
        ends = ", ".join(f"{end} {num}" for end, num in load.ends.most_common())
        return "\n".join(
            (
                f"- {self.minutes:.1f} minutes, seed {self.seed}, {num_kills} kills: {kills}",
                f"- they met: {met}; {self.num_left} left before; {in_flight:.1f} requests in flight at a kill",
                f"- {sum(load.ends.values())} answers, {load.num_problems} wrong, {load.num_lost} lost; ends: {ends}",
                f"- tenants: {load.shares.summary() or 'one'}",
                f"- {load.num_resumes} resumptions, {load.num_dropped} unstored calls sent again, "
                f"longest silence {load.longest_gap_s:.1f} s, "
                f"{len(self.problems)} problems",
            )
        )

    def as_json(self) -> str:
        """All fields, for JSON."""
        counters = {"kills": self.kills, "met": self.met}
        load = replace(self.load, ends=Counter())  # asdict breaks counters
        written = asdict(replace(self, kills=Counter(), met=Counter(), load=load))
        written["load"]["ends"] = dict(self.load.ends)
        return json.dumps(written | {name: dict(counter) for name, counter in counters.items()}, indent=1)


async def run_storm(
    harness: ChaosHarness,
    seed: int,
    num_clients: int,
    settings: StormSettings,
    on_round: Callable[[StormReport], object] = lambda report: None,
) -> StormReport:
    """Kills under the load of `num_clients`, in rounds; `on_round` gets the report after each."""
    cluster = harness.cluster
    load = MixedLoad(
        harness.client,
        harness.oracle,
        lambda: [RouterUrl(cluster, name) for name in cluster.names("router")],
        num_clients,
        cluster.shape.tenants,
    )
    report = StormReport(seed, load=load.report)
    began_s = time.monotonic()
    storm = _StormRun(harness, settings, load, report, random.Random(f"storm {seed}"))
    load.start(seed)
    try:
        while not storm.enough and (left_s := began_s + 60 * settings.minutes - time.monotonic()) > 0:
            await asyncio.sleep(settings.rest_s)
            await storm.kill_for(min(ROUND_S, left_s))
            report.minutes = (time.monotonic() - began_s) / 60
            await _come_to_rest(harness, load, report)
            on_round(report)
    finally:
        await load.end()
    report.minutes = (time.monotonic() - began_s) / 60
    report.problems += [*load.report.problems, *load.report.shares.problems(cluster.shape.tenants)]
    return report


class _StormRun:
    """The kills of one storm."""

    def __init__(
        self, harness: ChaosHarness, settings: StormSettings, load: MixedLoad, report: StormReport, rng: random.Random
    ) -> None:
        self._cluster = harness.cluster
        self._settings = settings
        self._load = load
        self._report = report
        self._rng = rng

    @property
    def enough(self) -> bool:
        """True once the wanted number of kills is reached."""
        return self._settings.max_kills is not None and self._report.kills.total() >= self._settings.max_kills

    async def kill_for(self, duration_s: float) -> None:
        """Kills again and again for a time; each time all processes come into service before."""
        cluster, settings, rng = self._cluster, self._settings, self._rng
        until_s = time.monotonic() + duration_s
        while time.monotonic() < until_s and not self.enough:
            names = rng.sample(cluster.names(), rng.randint(1, settings.max_at_once))
            began_s, num_before = time.monotonic(), self._report.kills.total()
            await self._kill_in_service(names)
            await self._recover()
            try:
                await cluster.wait_in_service(RECOVERY_TIMEOUT_S)
            except WaitTimeout as late:
                self._report.problems.append(f"after a kill of {', '.join(names)}: {late}")
            wanted_s = 60 * (self._report.kills.total() - num_before) / settings.kills_per_minute
            await asyncio.sleep(max(0.0, began_s + rng.uniform(0.5, 1.5) * wanted_s - time.monotonic()))  # the rate

    async def _kill_in_service(self, names: Collection[str]) -> None:
        """Kills processes that are in service, some of them while they drain."""
        drained = [name for name in names if self._rng.random() < self._settings.drain_share]
        others = [name for name in names if name not in drained]
        await asyncio.gather(*(self._kill(name, KilledState.IN_SERVICE) for name in others))
        for name in drained:
            self._cluster.drain(name)
        if drained:
            await asyncio.sleep(self._rng.uniform(0.0, LONGEST_DRAIN_S))
            await asyncio.gather(*(self._kill(name, KilledState.DRAINING) for name in drained))

    async def _recover(self) -> None:
        """Restarts what is dead; some processes are killed again while they start."""
        while True:
            restarted = await self._cluster.recover()
            self._report.problems += self._cluster.unexpected_exits()
            again = [name for name in restarted if self._rng.random() < self._settings.start_share]
            if not again:
                return
            await asyncio.sleep(self._rng.uniform(0.0, LONGEST_START_S))
            in_service = [await self._cluster.in_service(name) for name in again]
            states = [KilledState.IN_SERVICE if found else KilledState.STARTING for found in in_service]
            await asyncio.gather(*map(self._kill, again, states))

    async def _kill(self, name: str, state: KilledState) -> None:
        num_in_flight = self._load.num_in_flight
        if not await self._cluster.kill(name):
            if state is not KilledState.STARTING:  # a worker that finds no store may end while it starts
                self._report.problems += self._cluster.bad_exits(name)
            self._report.num_left += 1
            return
        self._report.kills[self._cluster.shape.names[name]] += 1
        self._report.met[state.value] += 1
        self._report.num_in_flight += num_in_flight


async def _come_to_rest(harness: ChaosHarness, load: MixedLoad, report: StormReport) -> None:
    """Waits until nothing is held, and compares the store with the answers."""
    cluster = harness.cluster
    try:
        await load.pause(RECOVERY_TIMEOUT_S)
        await cluster.wait_idle(RECOVERY_TIMEOUT_S)
    except (WaitTimeout, TimeoutError) as late:
        report.problems.append(f"does not come to rest: {late or 'answers'}")
    report.problems += await StoreWatcher(cluster.store).contradictions(load.take_transcripts())
    if cluster.shape.tenants:
        report.problems += wrong_labels(await cluster.all_metrics("router"), cluster.shape.tenants)
    log.info("%s", report.summary())
    load.resume()
