"""CPU time that the router needs for a streamed token, at several numbers of streams.

    python -m bench.router.token_path [--rotations 5] [--streams 1 8 32 64] [--http-only] [--baseline DIR | --calls]

A real router in a process of its own stands before mock workers, which send every stream a token each `TOKEN_S`. Its
CPU time for long answers less that for short ones, over the difference in tokens, is the cost of a token; what an idle
router needs meanwhile is taken off. Passes interleave. Each number of streams runs twice in a rotation; the ratio of
the two is noise (A/A). `--baseline` names another checkout of this repository: its router runs beside, on the same
workers, and each rotation gives a ratio. With `--calls` the baseline is this checkout without sessions, beside a router
with them. `--http-only` leaves out workers, wire and store: tokens come from a script in
the router's process (`scripted_router`), and what is left is the way of a token from its choice to the socket.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvloop
from rich.console import Console

from baton.services.cli.bench.client.bench_client import BenchClient
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
from bench.router.mock_cluster import DecodeCapacity, mock_workers, running_router
from bench.router.overhead import DEADLINE_S, RouterClient
from bench.router.path_profile import ROOT
from bench.router.scripted_router import TOKEN_S, scripted_router

STREAMS = (1, 8, 32, 64)
SHORT_TOKENS, LONG_TOKENS = 2, 130
IDLE_S = 1.0
IDLE = "idle"
BASELINE = "baseline"


@dataclass(frozen=True, slots=True)
class MeasuredRouter:
    """A running router: its client, and the process whose CPU time counts."""

    client: RouterClient
    pid: int


async def cpu_a_token(router: MeasuredRouter, num_streams: int) -> list[float]:
    """CPU seconds a token, what an idle router needs included. Raises `RuntimeError` if a request fails."""
    readings = [process_cpu_s(router.pid)]
    for num_tokens in (SHORT_TOKENS, LONG_TOKENS):
        await router.client.burst(num_streams, num_tokens, num_streams)
        readings.append(process_cpu_s(router.pid))
    short_s, long_s = (after - before for before, after in itertools.pairwise(readings))
    return [(long_s - short_s) / (num_streams * (LONG_TOKENS - SHORT_TOKENS))]


async def idle_share(router: MeasuredRouter) -> list[float]:
    """CPU seconds a second of a router without requests."""
    began_s, before_s = time.perf_counter(), process_cpu_s(router.pid)
    await asyncio.sleep(IDLE_S)
    return [(process_cpu_s(router.pid) - before_s) / (time.perf_counter() - began_s)]


def arms_of(
    routers: Mapping[str, MeasuredRouter], streams: Sequence[int], run: Callable[..., list[float]]
) -> dict[str, Callable[[], list[float]]]:
    """The passes of a rotation: each number of streams twice, once on the baseline, and the idle routers."""
    arms: dict[str, Callable[[], list[float]]] = {}
    for name, router in routers.items():
        prefix = "" if not name else f"{name} "
        arms[prefix + IDLE] = partial(run, idle_share, router)
        for num_streams in streams:
            arms[f"{prefix}{num_streams}"] = partial(run, cpu_a_token, router, num_streams)
            if not name:
                arms[f"{num_streams} again"] = partial(run, cpu_a_token, router, num_streams)
    return arms


def findings_of(blocks: Sequence[Block]) -> list[Finding]:
    """The table, from the blocks alone."""
    names = {block.arm for block in blocks}
    findings: list[Finding] = []
    for num_streams in sorted(int(name) for name in names if name.isdigit()):
        arm = str(num_streams)
        figures: list[tuple[str, str, tuple[str, ...], Callable[[tuple[Block, ...]], float]]]
        figures = [("CPU a token", "us", (arm, IDLE), partial(_token_us, num_streams))]
        figures.append(("A/A", "ratio", (arm, IDLE, f"{arm} again", IDLE), partial(_ratio, num_streams)))
        if f"{BASELINE} {arm}" in names:
            pairs = (arm, IDLE, f"{BASELINE} {arm}", f"{BASELINE} {IDLE}")
            figures.append(("baseline over this", "ratio", pairs, partial(_ratio, num_streams)))
            figures.append(("CPU a token of the baseline", "us", pairs[2:], partial(_token_us, num_streams)))
        findings += [
            make_finding(f"{name}, {num_streams} streams", unit, blocks, arms, figure, lambda b: b.has_steady_probe)
            for name, unit, arms, figure in figures
        ]
    return findings


def _token_us(num_streams: int, group: tuple[Block, ...]) -> float:
    """Microseconds of a token, of a pass and the idle router."""
    busy, idle = group
    return (busy.values[0] - idle.values[0] * TOKEN_S / num_streams) * 1e6


def _ratio(num_streams: int, group: tuple[Block, ...]) -> float:
    """The second pass over the first."""
    return _token_us(num_streams, group[2:]) / _token_us(num_streams, group[:2])


@contextlib.contextmanager
def measured_routers(
    baseline: Path | None, most_streams: int, http_only: bool, ways: Mapping[str, str]
) -> Iterator[dict[str, MeasuredRouter]]:
    """This checkout's router as "", and that of another one; both use the same workers. `ways`: a flag by router."""
    with contextlib.ExitStack() as stack:
        trees = {"": None} if baseline is None else {"": None, BASELINE: baseline}
        found: dict[str, MeasuredRouter] = {}
        redis_url = ""
        if not http_only:
            redis_url = stack.enter_context(LocalRedis()).url
            stack.enter_context(mock_workers(redis_url, DecodeCapacity(2 * most_streams, TOKEN_S)))
        for name, tree in trees.items():
            flags = ("--router-id", f"router-{name or 'this'}", *((ways[name],) if name in ways else ()))
            starting = scripted_router(tree) if http_only else running_router(redis_url, flags, tree)
            url, pid = stack.enter_context(starting)
            http = BenchClient(url, api_key=None, timeout_s=DEADLINE_S, clock=time.perf_counter)
            found[name] = MeasuredRouter(RouterClient(http), pid)
        yield found


def run(
    num_rotations: int,
    streams: Sequence[int],
    console: Console,
    on_rotation: OnRotation,
    *,
    baseline: Path | None = None,
    http_only: bool = False,
    ways: Mapping[str, str] | None = None,
) -> list[Block]:
    """Runs all rotations on a cluster of its own."""
    with (
        measured_routers(baseline, max(streams), http_only, ways or {}) as routers,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        arms = arms_of(routers, streams, lambda arm, *inputs: runner.run(arm(*inputs)))
        probe = LoopbackProbe()
        try:
            for arm in arms.values():
                arm()  # connections, caches, lazily imported code
            return rotate(
                arms, lambda _: probe(), num_rotations=num_rotations, seed=0, console=console, on_rotation=on_rotation
            )
        finally:
            for router in routers.values():
                runner.run(router.client.http.__aexit__())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rotations", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    baseline = parser.add_mutually_exclusive_group()
    baseline.add_argument("--baseline", type=Path)
    baseline.add_argument("--calls", action="store_true")
    parser.add_argument("--http-only", action="store_true")
    parser.add_argument("--result", type=Path)
    flags = parser.parse_args()
    remarks = [command_remark("bench.router.token_path")]
    result_file = ResultFile(flags.result, "token_path", flags.rotations, findings_of, remarks)
    blocks = run(
        flags.rotations,
        flags.streams,
        Console(stderr=True),
        result_file.write,
        baseline=ROOT if flags.calls else flags.baseline,
        http_only=flags.http_only,
        ways={"": "--sessions", BASELINE: "--no-sessions"} if flags.calls else None,
    )
    Console().print(table_of(findings_of(blocks)))


if __name__ == "__main__":
    run_command(main)
