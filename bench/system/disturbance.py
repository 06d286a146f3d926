"""What makes gaps of decode long beside long prompts (G3), gap by gap, and what arrangements of threads change.

    python -m bench.system.disturbance [--shape m32] [--systems own lent] [--arrangements ...] [--rotations 3]
        [--seed 0] [--result FILE]

A split deployment runs on two cores, once with cores of its own for each worker and once with cores that idle workers
lend, and streams answers alone or while long prompts arrive, as in `interference`. At every token of the first stream
the client reads, from the scheduler's statistics, how long decode's engine thread ran, how long it waited for a core,
and the same of the threads on a token's way (decode's event loop, router, client). A gap's excess over the median gap
alone is ascribed, in this order, to

- steal: the host ran another guest;
- waits: the engine's thread could run and had no core, beyond its median alone;
- longer steps: it ran longer than its median alone, for the same work: memory, caches and clock are shared;
- way: a thread of the token's way waited for a core, or tokens of several steps came at once;
- rest: all else, such as an engine that slept until its team or its next step was ready.

The arms `copies` and `arithmetic` put, in place of prompts, a process on prefill's core that only copies memory, or
that only multiplies in its cache: what they do to a step is the machine's, whatever Baton does. Arrangements move or
demote threads from outside while the system runs, and take it back after their blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import uvloop
from rich.console import Console

from baton.services.cli.bench.load_generator import run_load
from baton.services.cli.bench.results.distribution import percentile
from baton.services.cli.bench.workload.prompts import Vocabulary
from bench.harness.model_shapes import SHAPES
from bench.harness.probes import LoopbackProbe
from bench.harness.rotations import Arm, Block, Finding, ResultFile, command_remark, make_finding, rotate, table_of
from bench.harness.running_system import running_system
from bench.harness.signals import run_command
from bench.harness.task_times import TaskTimes, WatchedThreads, service_processes, steal_s, task_ids
from bench.system.arrangements import ARRANGEMENTS, STARTED, SystemThreads, arranged
from bench.system.deployments import KV_MEMORY_MIB, OWN_CORES, SPLIT_FLAGS, WAIT_S
from bench.system.gap_causes import CAUSES, AloneTimes, GapRecord, excess_ms, records_of, slow_gaps, tail_gaps
from bench.system.interference import PROMPT_OUTPUT_TOKENS, STREAM_PROMPT_TOKENS, STREAM_TOKENS, plan_block, prompt_s
from bench.system.interference import parse as parse_interference
from bench.system.load_client import LoadClient

SYSTEMS = {"own": (*SPLIT_FLAGS, OWN_CORES), "lent": SPLIT_FLAGS}
ALONE, PROMPTS, COPIES, ARITHMETIC = "alone", "prompts", "copies", "arithmetic"
_HOGS = {
    COPIES: "import ctypes\na = ctypes.create_string_buffer(1 << 26)\nb = ctypes.create_string_buffer(1 << 26)\n"
    "print(flush=True)\nwhile True: ctypes.memmove(a, b, 1 << 26)",
    ARITHMETIC: "import numpy\na = numpy.ones((128, 128), numpy.float32)\nprint(flush=True)\nwhile True: a @ a",
}


class ReadTimes(Protocol):
    """Reads the times of some threads, such as `WatchedThreads`."""

    def read(self) -> TaskTimes: ...


class StepSampler:
    """Reads all watched threads at each call, and keeps the differences."""

    def __init__(self, clock: Callable[[], float], engine: ReadTimes, way: ReadTimes, prefill: ReadTimes) -> None:
        self._clock = clock
        self._watched = (engine, way, prefill)
        self._last: tuple[float, float, list[TaskTimes]] | None = None
        self.records: list[GapRecord] = []

    def __call__(self) -> None:
        now_s, stolen_s = self._clock(), steal_s()
        times = [tasks.read() for tasks in self._watched]
        if self._last is not None:
            then_s, then_stolen_s, before = self._last
            engine, way, prefill = (after.since(at) for after, at in zip(times, before, strict=True))
            self.records.append(
                GapRecord(
                    now_s - then_s,
                    engine.run_s,
                    engine.wait_s,
                    way.wait_s,
                    stolen_s - then_stolen_s,
                    prefill.run_s,
                    way.run_s,
                )
            )
        self._last = (now_s, stolen_s, times)


def findings_of(blocks: Sequence[Block]) -> list[Finding]:
    """The table."""
    findings = []
    for arm in sorted({block.arm for block in blocks}):
        system, arrangement, what = arm.split(": ")
        base = f"{system}: {arrangement}: {ALONE}"
        if not any(block.arm == base for block in blocks):
            continue
        findings += [
            make_finding(f"{arm}: p{percent} gap", "ms", blocks, (arm,), partial(_gap_ms, percent))
            for percent in (50, 99)
        ]
        findings.append(make_finding(f"{arm}: p50 run time of a step", "ms", blocks, (arm,), _run_ms))
        findings += [
            make_finding(f"{arm}: a gap of the slowest 1 %: {cause}", "ms", blocks, (arm, base), partial(_tail_ms, at))
            for at, cause in enumerate(CAUSES)
        ]
        if what == ALONE:
            continue
        findings.append(make_finding(f"{arm}: p99 gap / alone", "", blocks, (arm, base), _p99_ratio))
        findings.append(make_finding(f"{arm}: p50 gap / alone", "", blocks, (arm, base), _p50_ratio))
        findings += [
            make_finding(f"{arm}: share of slow gaps' excess: {cause}", "", blocks, (arm, base), partial(_share, at))
            for at, cause in enumerate(CAUSES)
        ]
    return findings


def _gaps(block: Block) -> list[float]:
    return sorted(record.gap_s for record in records_of(block))


def _gap_ms(percent: float, group: tuple[Block, ...]) -> float:
    return 1e3 * percentile(_gaps(group[0]), percent)


def _run_ms(group: tuple[Block, ...]) -> float:
    return 1e3 * statistics.median(record.run_s for record in records_of(group[0]))


def _p99_ratio(group: tuple[Block, ...]) -> float:
    return percentile(_gaps(group[0]), 99) / percentile(_gaps(group[1]), 99)


def _p50_ratio(group: tuple[Block, ...]) -> float:
    return percentile(_gaps(group[0]), 50) / percentile(_gaps(group[1]), 50)


def _tail_ms(cause: int, group: tuple[Block, ...]) -> float:
    records, alone = records_of(group[0]), AloneTimes.of(records_of(group[1]))
    return excess_ms(tail_gaps(records, alone), alone, cause)


def _share(cause: int, group: tuple[Block, ...]) -> float:
    alone = AloneTimes.of(records_of(group[1]))
    slow = slow_gaps(records_of(group[0]), alone)
    total = sum(excess_ms(slow, alone, at) for at in range(len(CAUSES)))
    return excess_ms(slow, alone, cause) / total if total else 0.0


@dataclass(frozen=True, slots=True)
class DisturbanceOptions:
    """One run's flags."""

    shape: str
    dtype: str
    streams: int
    systems: tuple[str, ...]
    arrangements: tuple[str, ...]
    alone_s: float
    rotations: int
    seed: int
    result: Path | None


class MeasuredSystem:
    """One running split deployment, its threads and a client. Closed by `close`."""

    def __init__(self, url: str, pids: dict[str, int], options: DisturbanceOptions, runner: asyncio.Runner) -> None:
        self._options = options
        self._runner = runner
        self.pids = pids
        vocabulary = Vocabulary(SHAPES[options.shape].vocab_size, options.seed)
        self.client = LoadClient(url, vocabulary, timeout_s=WAIT_S, clock=time.perf_counter)
        self.load = parse_interference(["--shape", options.shape, "--streams", str(options.streams)])
        self._turns = itertools.count()
        self.prompt_gap_s = 0.0

    def warm_up(self) -> None:
        """Finds the engine's threads by their work, and the rate of the prompts."""
        before = self._run_times()
        self._runner.run(self.client.stream_gaps(self._options.streams, STREAM_PROMPT_TOKENS, 100))
        self._runner.run(self.client.ask(self.load.prompt_tokens[1], PROMPT_OUTPUT_TOKENS))
        self.prompt_gap_s = prompt_s(self.load, self.client, self._runner) / self.load.load
        after = self._run_times()
        worked = {task: after[task] - before.get(task, 0.0) for task in after}
        engines = {
            name: max((task for task in worked if task[0] == pid), key=worked.__getitem__)
            for name, pid in self.pids.items()
            if name in ("prefill", "decode")
        }
        self.tasks = SystemThreads(
            engine=engines["decode"],
            prefill=[(self.pids["prefill"], tid) for tid in task_ids(self.pids["prefill"])],
            loops=[task for task in after if task[0] == self.pids["decode"] and task != engines["decode"]],
            others=[task for task in after if task[0] in (self.pids["router"], self.pids["redis"], os.getpid())],
        )
        way = [(pid, pid) for pid in (self.pids["decode"], self.pids["router"], os.getpid())]
        self._watched = [WatchedThreads.of(tasks) for tasks in ([self.tasks.engine], way, [engines["prefill"]])]

    def _run_times(self) -> dict[tuple[int, int], float]:
        found = {}
        for pid in (*self.pids.values(), os.getpid()):
            for tid in task_ids(pid):
                tasks = WatchedThreads.of([(pid, tid)])
                found[(pid, tid)] = tasks.read().run_s
                tasks.close()
        return found

    def measure(self, arrangement: str, what: str) -> list[float]:
        """A block: flat `GapRecord`s."""
        with arranged(self.tasks, arrangement), _hog(what):
            return [value for record in self._runner.run(self._measure(what)) for value in record]

    async def _measure(self, what: str) -> list[GapRecord]:
        sampler = StepSampler(time.perf_counter, *self._watched)
        streams = self.client.running_streams(self._options.streams, STREAM_PROMPT_TOKENS, STREAM_TOKENS, sampler)
        async with streams:
            sampler.records.clear()
            if what == PROMPTS:
                plan = plan_block(self.load, self.prompt_gap_s, self.client.draw, next(self._turns))
                await run_load(plan, self.client.send, clock=time.perf_counter)
            else:
                await asyncio.sleep(self._options.alone_s)
            return list(sampler.records)

    def close(self) -> None:
        self._runner.run(self.client.close())


@contextlib.contextmanager
def _hog(what: str) -> Iterator[None]:
    """Runs a process on core 0, prefill's, for an arm that needs one."""
    if what not in _HOGS:
        yield
        return
    command = ["taskset", "--cpu-list", "0", sys.executable, "-c", _HOGS[what]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def run(options: DisturbanceOptions, console: Console) -> list[Finding]:
    """Runs all rotations. Raises `RuntimeError` if a request fails."""
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        arms: dict[str, Arm] = {}
        for name in options.systems:
            known = set(service_processes(os.getpid()).values())
            flags = (*SYSTEMS[name], "--dtype", options.dtype, "--kv-memory-mib", str(KV_MEMORY_MIB))
            url = stack.enter_context(running_system("", options.shape, options.seed, flags, console)).url
            pids = {role: pid for role, pid in service_processes(os.getpid()).items() if pid not in known}
            system = MeasuredSystem(url, pids, options, runner)
            stack.callback(system.close)
            with console.status("a first round, which does not count"):
                system.warm_up()
            arms |= _arms_of(name, system, options)
        probe = LoopbackProbe()
        remarks = [command_remark("bench.system.disturbance")]
        blocks = rotate(
            arms,
            lambda _: probe(),
            num_rotations=options.rotations,
            seed=options.seed,
            console=console,
            on_rotation=ResultFile(options.result, "disturbance", options.rotations, findings_of, remarks).write,
        )
    return findings_of(blocks)


def _arms_of(name: str, system: MeasuredSystem, options: DisturbanceOptions) -> dict[str, Arm]:
    kinds = [(each, what) for each in options.arrangements for what in (ALONE, PROMPTS)]
    if name == "own":  # threads that borrow prefill's core would share it with these
        kinds += [(STARTED, what) for what in _HOGS]
    return {f"{name}: {each}: {what}": partial(system.measure, each, what) for each, what in kinds}


def parse(arguments: Sequence[str] | None = None) -> DisturbanceOptions:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="m32", help="its decode steps must wait for memory")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS])
    parser.add_argument("--arrangements", nargs="+", choices=ARRANGEMENTS, default=[*ARRANGEMENTS])
    parser.add_argument("--alone-s", type=float, default=3.0, help="length of a block without prompts")
    parser.add_argument("--rotations", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    flags: dict[str, Any] = vars(parser.parse_args(arguments))
    lists = {name: tuple(flags[name]) for name in ("systems", "arrangements")}
    return DisturbanceOptions(**{**flags, **lists})


def main() -> None:
    """Command line."""
    Console().print(table_of(run(parse(), Console(stderr=True))))


if __name__ == "__main__":
    run_command(main)
