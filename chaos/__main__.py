"""`python -m chaos`: the matrix of faults, the soak, and kills at a rate.

python -m chaos matrix                                  every cell once
python -m chaos matrix --cells 'decoding x kill' --repeat 3
python -m chaos matrix --write docs/reliability.md      writes the table there
python -m chaos soak --minutes 20 --seed 1 --json soak.json
python -m chaos storm --minutes 20 --kills-per-minute 20
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from chaos.checks.oracle import Oracle
from chaos.clients.client import ChaosClient
from chaos.clients.tenants import make_tenants
from chaos.harness import ChaosHarness
from chaos.image_phases import image_shape
from chaos.matrix import Cell, CellResult, all_cells, prepare, run_cell
from chaos.report import as_json, markdown_table, soak_markdown, soak_summary, soak_table, terminal_table, write_into
from chaos.soak import Soak
from chaos.storm import StormReport, StormSettings, run_storm
from chaos.testbed.cluster import ClusterShape, running_cluster

STORM_KV_MEMORY_MIB = 24
"""Of each worker: room for four of the longest requests of the load. Every start writes to all of it."""


def main(arguments: list[str]) -> int:
    """Returns the exit status: 0 if every check passed."""
    options = _options(arguments)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("chaos").setLevel(logging.INFO)
    console = Console(width=160)
    with tempfile.TemporaryDirectory(prefix="baton-chaos-") as folder:
        logs = Path(options.logs or folder)
        logs.mkdir(parents=True, exist_ok=True)
        command = {"matrix": _matrix, "soak": _soak, "storm": _storm}[options.command]
        return asyncio.run(command(options, logs, console))


async def _matrix(options: argparse.Namespace, logs: Path, console: Console) -> int:
    cells = [
        cell for cell in all_cells(options.transport) if any(words in str(cell) for words in options.cells or [""])
    ]
    shapes = (ClusterShape(transport=options.transport), image_shape(options.transport))
    results: list[CellResult] = []
    for shape in shapes:  # images need another model, and so another cluster
        own = [cell for cell in cells if cell.phase.has_image == bool(shape.num_encode)]
        if own:
            await _run_cells(own * options.repeat, shape, logs, options, results, console)
    console.print(terminal_table(results))
    if options.write is not None:
        write_into(options.write, "matrix", markdown_table(results))
    failed = [result for result in results if result.problems]
    console.print(f"{len(results) - len(failed)} of {len(results)} cells passed")
    return int(bool(failed))


async def _run_cells(
    cells: list[Cell],
    shape: ClusterShape,
    logs: Path,
    options: argparse.Namespace,
    results: list[CellResult],
    console: Console,
) -> None:
    """Adds the results of cells on one cluster to `results`."""
    async with running_cluster(shape, logs) as cluster:
        harness = ChaosHarness(
            cluster, ChaosClient(cluster.http, shape.model), Oracle(), options.hold_s, options.redis_hold_s
        )
        await prepare(harness)
        for cell in cells:
            results.append(await _run_cell(cell, harness, console))
            if options.json is not None:  # now, so an interrupted run keeps its results
                options.json.write_text(as_json(results))


async def _soak(options: argparse.Namespace, logs: Path, console: Console) -> int:
    flags = {"request-deadline-s": 60, "max-attempts": 6}
    shape = ClusterShape(
        transport=options.transport, prefill_flags={}, router_flags=flags, forks=options.forks, tenants=make_tenants()
    )
    async with running_cluster(shape, logs) as cluster:
        harness = ChaosHarness(cluster, ChaosClient(cluster.http, shape.model), Oracle())
        await prepare(harness)
        report = await Soak(harness, options.seed, options.clients, pairs=options.pairs).run(options.minutes)
    console.print(soak_table(report))
    console.print(soak_summary(report), markup=False, highlight=False)
    if options.json is not None:
        options.json.write_text(report.as_json())
    if options.write is not None:
        write_into(options.write, "soak", f"{soak_summary(report)}\n\n{soak_markdown(report)}")
    for problem in report.problems:
        console.print(problem, markup=False, highlight=False)
    return int(bool(report.problems))


async def _storm(options: argparse.Namespace, logs: Path, console: Console) -> int:
    flags = {"request-deadline-s": 60, "max-attempts": 6}
    shape = ClusterShape(
        transport=options.transport,
        prefill_flags={},
        router_flags=flags,
        forks=options.forks,
        new_ids=options.new_ids,
        proxies=False,
        kv_memory_mib=STORM_KV_MEMORY_MIB,
        tenants=make_tenants(),
    )
    async with running_cluster(shape, logs) as cluster:
        harness = ChaosHarness(cluster, ChaosClient(cluster.http, shape.model), Oracle())
        await prepare(harness)
        settings = StormSettings(
            options.minutes,
            options.kills_per_minute,
            options.rest_s,
            options.at_once,
            options.drain_share,
            options.start_share,
            options.kills,
        )

        def write(report: StormReport) -> None:
            if options.json is not None:  # now, so an interrupted run keeps its results
                options.json.write_text(report.as_json())

        report = await run_storm(harness, options.seed, options.clients, settings, write)
    console.print(report.summary(), markup=False, highlight=False)
    for problem in report.problems:
        console.print(problem, markup=False, highlight=False)
    return int(bool(report.problems))


async def _run_cell(cell: Cell, harness: ChaosHarness, console: Console) -> CellResult:
    result = await run_cell(cell, harness)
    verdict = "FAILED" if result.problems else "passed"
    times = f"gap {result.longest_gap_s:.1f} s, whole after {result.settled_s:.1f} s, {result.wall_s:.1f} s in all"
    console.print(f"{verdict} {cell}: {times}", highlight=False)
    for problem in result.problems:
        console.print(f"    {problem}", markup=False, highlight=False)
    return result


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("chaos", description="Faults on real processes; see docs/reliability.md.")
    commands = parser.add_subparsers(dest="command", required=True)
    matrix = commands.add_parser("matrix", help="every phase of a request with every fault")
    matrix.add_argument("--cells", action="append", help="only cells whose name has this in it; may be repeated")
    matrix.add_argument("--repeat", type=int, default=1, help="how often each is played")
    matrix.add_argument("--hold-s", type=float, default=10.0, help="longest time of a fault that ends by itself")
    matrix.add_argument("--redis-hold-s", type=float, default=60.0, help="the same for Redis' faults")
    soak = commands.add_parser("soak", help="mixed load under random faults, and what grows")
    soak.add_argument("--minutes", type=float, default=20.0)
    soak.add_argument("--seed", type=int, default=1, help="of the load and of the faults")
    soak.add_argument("--clients", type=int, default=6, help="how many ask at once")
    soak.add_argument("--pairs", action="store_true", help="most faults come with one of the state store")
    soak.add_argument("--forks", action="store_true", help="start services as forks of one process: less CPU a start")
    storm = commands.add_parser("storm", help="kills of processes at a rate, under mixed load")
    storm.add_argument("--minutes", type=float, default=20.0)
    storm.add_argument("--seed", type=int, default=1, help="of the load and of the kills")
    storm.add_argument("--clients", type=int, default=6, help="how many ask at once")
    storm.add_argument(
        "--kills-per-minute", type=float, default=20.0, help="at most; a kill waits for the last restart"
    )
    storm.add_argument("--at-once", type=int, default=1, help="most processes that are killed in one moment")
    storm.add_argument("--kills", type=int, help="end after so many, or after the minutes if these are over before")
    storm.add_argument(
        "--drain-share", type=float, default=0.1, help="of the processes that get a SIGTERM before they are killed"
    )
    storm.add_argument(
        "--start-share", type=float, default=0.2, help="of the restarted processes that are killed while they start"
    )
    storm.add_argument("--json", type=Path, help="where to write the report, after each minute")
    storm.add_argument("--rest-s", type=float, default=1.0, help="load without kills before each round of a minute")
    storm.add_argument("--forks", action=argparse.BooleanOptionalAction, default=True, help="start services as forks")
    storm.add_argument("--new-ids", action="store_true", help="a restarted worker has a new id, and waits for no lease")
    storm.add_argument("--logs", type=Path, help="where the processes' logs stay; default: nowhere")
    storm.add_argument("--transport", choices=["stream", "nixl"], default="stream")
    for command in (matrix, soak):
        command.add_argument("--transport", choices=["stream", "nixl"], default="stream")
        command.add_argument("--json", type=Path, help="where to write everything that was measured")
        command.add_argument("--write", type=Path, help="a page with markers to write the table into")
        command.add_argument("--logs", type=Path, help="where the processes' logs stay; default: nowhere")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
