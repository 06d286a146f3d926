"""G4: requests a second that meet their objectives on two cores: a prefill and a decode worker, or two that do both.

    python -m bench.system.goodput [--shape m32] [--loads 0.6 0.9 1.3] [--requests 24] [--prompt-tokens 512 1024]
        [--output-tokens 128] [--tpot-factor 2] [--gap-factor 5] [--ttft-factor 6] [--chunk-tokens 64] [--rotations 3]
        [--seed 0] [--result FILE]

Three systems (`bench.system.deployments`): split, and two colocated ones, one with chunked prompts and one without. A
block sends `--requests` requests to one of them, in an open loop with Poisson arrivals. In one rotation all deployments
get prompts of the same lengths at the same times. Pace and objectives are multiples of the split system's times with
one request at a time, measured before the first rotation. A load of 1 is the rate at which one core can compute prompts
of the mean length. TTFT may be `--ttft-factor` times that of the longest prompt alone. The two sets of objectives add a
bound on TPOT or on the largest gap, as multiples of the median gap alone. Goodput is the number of requests that met a
set, over the block's wall time; a deployment counts at its best load. The figure is the split system's goodput over
that of the better colocated one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from baton.services.cli.bench.load_generator import run_load
from baton.services.cli.bench.results.records import PlannedRequest, RequestRow
from baton.services.cli.bench.workload.arrivals import gamma_arrivals
from bench.harness.model_shapes import SHAPES
from bench.harness.probes import LoopbackProbe
from bench.harness.rotations import (
    Arm,
    Block,
    Finding,
    Remark,
    ResultFile,
    command_remark,
    make_finding,
    rotate,
    table_of,
)
from bench.harness.signals import run_command
from bench.system.deployments import (
    MIXED,
    OWN_CORES,
    SPLIT,
    SPLIT_FLAGS,
    UNCHUNKED,
    UNLIMITED_BUDGET,
    colocated_flags,
    running_clients,
)
from bench.system.load_client import LoadClient, gaps_of

NUM_ALONE = 3
"""Requests of each length that are timed one at a time."""


@dataclass(frozen=True, slots=True)
class GoodputOptions:
    """One run's flags."""

    shape: str
    dtype: str
    loads: tuple[float, ...]
    requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: int
    tpot_factor: float
    gap_factor: float
    ttft_factor: float
    chunk_tokens: int
    rotations: int
    seed: int
    result: Path | None


@dataclass(frozen=True, slots=True)
class Capacity:
    """Times of the split system with one request at a time: TTFT of a prompt of the mean and of the greatest length,
    and the gap between tokens, in seconds."""

    mean_prompt_s: float
    longest_prompt_s: float
    gap_s: float

    def rate(self, load: float) -> float:
        """Requests a second; at a load of 1 their prompts keep one core busy."""
        return load / self.mean_prompt_s

    def objectives(self, options: GoodputOptions) -> GoodputObjectives:
        """Objectives as multiples of these times."""
        return GoodputObjectives(
            ttft_s=options.ttft_factor * self.longest_prompt_s,
            tpot_s=options.tpot_factor * self.gap_s,
            gap_s=options.gap_factor * self.gap_s,
        )


class RequestLatency(NamedTuple):
    """Times of one request in seconds: TTFT, TPOT and largest gap."""

    ttft_s: float
    tpot_s: float
    largest_gap_s: float


@dataclass(frozen=True, slots=True)
class GoodputObjectives:
    """Bounds that a good request meets, in seconds."""

    ttft_s: float
    tpot_s: float
    gap_s: float

    def meets_tpot(self, outcome: RequestLatency) -> bool:
        return outcome.ttft_s <= self.ttft_s and outcome.tpot_s <= self.tpot_s

    def meets_gap(self, outcome: RequestLatency) -> bool:
        return outcome.ttft_s <= self.ttft_s and outcome.largest_gap_s <= self.gap_s


def arm_of(deployment: str, load: float) -> str:
    return f"{deployment}, load {load:g}"


def values_of(rows: Sequence[RequestRow]) -> list[float]:
    """A block's values: its wall time, then the times of every request, flat."""
    wall_s = max(row.sent_s + row.ended_s for row in rows)
    outcomes = (RequestLatency(row.ttft_s, row.tpot_s or 0.0, max(row.itls_s, default=0.0)) for row in rows)
    return [wall_s, *(value for outcome in outcomes for value in outcome)]


def goodput(block: Block, is_good: Callable[[RequestLatency], bool]) -> float:
    """Good requests a second."""
    wall_s, *flat = block.values
    outcomes = [RequestLatency(*flat[at : at + 3]) for at in range(0, len(flat), 3)]
    return sum(map(is_good, outcomes)) / wall_s


def plan_block(
    options: GoodputOptions, capacity: Capacity, draw: Callable[[int], tuple[int, ...]], load: float, turn: int
) -> list[PlannedRequest]:
    """The n-th block's requests at a load: lengths and times are equal for all deployments, tokens differ."""
    rng = random.Random(f"{options.seed} {load} {turn}")
    arrivals = gamma_arrivals(options.requests, capacity.rate(load), 1.0, rng)
    lengths = [rng.randint(*options.prompt_tokens) for _ in arrivals]
    return [
        PlannedRequest(index, at_s, draw(length), options.output_tokens)
        for index, (at_s, length) in enumerate(zip(arrivals, lengths, strict=True))
    ]


def make_arms(
    options: GoodputOptions, capacity: Capacity, clients: dict[str, LoadClient], runner: asyncio.Runner
) -> dict[str, Arm]:
    """An arm for every deployment and load."""

    def block(client: LoadClient, load: float, turns: itertools.count[int]) -> list[float]:
        plan = plan_block(options, capacity, client.draw, load, next(turns))
        return values_of(runner.run(run_load(plan, client.send, clock=time.perf_counter)))

    return {
        arm_of(name, load): partial(block, client, load, itertools.count())
        for name, client in clients.items()
        for load in options.loads
    }


def findings_of(options: GoodputOptions, objectives: GoodputObjectives, blocks: Sequence[Block]) -> list[Finding]:
    """The table."""
    findings = []
    for name in (SPLIT, MIXED, UNCHUNKED):
        arms = [arm_of(name, load) for load in options.loads]
        findings.append(
            make_finding(
                f"{name}: answers, good or not", "requests/s", blocks, arms, partial(_best, is_good=_is_answered)
            )
        )
    for words, is_good in (("TPOT", objectives.meets_tpot), ("largest gap", objectives.meets_gap)):
        for name in (SPLIT, MIXED, UNCHUNKED):
            arms = [arm_of(name, load) for load in options.loads]
            best = partial(_best, is_good=is_good)
            findings.append(make_finding(f"{name}: goodput by {words}", "requests/s", blocks, arms, best))
        arms = [arm_of(name, load) for name in (SPLIT, MIXED, UNCHUNKED) for load in options.loads]
        ratio = partial(_ratio, num_loads=len(options.loads), is_good=is_good)
        findings.append(make_finding(f"split / best colocated: goodput by {words}", "", blocks, arms, ratio))
    return findings


def _is_answered(outcome: RequestLatency) -> bool:
    return True


def _best(group: tuple[Block, ...], *, is_good: Callable[[RequestLatency], bool]) -> float:
    return max(goodput(block, is_good) for block in group)


def _ratio(group: tuple[Block, ...], *, num_loads: int, is_good: Callable[[RequestLatency], bool]) -> float:
    """Ratio of goodputs at the best loads. A colocated goodput of 0 counts as one good request in its block."""
    split, colocated = group[:num_loads], group[num_loads:]
    least = min(1.0 / block.values[0] for block in colocated)
    return _best(split, is_good=is_good) / max(_best(colocated, is_good=is_good), least)


def capacity_of(options: GoodputOptions, client: LoadClient, runner: asyncio.Runner) -> Capacity:
    """Times requests one at a time. Raises `RuntimeError` if one fails."""
    shortest, longest = options.prompt_tokens
    mean, most = (
        [runner.run(client.ask(num_tokens, options.output_tokens)) for _ in range(NUM_ALONE)]
        for num_tokens in ((shortest + longest) // 2, longest)
    )
    return Capacity(
        mean_prompt_s=statistics.median(answer.deliveries[0].at_s for answer in mean),
        longest_prompt_s=statistics.median(answer.deliveries[0].at_s for answer in most),
        gap_s=statistics.median(gap for answer in (*mean, *most) for gap in gaps_of(answer)),
    )


def remarks_of(options: GoodputOptions, capacity: Capacity) -> list[Remark]:
    """Remarks on the system, its load and its objectives."""
    objectives = capacity.objectives(options)
    return [
        command_remark("bench.system.goodput"),
        Remark("system", f"baton up, {options.shape}, {options.dtype}, two workers of one thread, cores 0 and 1"),
        Remark("load", f"a load of 1 is {capacity.rate(1.0):.2f} requests/s"),
        Remark(
            "objectives",
            f"first token within {objectives.ttft_s:.2f} s, and TPOT within {1e3 * objectives.tpot_s:.1f} ms "
            f"or every gap within {1e3 * objectives.gap_s:.1f} ms",
        ),
    ]


def run(options: GoodputOptions, console: Console) -> list[Finding]:
    """Runs all rotations. Raises `RuntimeError` if a request fails."""
    systems = {
        SPLIT: (*SPLIT_FLAGS, OWN_CORES),
        MIXED: (*colocated_flags(options.chunk_tokens), OWN_CORES),
        UNCHUNKED: (*colocated_flags(UNLIMITED_BUDGET), OWN_CORES),
    }
    with running_clients(systems, options.shape, options.dtype, options.seed, console) as (runner, clients):
        with console.status("one request at a time"):
            for client in clients.values():
                runner.run(client.ask(options.prompt_tokens[1], 2))
            capacity = capacity_of(options, clients[SPLIT], runner)
        remarks = remarks_of(options, capacity)
        for remark in remarks:
            console.print(f"{remark.name}: {remark.text}", markup=False, highlight=False)
        found = partial(findings_of, options, capacity.objectives(options))
        arms, probe = make_arms(options, capacity, clients, runner), LoopbackProbe()
        blocks = rotate(
            arms,
            lambda _: probe(),
            num_rotations=options.rotations,
            seed=options.seed,
            console=console,
            on_rotation=ResultFile(options.result, "goodput", options.rotations, found, remarks).write,
        )
    return found(blocks)


def parse(arguments: Sequence[str] | None = None) -> GoodputOptions:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="m32")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.6, 0.9, 1.3], help="1: one core's prompts")
    parser.add_argument("--requests", type=int, default=24, help="of a block")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[512, 1024], help="shortest and longest")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--tpot-factor", type=float, default=2.0, help="times the gap of a request that is alone")
    parser.add_argument("--gap-factor", type=float, default=5.0, help="the same for the largest gap")
    parser.add_argument("--ttft-factor", type=float, default=6.0, help="times the longest prompt alone")
    parser.add_argument("--chunk-tokens", type=int, default=64, help="a step's token budget, in mixed chunks")
    parser.add_argument("--rotations", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    flags: dict[str, Any] = vars(parser.parse_args(arguments))
    return GoodputOptions(**{**flags, "loads": tuple(flags["loads"]), "prompt_tokens": tuple(flags["prompt_tokens"])})


def main() -> None:
    """Command line."""
    Console().print(table_of(run(parse(), Console(stderr=True))))


if __name__ == "__main__":
    run_command(main)
