"""Latency, CPU time and pace of requests of two tokens, beside a router of another checkout.

    python -m bench.router.short_requests [--baseline DIR] [--rotations 10] [--requests 100] [--result FILE]

Routers in processes of their own stand before the same mock workers and one Redis. Their passes interleave: requests
one at a time, and eight at a time. Added latency is that of `overhead`: less the same calls made to the workers
directly. CPU time is that of the router's process in a pass. Ratios are taken within a rotation.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import uvloop
from rich.console import Console

from baton.rpc.channel_pool import ChannelPool
from baton.services.cli.bench.client.bench_client import BenchClient
from baton.services.cli.bench.results.distribution import percentile
from baton.services.cli.processes.local_redis import LocalRedis
from bench.harness.probes import LoopbackProbe, process_cpu_s
from bench.harness.rotations import Block, Finding, OnRotation, ResultFile, make_finding, rotate, table_of
from bench.harness.signals import run_command
from bench.router.mock_cluster import MockCluster, mock_workers, running_router
from bench.router.overhead import DEADLINE_S, SHORT_TOKENS, DirectClient, RouterClient

THIS, BASELINE = "this", "baseline"
DIRECT = "direct"


def run(
    baseline: Path | None, num_rotations: int, num_requests: int, seed: int, console: Console, on_rotation: OnRotation
) -> list[Block]:
    """Runs all rotations on a cluster of its own. `baseline`: the other checkout; None: this one alone."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, contextlib.ExitStack() as stack:
        redis = stack.enter_context(LocalRedis())
        workers = stack.enter_context(mock_workers(redis.url, None))
        channels = ChannelPool()
        stack.callback(lambda: runner.run(channels.close()))
        direct = DirectClient(MockCluster(workers.prefill, workers.decode, "", 0), channels)
        arms: dict[str, Callable[[], Sequence[float]]] = {
            DIRECT: lambda: runner.run(_latencies(direct, num_requests)),
        }
        for name, tree in {THIS: None, **({BASELINE: baseline} if baseline else {})}.items():
            url, pid = stack.enter_context(running_router(redis.url, tree=tree))
            http = BenchClient(url, api_key=None, timeout_s=DEADLINE_S, clock=time.perf_counter)
            stack.callback(_close, runner, http)
            arms.update(_arms_of(name, runner, RouterClient(http), pid, num_requests))
        for arm in arms.values():
            arm()  # connections, caches, lazily imported code
        probe = LoopbackProbe()
        return rotate(
            arms, lambda _: probe(), num_rotations=num_rotations, seed=seed, console=console, on_rotation=on_rotation
        )


def _close(runner: asyncio.Runner, http: BenchClient) -> None:
    runner.run(http.__aexit__())


def _arms_of(
    name: str, runner: asyncio.Runner, router: RouterClient, pid: int, num_requests: int
) -> dict[str, Callable[[], Sequence[float]]]:
    return {
        f"{name} alone": lambda: runner.run(_latencies(router, num_requests)),
        f"{name} CPU": lambda: runner.run(_cpu_alone(router, pid, num_requests)),
        f"{name} at 8": lambda: runner.run(_at_once(router, pid, num_requests)),
    }


async def _latencies(client: DirectClient | RouterClient, num_requests: int) -> list[float]:
    return [await client.request(SHORT_TOKENS) for _ in range(num_requests)]


async def _cpu_alone(router: RouterClient, pid: int, num_requests: int) -> list[float]:
    """The router's CPU seconds a request, one at a time."""
    before_s = process_cpu_s(pid)
    await _latencies(router, num_requests)
    return [(process_cpu_s(pid) - before_s) / num_requests]


async def _at_once(router: RouterClient, pid: int, num_requests: int) -> list[float]:
    """Requests a second, eight at a time, and the router's CPU seconds of one."""
    before_s, began_s = process_cpu_s(pid), time.perf_counter()
    await router.burst(num_requests, SHORT_TOKENS)
    return [num_requests / (time.perf_counter() - began_s), (process_cpu_s(pid) - before_s) / num_requests]


def findings_of(blocks: Sequence[Block]) -> list[Finding]:
    """The table, from the blocks alone."""
    names = [name for name in (THIS, BASELINE) if any(block.arm == f"{name} alone" for block in blocks)]
    findings = []
    for what, unit, arm, figure in _FIGURES:
        takes_direct = arm == "alone"
        for name in names:
            arms = (f"{name} {arm}", DIRECT) if takes_direct else (f"{name} {arm}",)
            findings.append(make_finding(f"{what}, {name}", unit, blocks, arms, figure))
        if len(names) > 1:
            others = (DIRECT,) if takes_direct else ()
            arms = (f"{THIS} {arm}", f"{BASELINE} {arm}", *others)
            findings.append(make_finding(f"{what}, ratio", "", blocks, arms, partial(_ratio, figure)))
    return findings


def _added_us(percent: float, group: tuple[Block, ...]) -> float:
    routed, direct = (percentile(sorted(block.values), percent) for block in group)
    return (routed - direct) * 1e6


def _value(index: int, scale: float, group: tuple[Block, ...]) -> float:
    return group[0].values[index] * scale


def _ratio(figure: Callable[[tuple[Block, ...]], float], group: tuple[Block, ...]) -> float:
    this, baseline, *others = group
    return figure((this, *others)) / figure((baseline, *others))


_FIGURES: tuple[tuple[str, str, str, Callable[[tuple[Block, ...]], float]], ...] = (
    ("added p50", "us", "alone", partial(_added_us, 50)),
    ("added p99", "us", "alone", partial(_added_us, 99)),
    ("CPU a request alone", "us", "CPU", partial(_value, 0, 1e6)),
    ("requests/s at 8", "1/s", "at 8", partial(_value, 0, 1.0)),
    ("CPU a request at 8", "us", "at 8", partial(_value, 1, 1e6)),
)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path)
    parser.add_argument("--rotations", type=int, default=10)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    flags = parser.parse_args()
    result_file = ResultFile(flags.result, "router_short_requests", flags.rotations, findings_of)
    console = Console(stderr=True)
    blocks = run(flags.baseline, flags.rotations, flags.requests, flags.seed, console, result_file.write)
    Console().print(table_of(findings_of(blocks)))


if __name__ == "__main__":
    run_command(main)
