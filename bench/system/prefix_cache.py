"""G6: TTFT saved by a shared prefix, over the ideal saving, and the cost of a cache miss.

    python -m bench.system.prefix_cache [--base-url http://127.0.0.1:8000] [--model bundled] [--shape SHAPE]
        [--prompt-tokens 1024] [--shares 25 50 75 95] [--requests 5] [--rotations 10] [--seed 0] [--result FILE]

Real requests go over HTTP, one at a time, to a running system or to one that `baton up` starts for the run. A block
draws a new prefix, sends it once to cache it, and then times requests that begin with it and end in tokens of their
own. The ideal for a prompt of 1024 tokens of which 768 are cached is a prompt of 256 fresh tokens, measured in the same
rotation. Every answer's usage must report the cached tokens, or the run ends.

That ideal leaves out work which no exact system can: the attention of the new tokens to the cached ones. With
`--shape`, a second limit adds it, at the speed (operations a second) that the whole prompt has in the same rotation:
"speed-up / attainable".

The cache cannot be switched off, so the cost of a miss is measured in two ways: requests that repeat tokens under a
new `cache_salt` against fresh tokens; and the CPU time of matching and adopting a prompt's pages, in this process with
the worker's own tables, over TTFT.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from baton.services.cli.bench.workload.prompts import Vocabulary
from bench.harness.model_shapes import SHAPES, ModelShape
from bench.harness.probes import LoopbackProbe
from bench.harness.rotations import (
    Arm,
    Block,
    Finding,
    OnRotation,
    Remark,
    ResultFile,
    command_remark,
    make_finding,
    rotate,
    table_of,
)
from bench.harness.running_system import running_system
from bench.harness.signals import run_command
from bench.system.prefix_client import PrefixClient
from bench.system.prefix_overhead import bookkeeping_s

WAIT_S = 300.0
FRESH, SALTED, BOOKKEEPING = "0 % cached", "0 % cached, salted", "bookkeeping"


@dataclass(frozen=True, slots=True)
class PrefixCacheOptions:
    """One run's flags."""

    base_url: str | None
    api_key: str | None
    model: str
    shape: str | None
    dtype: str
    prompt_tokens: int
    shares: tuple[int, ...]
    page_size: int
    vocab_size: int
    requests: int
    rotations: int
    seed: int
    result: Path | None

    @property
    def plan(self) -> PrefixPlan:
        """The prompts of the run."""
        return PrefixPlan(self.prompt_tokens, self.shares, self.page_size, self.requests)


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """Prompts of `prompt_tokens`, of which `shares` percent are cached, rounded down to a page."""

    prompt_tokens: int
    shares: tuple[int, ...]
    page_size: int
    num_requests: int

    def cached_tokens(self, share: int) -> int:
        """Leading tokens that a prompt of this share hits. The last token is never cached."""
        return min(self.prompt_tokens * share // 100, self.prompt_tokens - 1) // self.page_size * self.page_size


def cached_arm(share: int) -> str:
    return f"{share} % cached"


def ideal_arm(share: int) -> str:
    return f"{share} % cached, ideal"


def make_arms(plan: PrefixPlan, client: PrefixClient, runner: asyncio.Runner) -> dict[str, Arm]:
    """Arms that return the TTFT of their requests, in seconds."""

    def cached(share: int) -> list[float]:
        num_cached = plan.cached_tokens(share)
        return runner.run(client.with_prefix(num_cached, plan.prompt_tokens - num_cached, plan.num_requests))

    def fresh(num_tokens: int) -> list[float]:
        return runner.run(client.fresh(num_tokens, plan.num_requests))

    arms: dict[str, Arm] = {
        FRESH: partial(fresh, plan.prompt_tokens),
        SALTED: lambda: runner.run(client.salted(plan.prompt_tokens, plan.num_requests)),
        BOOKKEEPING: lambda: bookkeeping_s(plan.prompt_tokens, plan.page_size, plan.num_requests),
    }
    for share in plan.shares:
        arms[cached_arm(share)] = partial(cached, share)
        arms[ideal_arm(share)] = partial(fresh, plan.prompt_tokens - plan.cached_tokens(share))
    return arms


def findings_of(plan: PrefixPlan, shape: ModelShape | None, blocks: Sequence[Block]) -> list[Finding]:
    """The table. `shape`: of the model, for what is attainable; without it those rows are left out."""
    first_token = make_finding(f"{FRESH}: first token", "ms", blocks, (FRESH,), lambda group: 1e3 * _median(group[0]))
    findings = [first_token]
    for share in plan.shares:
        arms = (FRESH, cached_arm(share), ideal_arm(share))
        findings += [
            make_finding(f"{arms[1]}: first token", "ms", blocks, arms[1:2], lambda group: 1e3 * _median(group[0])),
            make_finding(f"{arms[1]}: speed-up", "", blocks, arms[:2], _ratio),
            make_finding(f"{arms[1]}: speed-up / ideal", "", blocks, arms[2:0:-1], _ratio),
        ]
        if shape is not None:
            over_attainable = partial(_over_attainable, plan, shape, share)
            findings.append(make_finding(f"{arms[1]}: speed-up / attainable", "", blocks, arms, over_attainable))
    salted = make_finding("no hit: salted / fresh", "", blocks, (SALTED, FRESH), _ratio)
    bookkeeping = make_finding("no hit: bookkeeping / first token", "", blocks, (BOOKKEEPING, FRESH), _ratio)
    return [*findings, salted, bookkeeping]


def _median(block: Block) -> float:
    return statistics.median(block.values)


def _ratio(group: tuple[Block, ...]) -> float:
    """The first block's time over the second's."""
    return _median(group[0]) / _median(group[1])


def _over_attainable(plan: PrefixPlan, shape: ModelShape, share: int, group: tuple[Block, ...]) -> float:
    """The ideal time and that of the attention to the prefix, over the time taken. `group`: fresh, cached, ideal."""
    fresh_s, cached_s, ideal_s = map(_median, group)
    num_cached = plan.cached_tokens(share)
    flops = shape.prefix_flops(num_cached, plan.prompt_tokens - num_cached)
    return (ideal_s + fresh_s * flops / shape.prefill_flops(plan.prompt_tokens)) / cached_s


@contextlib.contextmanager
def target_system(options: PrefixCacheOptions, console: Console) -> Iterator[str]:
    """Yields the URL of the given system, or of a new one that is stopped at the end."""
    if options.base_url is not None:
        yield options.base_url
        return
    with running_system(options.model, options.shape, options.seed, ("--dtype", options.dtype), console) as system:
        yield system.url


def run(options: PrefixCacheOptions, console: Console, on_rotation: OnRotation) -> list[Block]:
    """Runs all rotations. Raises `RuntimeError` if a request fails or a prefix is not found."""
    vocabulary = Vocabulary(options.vocab_size, options.seed)
    with (
        target_system(options, console) as url,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        client = PrefixClient(url, vocabulary, api_key=options.api_key, timeout_s=WAIT_S, clock=time.perf_counter)
        arms, probe = make_arms(options.plan, client, runner), LoopbackProbe()
        try:
            with console.status("a first round, which does not count"):
                for arm in arms.values():
                    arm()
            return rotate(
                arms,
                lambda _: probe(),
                num_rotations=options.rotations,
                seed=options.seed,
                console=console,
                on_rotation=on_rotation,
            )
        finally:
            runner.run(client.close())


def parse(arguments: Sequence[str] | None = None) -> PrefixCacheOptions:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", help="a running system; default: `baton up` starts one")
    parser.add_argument("--api-key")
    parser.add_argument("--model", default="bundled", help="for `baton up`")
    parser.add_argument("--shape", choices=SHAPES, help="for `baton up`: a random model of this shape instead")
    parser.add_argument("--dtype", default="auto", help="for `baton up`")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--shares", type=int, nargs="+", default=[25, 50, 75, 95])
    parser.add_argument("--page-size", type=int, default=16, help="of the system's workers")
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--requests", type=int, default=5, help="timed requests a block")
    parser.add_argument("--rotations", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    flags: dict[str, Any] = vars(parser.parse_args(arguments))
    return PrefixCacheOptions(**{**flags, "shares": tuple(flags["shares"])})


def main() -> None:
    """Command line."""
    options = parse()
    findings_from = partial(findings_of, options.plan, SHAPES.get(options.shape or ""))
    system = options.base_url or f"baton up, {options.shape or options.model}"
    remarks = [command_remark("bench.system.prefix_cache"), Remark("system", system)]
    result_file = ResultFile(options.result, "prefix", options.rotations, findings_from, remarks)
    blocks = run(options, Console(stderr=True), result_file.write)
    Console().print(table_of(findings_from(blocks)))


if __name__ == "__main__":
    run_command(main)
