"""G4: requests a second that meet their objectives on two cores: a prefill and a decode worker, or two that do both.

    python -m bench.goodput [--shape m150] [--rates 0.5 1 2] [--requests 30] [--prompt-tokens 512 1024]
        [--output-tokens 64] [--tpot-factor 2] [--gap-factor 5] [--ttft-s 10] [--rotations 3] [--seed 0] [--result FILE]

The same three systems as in `bench.interference`. A block offers `--requests` requests to one of them, at one rate, by
an open loop with Poisson arrivals; all arrangements get prompts of the same lengths at the same times. Two sets of
objectives: the first token within `--ttft-s`, and either a mean time per output token (TPOT) or no gap over a multiple
of the median gap that the split system shows when it has one request at a time. Goodput is requests that met a set,
over the block's wall time; an arrangement's is that at its best rate. The figure is split over the better of the two
colocated ones.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from bench.arrangements import MIXED, SPLIT, UNCHUNKED, running_clients
from bench.load_client import LoadClient
from bench.probes import LoopbackProbe
from bench.rotations import Arm, Block, Finding, Remark, command_remark, find, rotate, save, table_of
from bench.shapes import SHAPES
from services.cli.bench.arrivals import gamma_arrivals
from services.cli.bench.load import offer
from services.cli.bench.records import PlannedRequest, RequestRow

NUM_ALONE = 5


@dataclass(frozen=True, slots=True)
class Options:
    """One run's flags."""

    shape: str
    dtype: str
    rates: tuple[float, ...]
    requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: int
    tpot_factor: float
    gap_factor: float
    ttft_s: float
    chunk_tokens: int
    rotations: int
    seed: int
    result: Path | None


class Outcome(NamedTuple):
    """One request: seconds to its first token, per output token on average, and of its largest gap."""

    ttft_s: float
    tpot_s: float
    largest_gap_s: float


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a good request meets."""

    ttft_s: float
    tpot_s: float
    gap_s: float

    def meets_tpot(self, outcome: Outcome) -> bool:
        return outcome.ttft_s <= self.ttft_s and outcome.tpot_s <= self.tpot_s

    def meets_gap(self, outcome: Outcome) -> bool:
        return outcome.ttft_s <= self.ttft_s and outcome.largest_gap_s <= self.gap_s


def arm_of(arrangement: str, rate: float) -> str:
    return f"{arrangement}, {rate:g}/s"


def facts_of(rows: Sequence[RequestRow]) -> list[float]:
    """A block's values: its wall time, then every request's outcome, flat."""
    wall_s = max(row.sent_s + row.ended_s for row in rows)
    outcomes = (Outcome(row.ttft_s, row.tpot_s or 0.0, max(row.itls_s, default=0.0)) for row in rows)
    return [wall_s, *(value for outcome in outcomes for value in outcome)]


def goodput(block: Block, is_good: Callable[[Outcome], bool]) -> float:
    """Good requests a second."""
    wall_s, *flat = block.values
    outcomes = [Outcome(*flat[at : at + 3]) for at in range(0, len(flat), 3)]
    return sum(map(is_good, outcomes)) / wall_s


def planned(options: Options, client: LoadClient, rate: float, turn: int) -> list[PlannedRequest]:
    """The n-th block's requests at a rate: lengths and times are the same for every arrangement, tokens are not."""
    rng = random.Random(f"{options.seed} {rate} {turn}")
    arrivals = gamma_arrivals(options.requests, rate, 1.0, rng)
    lengths = [rng.randint(*options.prompt_tokens) for _ in arrivals]
    return [
        PlannedRequest(index, at_s, client.draw(length), options.output_tokens)
        for index, (at_s, length) in enumerate(zip(arrivals, lengths, strict=True))
    ]


def make_arms(options: Options, clients: dict[str, LoadClient], runner: asyncio.Runner) -> dict[str, Arm]:
    """One for every arrangement and rate."""
    turns = dict.fromkeys((arm_of(name, rate) for name in clients for rate in options.rates), 0)

    def block(name: str, rate: float) -> list[float]:
        client, arm = clients[name], arm_of(name, rate)
        plan = planned(options, client, rate, turns[arm])
        turns[arm] += 1
        return facts_of(runner.run(offer(plan, client.send, clock=time.perf_counter)))

    return {arm_of(name, rate): partial(block, name, rate) for name in clients for rate in options.rates}


def findings_of(options: Options, objectives: Objectives, blocks: Sequence[Block]) -> list[Finding]:
    """The table."""
    findings = []
    for words, is_good in (("TPOT", objectives.meets_tpot), ("largest gap", objectives.meets_gap)):
        for name in (SPLIT, MIXED, UNCHUNKED):
            arms = [arm_of(name, rate) for rate in options.rates]
            best = partial(_best, is_good=is_good)
            findings.append(find(f"{name}: goodput by {words}", "requests/s", blocks, arms, best))
        arms = [arm_of(name, rate) for name in (SPLIT, MIXED, UNCHUNKED) for rate in options.rates]
        ratio = partial(_ratio, num_rates=len(options.rates), is_good=is_good)
        findings.append(find(f"split / best colocated: goodput by {words}", "", blocks, arms, ratio))
    return findings


def _best(group: tuple[Block, ...], *, is_good: Callable[[Outcome], bool]) -> float:
    return max(goodput(block, is_good) for block in group)


def _ratio(group: tuple[Block, ...], *, num_rates: int, is_good: Callable[[Outcome], bool]) -> float:
    """Of the best rates. A colocated goodput of 0 counts as one good request in its block."""
    split, colocated = group[:num_rates], group[num_rates:]
    least = min(1.0 / block.values[0] for block in colocated)
    return _best(split, is_good=is_good) / max(_best(colocated, is_good=is_good), least)


def alone(options: Options, client: LoadClient, runner: asyncio.Runner) -> Objectives:
    """Objectives from what one request at a time meets."""
    gaps: list[float] = []
    for _ in range(NUM_ALONE):
        gaps += runner.run(client.streams(1, options.prompt_tokens[1], options.output_tokens))
    usual_s = statistics.median(gaps)
    return Objectives(options.ttft_s, options.tpot_factor * usual_s, options.gap_factor * usual_s)


def run(options: Options, console: Console) -> tuple[Objectives, list[Block]]:
    """Measures. Raises `RuntimeError` when a request failed."""
    system = (options.shape, options.dtype, options.seed, options.chunk_tokens)
    with running_clients(*system, console) as (runner, clients):
        with console.status("one request at a time"):
            for client in clients.values():
                runner.run(client.ask(options.prompt_tokens[1], 2))
            objectives = alone(options, clients[SPLIT], runner)
        arms, probe = make_arms(options, clients, runner), LoopbackProbe()
        return objectives, rotate(
            arms, lambda _: probe(), num_rotations=options.rotations, seed=options.seed, console=console
        )


def parse(arguments: Sequence[str] | None = None) -> Options:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="m150")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="requests a second")
    parser.add_argument("--requests", type=int, default=30, help="of a block")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[512, 1024], help="shortest and longest")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--tpot-factor", type=float, default=2.0, help="times the gap of a request that is alone")
    parser.add_argument("--gap-factor", type=float, default=5.0, help="the same for the largest gap")
    parser.add_argument("--ttft-s", type=float, default=10.0)
    parser.add_argument("--chunk-tokens", type=int, default=64, help="a step's token budget, in mixed chunks")
    parser.add_argument("--rotations", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    flags: dict[str, Any] = vars(parser.parse_args(arguments))
    return Options(**{**flags, "rates": tuple(flags["rates"]), "prompt_tokens": tuple(flags["prompt_tokens"])})


def main() -> None:
    """Command line."""
    options = parse()
    objectives, blocks = run(options, Console(stderr=True))
    findings = findings_of(options, objectives, blocks)
    words = (
        f"first token within {objectives.ttft_s:g} s, and TPOT within {1e3 * objectives.tpot_s:.1f} ms "
        f"or every gap within {1e3 * objectives.gap_s:.1f} ms"
    )
    if options.result is not None:
        save(options.result, "goodput", blocks, findings, [
            command_remark("bench.goodput"), Remark("objectives", words),
            Remark("system", f"baton up, {options.shape}, {options.dtype}"),
        ])  # fmt: skip
    console = Console()
    console.print(words)
    console.print(table_of(findings))


if __name__ == "__main__":
    main()
