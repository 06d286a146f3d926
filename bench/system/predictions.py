"""What `baton up` predicts of both deployments of a small machine, beside what both serve under that load.

    python -m bench.system.predictions [--shape qwen2.5-0.5b] [--requests 32] [--rotations 3] [--result FILE]

The step times of one random model are measured as `baton up` measures them, and its line with both predictions is read.
Then a split and a colocated system of the model, this one with the chunks that were predicted, take turns at the load
of the prediction: prompts of 512 and answers of 128 tokens, eight at once. Requests a second count from the end of the
eighth request to the last moment with eight at once; gaps between tokens are those of that time. The last lines say
whether the chosen deployment served more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop
from rich.console import Console

from baton.services.cli.bench.load_generator import run_load
from baton.services.cli.bench.results.distribution import percentile
from baton.services.cli.bench.results.records import PlannedRequest, RequestRow
from baton.services.cli.bench.workload.prompts import Vocabulary
from baton.services.cli.calibration.prediction import OUTPUT_TOKENS, PROMPT_TOKENS
from bench.harness.model_shapes import SHAPES
from bench.harness.probes import MemcpyProbe
from bench.harness.rotations import (
    Block,
    Finding,
    Remark,
    ResultFile,
    command_remark,
    make_finding,
    rotate,
    table_of,
)
from bench.harness.running_system import running_system
from bench.harness.signals import run_command
from bench.system.deployments import WAIT_S
from bench.system.load_client import LoadClient

NUM_AT_ONCE = 8
SPLIT, COLOCATED = "split", "colocated"
KV_FLAGS = ("--kv-memory-mib", "512")
_TOLD = re.compile(
    r"(?P<name>split|colocated)(?:, chunks of (?P<chunk>\d+))?: (?P<rate>[\d.e+-]+) requests/s, (?P<gap>[\d.e+-]+) ms"
)


@dataclass(frozen=True, slots=True)
class ToldPrediction:
    """What the line says of a deployment. `chunk_tokens`: of a colocated worker's steps; 0 for split."""

    name: str
    requests_per_s: float
    gap_ms: float
    chunk_tokens: int


def read_note(note: str) -> list[ToldPrediction]:
    """Both predictions in the line of `baton up`, the chosen one first. Raises `RuntimeError` if it has none."""
    found = [
        ToldPrediction(told["name"], float(told["rate"]), float(told["gap"]), int(told["chunk"] or 0))
        for told in _TOLD.finditer(note)
    ]
    if {each.name for each in found} != {SPLIT, COLOCATED}:
        raise RuntimeError(f"no predictions: {note}")
    return found


def flags_of(prediction: ToldPrediction) -> tuple[str, ...]:
    """Flags of `baton up` for the deployment that was predicted. The rows of a step count in its budget."""
    flags = ("--deployment", prediction.name, *KV_FLAGS)
    if prediction.name == SPLIT:
        return flags
    return (*flags, "--decode-token-budget", str(prediction.chunk_tokens + NUM_AT_ONCE))


def steady_values(rows: Sequence[RequestRow]) -> list[float]:
    """Requests a second while `NUM_AT_ONCE` ran, then the gaps of that time in seconds.

    The last request is sent when all but `NUM_AT_ONCE` have ended. Raises `RuntimeError` for a failed request, and
    `ValueError` for too few of them.
    """
    if failed := [row.failure for row in rows if row.failure is not None]:
        raise RuntimeError(f"{len(failed)} of {len(rows)} requests failed: {failed[0]}")
    if len(rows) <= 2 * NUM_AT_ONCE:
        raise ValueError(f"{len(rows)} requests: more than {2 * NUM_AT_ONCE} are needed")
    ended = sorted(row.sent_s + row.ended_s for row in rows)
    began_s, until_s = ended[NUM_AT_ONCE - 1], ended[len(rows) - NUM_AT_ONCE - 1]
    rate = (len(rows) - 2 * NUM_AT_ONCE) / (until_s - began_s)
    gaps = []
    for row in rows:
        at_s = row.sent_s + row.ttft_s
        for gap_s in row.itls_s:
            at_s += gap_s
            if began_s < at_s <= until_s:
                gaps.append(gap_s)
    return [rate, *gaps]


async def _serve_load(client: LoadClient, num_requests: int) -> list[float]:
    plan = [PlannedRequest(at, 0.0, client.draw(PROMPT_TOKENS), OUTPUT_TOKENS) for at in range(num_requests)]
    return steady_values(await run_load(plan, client.send, clock=time.perf_counter, max_concurrency=NUM_AT_ONCE))


def findings_of(predictions: Sequence[ToldPrediction], blocks: Sequence[Block]) -> list[Finding]:
    """The table. `predictions`: the chosen one first."""
    findings = []
    for told in predictions:
        own = (told.name,)
        for name, unit, figure, predicted in (
            ("requests/s", "1/s", _rate, told.requests_per_s),
            ("mean gap", "ms", _mean_gap_ms, told.gap_ms),
        ):
            findings += [
                make_finding(f"{told.name}: {name}, predicted", unit, blocks, own, partial(_constant, predicted)),
                make_finding(f"{told.name}: {name}, measured", unit, blocks, own, figure),
                make_finding(
                    f"{told.name}: {name}, measured / predicted", "", blocks, own, partial(_over, figure, predicted)
                ),
            ]
        findings += [
            make_finding(f"{told.name}: p{percent} gap", "ms", blocks, own, partial(_gap_ms, percent))
            for percent in (50, 99)
        ]
    chosen, other = (told.name for told in predictions)
    both, title = (chosen, other), f"chosen ({chosen}) / other ({other})"
    told_ratio = predictions[0].requests_per_s / predictions[1].requests_per_s
    return [
        *findings,
        make_finding(f"{title}: requests/s, predicted", "", blocks, both, partial(_constant, told_ratio)),
        make_finding(f"{title}: requests/s, measured", "", blocks, both, partial(_ratio, _rate)),
        make_finding(f"{title}: mean gap, measured", "", blocks, both, partial(_ratio, _mean_gap_ms)),
    ]


_Figure = Callable[[tuple[Block, ...]], float]


def _constant(value: float, _: tuple[Block, ...]) -> float:
    return value


def _rate(group: tuple[Block, ...]) -> float:
    return group[0].values[0]


def _mean_gap_ms(group: tuple[Block, ...]) -> float:
    return 1e3 * statistics.fmean(group[0].values[1:])


def _gap_ms(percent: float, group: tuple[Block, ...]) -> float:
    return 1e3 * percentile(sorted(group[0].values[1:]), percent)


def _over(figure: _Figure, predicted: float, group: tuple[Block, ...]) -> float:
    return figure(group) / predicted


def _ratio(figure: _Figure, group: tuple[Block, ...]) -> float:
    return figure(group[:1]) / figure(group[1:])


def predictions_of(model: Path) -> tuple[list[ToldPrediction], str]:
    """What `baton up MODEL` would say now, and its line; takes half a minute. Raises `RuntimeError` if it says none."""
    # Imported here: the tested parts need none of it.
    from baton.services.cli.calibration.deployment import choose_deployment
    from baton.services.cli.settings import UpSettings
    from baton.settings.process import usable_cores

    note = choose_deployment(UpSettings(model=str(model)), usable_cores()).note
    return read_note(note), note


def run(
    shape: str, num_requests: int, num_rotations: int, seed: int, result: Path | None, console: Console
) -> tuple[list[Finding], list[Remark]]:
    """Runs all rotations and returns findings and remarks. Raises `RuntimeError` if a request fails."""
    from bench.harness.random_models import save_random_model

    with TemporaryDirectory(prefix="baton-bench-") as directory, contextlib.ExitStack() as stack:
        with console.status("step times"):
            model = save_random_model(SHAPES[shape], Path(directory) / shape, seed=seed)
            predictions, note = predictions_of(model)
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        vocabulary, clients = Vocabulary(SHAPES[shape].vocab_size, seed), {}
        for told in predictions:
            url = stack.enter_context(running_system(str(model), None, seed, flags_of(told), console)).url
            clients[told.name] = LoadClient(url, vocabulary, timeout_s=WAIT_S, clock=time.perf_counter)
        stack.callback(_close, runner, clients)
        for client in clients.values():
            runner.run(client.stream_gaps(NUM_AT_ONCE, PROMPT_TOKENS, 16))
        arms = {name: partial(_run_load, runner, client, num_requests) for name, client in clients.items()}
        remarks = [command_remark("bench.system.predictions"), Remark("line of baton up", note)]
        found, probe = partial(findings_of, predictions), MemcpyProbe()
        blocks = rotate(
            arms,
            lambda _: probe(),
            num_rotations=num_rotations,
            seed=seed,
            console=console,
            on_rotation=ResultFile(result, "predictions", num_rotations, found, remarks).write,
        )
    return found(blocks), remarks


def _run_load(runner: asyncio.Runner, client: LoadClient, num_requests: int) -> list[float]:
    return runner.run(_serve_load(client, num_requests))


def _close(runner: asyncio.Runner, clients: Mapping[str, LoadClient]) -> None:
    for client in clients.values():
        runner.run(client.close())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--requests", type=int, default=32, help="of a block")
    parser.add_argument("--rotations", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    flags = parser.parse_args()
    findings, remarks = run(
        flags.shape, flags.requests, flags.rotations, flags.seed, flags.result, Console(stderr=True)
    )
    console = Console()
    for remark in remarks:
        console.print(f"{remark.name}: {remark.text}", markup=False, highlight=False)
    console.print(table_of(findings))


if __name__ == "__main__":
    run_command(main)
