"""Kills of processes at a rate, under mixed load, in rounds of a minute; after each, nothing may be held.

Kills hit any routers and workers, one or several in the same moment, all of a role too. The next ones wait until every
process is in service again, so the rate is an upper bound: the report has what was reached.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from chaos.checks.store_watcher import StoreWatcher
from chaos.harness import ChaosHarness, RouterUrl
from chaos.load import MixedLoad, MixedLoadReport
from chaos.testbed.cluster import WaitTimeout

log = logging.getLogger(__name__)

ROUND_S = 60.0
RECOVERY_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class StormSettings:
    """`kills_per_minute`: at most. `max_at_once`: most processes that die in one moment. `rest_s`: load without kills
    before each round.
    """

    minutes: float
    kills_per_minute: float
    rest_s: float
    max_at_once: int = 1


@dataclass(slots=True)
class StormReport:
    """Results of a storm. `problems` empty: passed."""

    seed: int
    minutes: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    load: MixedLoadReport = field(default_factory=MixedLoadReport)
    problems: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """Counts, a line each."""
        num_kills, load = sum(self.kills.values()), self.load
        kills = ", ".join(f"{role} {num}" for role, num in sorted(self.kills.items()))
        ends = ", ".join(f"{end} {num}" for end, num in load.ends.most_common())
        return "\n".join(
            (
                f"- {self.minutes:.1f} minutes, seed {self.seed}, {num_kills} kills: {kills}",
                f"- {sum(load.ends.values())} answers, {load.num_problems} wrong, {load.num_lost} lost; ends: {ends}",
                f"- {load.num_resumes} resumptions, {load.num_dropped} unstored calls sent again, "
                f"longest silence {load.longest_gap_s:.1f} s, "
                f"{len(self.problems)} problems",
            )
        )


async def run_storm(harness: ChaosHarness, seed: int, num_clients: int, settings: StormSettings) -> StormReport:
    """Kills under the load of `num_clients`, in rounds."""
    cluster = harness.cluster
    load = MixedLoad(
        harness.client,
        harness.oracle,
        lambda: [RouterUrl(cluster, name) for name in cluster.names("router")],
        num_clients,
    )
    report = StormReport(seed, load=load.report)
    rng, began_s = random.Random(f"storm {seed}"), time.monotonic()
    load.start(seed)
    try:
        while (left_s := began_s + 60 * settings.minutes - time.monotonic()) > 0:
            await asyncio.sleep(settings.rest_s)
            await _kill_for(min(ROUND_S, left_s), settings, harness, rng, report)
            await _come_to_rest(harness, load, report)
    finally:
        await load.end()
    report.minutes = (time.monotonic() - began_s) / 60
    report.problems += load.report.problems
    return report


async def _kill_for(
    duration_s: float, settings: StormSettings, harness: ChaosHarness, rng: random.Random, report: StormReport
) -> None:
    cluster, until_s = harness.cluster, time.monotonic() + duration_s
    while time.monotonic() < until_s:
        names = rng.sample(cluster.names(), rng.randint(1, settings.max_at_once))
        next_s = time.monotonic() + rng.uniform(0.5, 1.5) * 60 * len(names) / settings.kills_per_minute
        await asyncio.gather(*map(cluster.kill, names))
        report.kills.update(cluster.shape.names[name] for name in names)
        await cluster.recover()
        report.problems += cluster.unexpected_exits()
        try:
            await cluster.wait_in_service(RECOVERY_TIMEOUT_S)
        except WaitTimeout as late:
            report.problems.append(f"after a kill of {', '.join(names)}: {late}")
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))  # the rate


async def _come_to_rest(harness: ChaosHarness, load: MixedLoad, report: StormReport) -> None:
    """Waits until nothing is held, and compares the store with the answers."""
    cluster = harness.cluster
    try:
        await load.pause(RECOVERY_TIMEOUT_S)
        await cluster.wait_idle(RECOVERY_TIMEOUT_S)
    except (WaitTimeout, TimeoutError) as late:
        report.problems.append(f"does not come to rest: {late or 'answers'}")
    report.problems += await StoreWatcher(cluster.store).contradictions(load.take_transcripts())
    log.info("%s", report.summary())
    load.resume()
