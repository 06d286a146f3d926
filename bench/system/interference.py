"""G3: growth of the gaps between tokens while long prompts arrive: split, mixed chunks, unchunked.

    python -m bench.system.interference [--shape m32] [--streams 4] [--prompts 6] [--prompt-tokens 1024 2048]
        [--load 1.3] [--budgets 16 32 64] [--rotations 10] [--seed 0] [--result FILE]

Systems of one random model run, each with two workers of one thread on the same two cores (`bench.system.deployments`):
one split, one split whose idle workers lend their cores (the default of `baton up`), one that computes every prompt in
one step, and one for each of `--budgets`, the prompt tokens of a step beside its rows. A block runs `--streams` answers
at once, alone or while `--prompts` prompts arrive at even times. Their rate is fixed before the first rotation:
`--load` times the rate at which one core computes prompts of the mean length, timed one at a time on the split system.
All deployments get prompts of the same lengths at the same times. A block ends when the last prompt has its second
token.

The figure is the 99th percentile of the gaps beside prompts over that of the same rotation's gaps alone, on the same
split system or on the unchunked colocated one: without prompts the budget does not matter. Where cores are lent, decode
alone uses both, so its ratio holds that gain, too; the goal's figure is that of workers with cores of their own. The
price of even gaps is the prompts' TTFT. With a load above 1 prompts queue in the split system, which computes them on
one core instead of two. A lighter load would hide the unchunked system's stalls: a prompt takes as long as a hundred
decode steps, so less than one gap in a hundred would be long.
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
from typing import Any

from rich.console import Console

from baton.services.cli.bench.load_generator import run_load
from baton.services.cli.bench.results.distribution import percentile
from baton.services.cli.bench.results.records import PlannedRequest
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
from bench.system.load_client import LoadClient

COLOCATED = "colocated"
LENT = "split, lent cores"
STREAM_PROMPT_TOKENS = 64
STREAM_TOKENS = 2000
"""Tokens of one answer of a stream; more than a block needs."""

PROMPT_OUTPUT_TOKENS = 2
"""One token would need no handoff. When the second arrives, rows that waited for the prompt have theirs."""

NUM_TIMED_ALONE = 3


@dataclass(frozen=True, slots=True)
class InterferenceOptions:
    """One run's flags."""

    shape: str
    dtype: str
    streams: int
    prompts: int
    prompt_tokens: tuple[int, int]
    load: float
    alone_s: float
    budgets: tuple[int, ...]
    rotations: int
    seed: int
    result: Path | None

    @property
    def deployments(self) -> tuple[str, ...]:
        """Names, in the order of the table."""
        return (SPLIT, LENT, UNCHUNKED, *map(mixed, self.budgets))

    @property
    def systems(self) -> dict[str, tuple[str, ...]]:
        """Flags of `baton up`. A worker's budget includes its rows, so the streams are added to it."""
        chunked = {mixed(budget): (*colocated_flags(budget + self.streams), OWN_CORES) for budget in self.budgets}
        split = {SPLIT: (*SPLIT_FLAGS, OWN_CORES), LENT: SPLIT_FLAGS}
        return {**split, UNCHUNKED: (*colocated_flags(UNLIMITED_BUDGET), OWN_CORES), **chunked}


def mixed(budget: int) -> str:
    return f"{MIXED} of {budget}"


def alone(system: str) -> str:
    """`system`: `SPLIT`, `LENT` or `COLOCATED`."""
    return f"{system}: alone"


def beside(deployment: str) -> str:
    return f"{deployment}: beside prompts"


async def measure_alone(client: LoadClient, options: InterferenceOptions) -> list[float]:
    """Gaps of the streams during `alone_s` seconds."""
    async with client.running_streams(options.streams, STREAM_PROMPT_TOKENS, STREAM_TOKENS) as streams:
        began_s = time.perf_counter()
        await asyncio.sleep(options.alone_s)
        return [gap for stream in streams for gap in stream.gaps(began_s, time.perf_counter())]


async def measure_beside_prompts(
    client: LoadClient, options: InterferenceOptions, plan: Sequence[PlannedRequest]
) -> list[float]:
    """TTFT of the planned prompts, then gaps of the streams from the first prompt to the last."""
    async with client.running_streams(options.streams, STREAM_PROMPT_TOKENS, STREAM_TOKENS) as streams:
        began_s = time.perf_counter()
        rows = await run_load(plan, client.send, clock=time.perf_counter)
        gaps = [gap for stream in streams for gap in stream.gaps(began_s, time.perf_counter())]
    return [*(row.ttft_s for row in rows), *gaps]


def plan_block(
    options: InterferenceOptions, prompt_gap_s: float, draw: Callable[[int], tuple[int, ...]], turn: int
) -> list[PlannedRequest]:
    """The n-th block's prompts: lengths and times are equal for all deployments, tokens differ."""
    rng = random.Random(f"{options.seed} {turn}")
    lengths = [rng.randint(*options.prompt_tokens) for _ in range(options.prompts)]
    return [
        PlannedRequest(index, index * prompt_gap_s, draw(length), PROMPT_OUTPUT_TOKENS)
        for index, length in enumerate(lengths)
    ]


def make_arms(
    options: InterferenceOptions, prompt_gap_s: float, clients: dict[str, LoadClient], runner: asyncio.Runner
) -> dict[str, Arm]:
    """Arms alone return gaps in seconds; arms beside prompts return the prompts' TTFT first, then gaps."""

    def without(client: LoadClient) -> list[float]:
        return runner.run(measure_alone(client, options))

    def among(client: LoadClient, turns: itertools.count[int]) -> list[float]:
        return runner.run(
            measure_beside_prompts(client, options, plan_block(options, prompt_gap_s, client.draw, next(turns)))
        )

    arms: dict[str, Arm] = {
        alone(SPLIT): partial(without, clients[SPLIT]),
        alone(LENT): partial(without, clients[LENT]),
        alone(COLOCATED): partial(without, clients[UNCHUNKED]),
    }
    return arms | {beside(name): partial(among, clients[name], itertools.count()) for name in options.deployments}


def findings_of(options: InterferenceOptions, blocks: Sequence[Block]) -> list[Finding]:
    """The table."""

    def gaps(block: Block) -> tuple[float, ...]:
        return block.values if block.arm.endswith("alone") else block.values[options.prompts :]

    def gap_ms(group: tuple[Block, ...], percent: float) -> float:
        return 1e3 * _percentile(gaps(group[0]), percent)

    def gap_ratio(group: tuple[Block, ...]) -> float:
        return _percentile(gaps(group[0]), 99) / _percentile(gaps(group[1]), 99)

    def first_token_s(block: Block) -> float:
        return statistics.median(block.values[: options.prompts])

    findings = []
    for system in (SPLIT, LENT, COLOCATED):
        own = (alone(system),)
        findings += [
            make_finding(f"{own[0]}: p{percent} gap", "ms", blocks, own, partial(gap_ms, percent=percent))
            for percent in (50, 99)
        ]
    for name in options.deployments:
        own, base = (beside(name),), alone(name if name in (SPLIT, LENT) else COLOCATED)
        to_unchunked = (*own, beside(UNCHUNKED))
        findings += [
            make_finding(f"{own[0]}: gaps", "", blocks, own, lambda group: len(gaps(group[0]))),
            make_finding(f"{own[0]}: p50 gap", "ms", blocks, own, partial(gap_ms, percent=50)),
            make_finding(f"{own[0]}: p99 gap", "ms", blocks, own, partial(gap_ms, percent=99)),
            make_finding(f"{own[0]}: largest gap", "ms", blocks, own, partial(gap_ms, percent=100)),
            make_finding(f"{name}: p99 gap beside prompts / alone", "", blocks, (*own, base), gap_ratio),
            make_finding(
                f"{name}: p50 first token of a prompt", "ms", blocks, own, lambda g: 1e3 * first_token_s(g[0])
            ),
        ]
        if name != UNCHUNKED:
            first_tokens = f"{name}: p50 first token of a prompt / {UNCHUNKED}"
            findings.append(
                make_finding(
                    first_tokens, "", blocks, to_unchunked, lambda g: first_token_s(g[0]) / first_token_s(g[1])
                )
            )
    return findings


def _percentile(values: Sequence[float], percent: float) -> float:
    return percentile(sorted(values), percent)


def prompt_s(options: InterferenceOptions, client: LoadClient, runner: asyncio.Runner) -> float:
    """TTFT of a prompt of the mean length on an idle system."""
    num_tokens = sum(options.prompt_tokens) // 2
    answers = [runner.run(client.ask(num_tokens, PROMPT_OUTPUT_TOKENS)) for _ in range(NUM_TIMED_ALONE)]
    return statistics.median(answer.deliveries[0].at_s for answer in answers)


def run(options: InterferenceOptions, console: Console) -> list[Finding]:
    """Runs all rotations. Raises `RuntimeError` if a request fails."""
    with running_clients(options.systems, options.shape, options.dtype, options.seed, console) as (runner, clients):
        with console.status("a first round, which does not count"):
            for client in clients.values():
                runner.run(client.stream_gaps(options.streams, STREAM_PROMPT_TOKENS, 2))
                runner.run(client.ask(options.prompt_tokens[1], PROMPT_OUTPUT_TOKENS))
        with console.status("one prompt at a time"):
            prompt_alone_s = prompt_s(options, clients[SPLIT], runner)
        arms, probe = make_arms(options, prompt_alone_s / options.load, clients, runner), LoopbackProbe()
        found = partial(findings_of, options)
        blocks = rotate(
            arms,
            lambda _: probe(),
            num_rotations=options.rotations,
            seed=options.seed,
            console=console,
            on_rotation=ResultFile(
                options.result, "interference", options.rotations, found, _remarks(options, prompt_alone_s)
            ).write,
        )
    return found(blocks)


def _remarks(options: InterferenceOptions, prompt_alone_s: float) -> list[Remark]:
    pace = (
        f"a prompt of the mean length alone takes {1e3 * prompt_alone_s:.0f} ms to its first token; "
        f"one every {1e3 * prompt_alone_s / options.load:.0f} ms"
    )
    return [
        command_remark("bench.system.interference"),
        Remark("system", f"baton up, {options.shape}, {options.dtype}, two workers of one thread, cores 0 and 1"),
        Remark("prompts", pace),
    ]


def parse(arguments: Sequence[str] | None = None) -> InterferenceOptions:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="m32", help="its decode steps must wait for memory")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=6, help="of a block")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[1024, 2048], help="shortest and longest")
    parser.add_argument("--load", type=float, default=1.3, help="of prompts, over what one core can compute")
    parser.add_argument("--alone-s", type=float, default=3.0, help="length of a block without prompts")
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 32, 64], help="prompt tokens of a mixed step")
    parser.add_argument("--rotations", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    flags: dict[str, Any] = vars(parser.parse_args(arguments))
    lists = {name: tuple(flags[name]) for name in ("prompt_tokens", "budgets")}
    return InterferenceOptions(**{**flags, **lists})


def main() -> None:
    """Command line."""
    Console().print(table_of(run(parse(), Console(stderr=True))))


if __name__ == "__main__":
    run_command(main)
