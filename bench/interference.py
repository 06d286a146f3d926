"""G3: how much longer the gaps between tokens get while long prompts arrive: split, mixed chunks, unchunked.

    python -m bench.interference [--shape m150] [--streams 4] [--stream-tokens 160] [--prompt-tokens 1024 2048]
        [--chunk-tokens 64] [--rotations 5] [--seed 0] [--result FILE]

Three systems of one random model, each with two workers of one thread on the same two cores (`bench.arrangements`). A
block runs `--streams` answers at once, alone or beside prompts of a length drawn from `--prompt-tokens`, one every
`--prompt-gap-s`; every arrangement gets the same prompts at the same times. The figure is the 99th percentile of the
gaps beside prompts over that of the same rotation's gaps alone. What the streams' own first tokens met is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.arrangements import MIXED, SPLIT, UNCHUNKED, running_clients
from bench.load_client import LoadClient
from bench.probes import LoopbackProbe
from bench.rotations import Arm, Block, Finding, Remark, command_remark, find, rotate, save, table_of
from bench.shapes import SHAPES
from services.cli.bench.distribution import percentile

STREAM_PROMPT_TOKENS = 64
PROMPT_OUTPUT_TOKENS = 2
"""With one there would be nothing to hand over."""


@dataclass(frozen=True, slots=True)
class Options:
    """One run's flags."""

    shape: str
    dtype: str
    streams: int
    stream_tokens: int
    prompt_tokens: tuple[int, int]
    prompt_gap_s: float
    chunk_tokens: int
    rotations: int
    seed: int
    result: Path | None


def alone(arrangement: str) -> str:
    return f"{arrangement}: alone"


def beside(arrangement: str) -> str:
    return f"{arrangement}: beside prompts"


async def disturbed(client: LoadClient, options: Options, seed: int) -> list[float]:
    """Gaps of the streams while prompts arrive, until the streams have ended."""
    rng = random.Random(seed)
    prompts: set[asyncio.Task[Any]] = set()
    streams = asyncio.create_task(client.streams(options.streams, STREAM_PROMPT_TOKENS, options.stream_tokens))
    while not (await asyncio.wait([streams], timeout=options.prompt_gap_s))[0]:
        prompts.add(asyncio.create_task(client.ask(rng.randint(*options.prompt_tokens), PROMPT_OUTPUT_TOKENS)))
    await asyncio.gather(*prompts)
    return await streams


def make_arms(options: Options, clients: dict[str, LoadClient], runner: asyncio.Runner) -> dict[str, Arm]:
    """Every arm returns gaps in seconds. The n-th block beside prompts has the same ones in every arrangement."""

    def without(client: LoadClient) -> list[float]:
        return runner.run(client.streams(options.streams, STREAM_PROMPT_TOKENS, options.stream_tokens))

    def among(client: LoadClient, turns: itertools.count[int]) -> list[float]:
        return runner.run(disturbed(client, options, options.seed + next(turns)))

    arms: dict[str, Arm] = {}
    for name, client in clients.items():
        arms[alone(name)] = partial(without, client)
        arms[beside(name)] = partial(among, client, itertools.count())
    return arms


def findings_of(blocks: Sequence[Block]) -> list[Finding]:
    """The table."""
    findings = []
    for name in (SPLIT, MIXED, UNCHUNKED):
        arms = (beside(name), alone(name))
        findings += [
            find(f"{arms[1]}: p50 gap", "ms", blocks, arms[1:], lambda group: 1e3 * _percentile(group[0], 50)),
            find(f"{arms[1]}: p99 gap", "ms", blocks, arms[1:], lambda group: 1e3 * _percentile(group[0], 99)),
            find(f"{arms[0]}: p99 gap", "ms", blocks, arms[:1], lambda group: 1e3 * _percentile(group[0], 99)),
            find(f"{name}: p99 gap beside prompts / alone", "", blocks, arms, _ratio),
        ]
    return findings


def _percentile(block: Block, percent: float) -> float:
    return percentile(sorted(block.values), percent)


def _ratio(group: tuple[Block, ...]) -> float:
    return _percentile(group[0], 99) / _percentile(group[1], 99)


def run(options: Options, console: Console) -> list[Block]:
    """Measures. Raises `RuntimeError` when a request failed."""
    system = (options.shape, options.dtype, options.seed, options.chunk_tokens)
    with running_clients(*system, console) as (runner, clients):
        arms, probe = make_arms(options, clients, runner), LoopbackProbe()
        with console.status("a first round, which does not count"):
            for client in clients.values():
                runner.run(client.streams(options.streams, STREAM_PROMPT_TOKENS, 2))
                runner.run(client.ask(options.prompt_tokens[1], PROMPT_OUTPUT_TOKENS))
        return rotate(arms, lambda _: probe(), num_rotations=options.rotations, seed=options.seed, console=console)


def parse(arguments: Sequence[str] | None = None) -> Options:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="m150")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--stream-tokens", type=int, default=160)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[1024, 2048], help="shortest and longest")
    parser.add_argument("--prompt-gap-s", type=float, default=4.0, help="time from one prompt to the next")
    parser.add_argument("--chunk-tokens", type=int, default=64, help="a step's token budget, in mixed chunks")
    parser.add_argument("--rotations", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    flags: dict[str, Any] = vars(parser.parse_args(arguments))
    return Options(**{**flags, "prompt_tokens": tuple(flags["prompt_tokens"])})


def main() -> None:
    """Command line."""
    options = parse()
    blocks = run(options, Console(stderr=True))
    findings = findings_of(blocks)
    if options.result is not None:
        system = f"baton up, {options.shape}, {options.dtype}"
        save(options.result, "interference", blocks, findings, [
            command_remark("bench.interference"), Remark("system", system),
        ])  # fmt: skip
    Console().print(table_of(findings))


if __name__ == "__main__":
    main()
