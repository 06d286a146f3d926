"""What a short request costs at least in Python, beside the real router, and what everything around it costs.

    python -m bench.router.floor.compare [--rotations 10] [--requests 100] [--at-once 1 8 32] [--result FILE]

The real router and `least_router` stand before the same mock workers and one Redis, and requests of two tokens go
through both in turns. The floor does nothing but HTTP, JSON, the opens and reads in sessions over gRPC, one write to
Redis and events: no arrangement of Python above these can add less. Added latency is that of `short_requests`. At each
number of requests at once the CPU time of a request is told of the router, the client, the workers and Redis, and how
many requests a second all of them together allow on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import uvloop
from rich.console import Console

from baton.rpc.channel_pool import ChannelPool
from baton.services.cli.bench.client.bench_client import BenchClient
from baton.services.cli.bench.results.distribution import percentile
from baton.services.cli.processes.local_redis import LocalRedis
from bench.harness.probes import LoopbackProbe, process_cpu_s
from bench.harness.rotations import (
    Block,
    Finding,
    OnRotation,
    ResultFile,
    command_remark,
    make_finding,
    rotate,
    table_of,
)
from bench.harness.signals import run_command
from bench.harness.task_times import service_processes
from bench.router.floor.least_router import running_floor
from bench.router.mock_cluster import MockCluster, mock_workers, running_router
from bench.router.overhead import DEADLINE_S, SHORT_TOKENS, DirectClient, RouterClient

ROUTER, FLOOR, DIRECT = "router", "floor", "direct"
PARTS = (ROUTER, "client", "workers", "redis")
"""Processes whose CPU time is told; `ROUTER` is the floor's in its arms."""

NUM_CORES = 2


def run(
    num_rotations: int, num_requests: int, widths: Sequence[int], seed: int, console: Console, on_rotation: OnRotation
) -> list[Block]:
    """Runs all rotations on a cluster of its own. `widths`: requests at once."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, contextlib.ExitStack() as stack:
        redis = stack.enter_context(LocalRedis())
        workers = stack.enter_context(mock_workers(redis.url, None))
        [workers_process] = multiprocessing.active_children()
        assert workers_process.pid is not None
        pids = {
            "client": os.getpid(),
            "workers": workers_process.pid,
            "redis": service_processes(os.getpid())["redis"],
        }
        channels = ChannelPool()
        stack.callback(lambda: runner.run(channels.close()))
        direct = DirectClient(MockCluster(workers.prefill, workers.decode, "", 0), channels)
        arms: dict[str, Callable[[], Sequence[float]]] = {
            DIRECT: lambda: runner.run(_latencies(direct, num_requests)),
        }
        routers = {ROUTER: running_router(redis.url), FLOOR: running_floor(redis.url)}
        for name, starting in routers.items():
            url, pid = stack.enter_context(starting)
            http = BenchClient(url, api_key=None, timeout_s=DEADLINE_S, clock=time.perf_counter)
            stack.callback(_close, runner, http)
            client, processes = RouterClient(http), {ROUTER: pid, **pids}
            arms[f"{name} alone"] = partial(_run_alone, runner, client, num_requests)
            for width in widths:
                arms[f"{name} at {width}"] = partial(_run_at_once, runner, client, processes, num_requests, width)
        for arm in arms.values():
            arm()  # connections, caches, lazily imported code
        probe = LoopbackProbe()
        return rotate(
            arms, lambda _: probe(), num_rotations=num_rotations, seed=seed, console=console, on_rotation=on_rotation
        )


def _close(runner: asyncio.Runner, http: BenchClient) -> None:
    runner.run(http.__aexit__())


async def _latencies(client: DirectClient | RouterClient, num_requests: int) -> list[float]:
    return [await client.request(SHORT_TOKENS) for _ in range(num_requests)]


def _run_alone(runner: asyncio.Runner, client: RouterClient, num_requests: int) -> list[float]:
    return runner.run(_latencies(client, num_requests))


def _run_at_once(
    runner: asyncio.Runner, client: RouterClient, pids: Mapping[str, int], num_requests: int, width: int
) -> list[float]:
    """Requests a second, and CPU seconds of one request of each of `PARTS`."""
    before, began_s = [process_cpu_s(pids[part]) for part in PARTS], time.perf_counter()
    runner.run(client.burst(num_requests, SHORT_TOKENS, width))
    wall_s = time.perf_counter() - began_s
    after = [process_cpu_s(pids[part]) for part in PARTS]
    return [num_requests / wall_s, *((end - begin) / num_requests for begin, end in zip(before, after, strict=True))]


def findings_of(blocks: Sequence[Block]) -> list[Finding]:
    """The table, from the blocks alone."""
    findings = []
    for percent in (50, 99):
        findings += [
            make_finding(
                f"added p{percent}, {name}", "us", blocks, (f"{name} alone", DIRECT), partial(_added_us, percent)
            )
            for name in (ROUTER, FLOOR)
        ]
    for width in sorted({int(block.arm.split()[-1]) for block in blocks if " at " in block.arm}):
        arms = {name: (f"{name} at {width}",) for name in (ROUTER, FLOOR)}
        findings += [
            make_finding(f"CPU a request at {width}, {part}, {name}", "us", blocks, arms[name], partial(_cpu_us, at))
            for name in (ROUTER, FLOOR)
            for at, part in enumerate(PARTS, start=1)
        ]
        findings += [
            make_finding(what.format(width=width, name=name), "1/s", blocks, arms[name], figure)
            for what, figure in _RATES
            for name in (ROUTER, FLOOR)
        ]
        both = (*arms[ROUTER], *arms[FLOOR])
        findings.append(make_finding(f"CPU a request at {width}: router / floor", "", blocks, both, _cpu_ratio))
    return findings


def _added_us(percent: float, group: tuple[Block, ...]) -> float:
    routed, direct = (percentile(sorted(block.values), percent) for block in group)
    return (routed - direct) * 1e6


def _cpu_us(index: int, group: tuple[Block, ...]) -> float:
    return group[0].values[index] * 1e6


def _rate(group: tuple[Block, ...]) -> float:
    return group[0].values[0]


def _bound(group: tuple[Block, ...]) -> float:
    """Requests a second if all processes kept both cores busy."""
    return NUM_CORES / sum(group[0].values[1:])


def _bound_of_router(group: tuple[Block, ...]) -> float:
    """Requests a second of a router that has a core, as one event loop can use."""
    return 1 / group[0].values[1]


_RATES: tuple[tuple[str, Callable[[tuple[Block, ...]], float]], ...] = (
    ("requests/s at {width}, {name}", _rate),
    ("requests/s at {width} that all CPU time allows on two cores, {name}", _bound),
    ("requests/s at {width} that a core for the router allows, {name}", _bound_of_router),
)


def _cpu_ratio(group: tuple[Block, ...]) -> float:
    return group[0].values[1] / group[1].values[1]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rotations", type=int, default=10)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    flags = parser.parse_args()
    remarks = [command_remark("bench.router.floor.compare")]
    result_file = ResultFile(flags.result, "router_floor", flags.rotations, findings_of, remarks)
    console = Console(stderr=True)
    blocks = run(flags.rotations, flags.requests, flags.at_once, flags.seed, console, result_file.write)
    Console().print(table_of(findings_of(blocks)))


if __name__ == "__main__":
    run_command(main)
