"""Times a model's steps on this machine: `python -m` this module, with a `ProbePlan` as JSON in its standard input.

Prints `StepCalibration` as JSON. It imports the engine once and forks a process for each of three engines, which are
built as a worker's is: decode's rows and prefill's chunks on their own cores at the same time, then rows and chunks
together on all cores. Weights are shared with the workers that start next.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from typing import TYPE_CHECKING, Any

from baton.domain.arithmetic import ceil_div
from baton.domain.ids import AttemptId, PageId, RequestId
from baton.domain.request import SamplingParams
from baton.services.cli.calibration.prediction import StepCalibration
from baton.services.cli.processes.die_with_parent import end_with_parent
from baton.services.decode.settings import DecodeSettings
from baton.settings.process import end_process, limit_cores

if TYPE_CHECKING:
    from baton.engine.batch import Row
    from baton.engine.build import Engine

NUM_ROWS = 8
CONTEXT_TOKENS = 256
CHUNKS = (16, 32, 64, 128, 256)
SPLIT_CHUNK_TOKENS = 256
PHASE_S = 1.0
MIXED_S = 0.25
MIN_STEPS = 3
DEADLINE_S = 150.0
"""For all engines together. A model whose steps take longer is not timed."""
_FIRST_TOKEN = 4


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """`flags`: of a decode worker. Cores and threads: those that the workers of each deployment would have."""

    flags: dict[str, Any]
    prefill_cores: tuple[int, ...]
    decode_cores: tuple[int, ...]
    threads: int
    all_cores: tuple[int, ...]
    all_threads: int


class StepTimer:
    """Batches for an engine with nothing in its pool, and the time of their steps."""

    def __init__(self, engine: Engine, page_size: int) -> None:
        self._runner = engine.runner
        self._page_size = page_size
        self._vocab_size = engine.vocab_size
        self._pages: Iterator[int] = iter(range(engine.memory.num_pages))
        self._random = random.Random(0)

    def rows(self) -> list[Row]:
        """`NUM_ROWS` rows with `CONTEXT_TOKENS` tokens, the new one included."""
        return [self._row(CONTEXT_TOKENS, CONTEXT_TOKENS - 1) for _ in range(NUM_ROWS)]

    def chunk(self, num_tokens: int) -> Row:
        """The first tokens of a prompt that goes on."""
        return self._row(num_tokens, 0)

    def step(self, rows: list[Row]) -> None:
        """Runs one step of `rows`."""
        from baton.engine.batch import Batch

        self._runner.run(Batch(tuple(rows)))

    def seconds(self, rows: list[Row], least_s: float) -> float:
        """Median time of a step. Takes `least_s` and `MIN_STEPS` steps at least, after one that is not timed."""
        self.step(rows)
        began, found = time.monotonic(), list[float]()
        while len(found) < MIN_STEPS or time.monotonic() - began < least_s:
            step_began = time.perf_counter()
            self.step(rows)
            found.append(time.perf_counter() - step_began)
        return statistics.median(found)

    def _row(self, num_tokens: int, start: int) -> Row:
        from baton.engine.batch import Row, SampleSpec

        tokens = self._random.choices(range(_FIRST_TOKEN, self._vocab_size), k=num_tokens)
        pages = [PageId(next(self._pages)) for _ in range(ceil_div(num_tokens, self._page_size))]
        greedy = SampleSpec(SamplingParams(temperature=0.0), tokens, start)
        return Row(AttemptId(RequestId(f"calibration-{pages[0]}"), 1), tokens[start:], start, pages, greedy)


def num_pages(page_size: int) -> int:
    """Pages of the largest step, and the one that a pool keeps."""
    return NUM_ROWS * ceil_div(CONTEXT_TOKENS, page_size) + ceil_div(SPLIT_CHUNK_TOKENS, page_size) * len(CHUNKS) + 1


def measure(plan: ProbePlan) -> StepCalibration:
    """Forks the engines. Raises `RuntimeError` if one of them ends or all are late."""
    importlib.import_module("baton.engine.build")  # once, for all of them
    context, deadline = multiprocessing.get_context("fork"), time.monotonic() + DEADLINE_S
    start, num_timed = context.Barrier(2, timeout=DEADLINE_S), context.Value("i", 0)

    def split_rows(timer: StepTimer) -> float:
        return _seconds_beside(timer, timer.rows(), start, num_timed)

    def split_chunks(timer: StepTimer) -> float:
        return _seconds_beside(timer, [timer.chunk(SPLIT_CHUNK_TOKENS)], start, num_timed)

    def mixed(timer: StepTimer) -> list[float]:
        rows = timer.rows()
        return [timer.seconds(rows, MIXED_S), *(timer.seconds([*rows, timer.chunk(each)], MIXED_S) for each in CHUNKS)]

    row_s, chunk_s = _run(
        context,
        deadline,
        (plan.decode_cores, plan.threads, plan.flags, split_rows),
        (plan.prefill_cores, plan.threads, plan.flags, split_chunks),
    )
    [[alone_s, *mixed_s]] = _run(context, deadline, (plan.all_cores, plan.all_threads, plan.flags, mixed))
    rate = SPLIT_CHUNK_TOKENS / chunk_s
    return StepCalibration(NUM_ROWS, alone_s, dict(zip(CHUNKS, mixed_s, strict=True)), row_s, rate)


def _seconds_beside(timer: StepTimer, rows: list[Row], start: Barrier, num_timed: Synchronized[int]) -> float:
    """Median time of a step beside another engine. Both start together, and each steps on until both are timed."""
    start.wait()
    seconds = timer.seconds(rows, PHASE_S)
    with num_timed.get_lock():
        num_timed.value += 1
    while num_timed.value < 2:
        timer.step(rows)
    return seconds


_EngineRun = tuple[tuple[int, ...], int, dict[str, Any], Callable[[StepTimer], Any]]


def _run(context: ForkContext, deadline: float, *runs: _EngineRun) -> list[Any]:
    """Runs each in a process of its own, all at once. Their results, in order. The first failure ends all."""
    started: list[tuple[ForkProcess, Connection]] = []
    try:
        for run in runs:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(os.getpid(), sender, *run), daemon=True)
            process.start()
            sender.close()
            started.append((process, receiver))
        return _results([receiver for _, receiver in started], deadline)
    finally:
        for process, _ in started:
            process.kill()
            process.join()


def _results(receivers: Sequence[Connection], deadline: float) -> list[Any]:
    found: dict[Connection, Any] = {}
    while missing := [receiver for receiver in receivers if receiver not in found]:
        ready = wait(missing, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"no step times within {DEADLINE_S:.0f} s")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            found[receiver] = _result(receiver)
    return [found[receiver] for receiver in receivers]


def _result(receiver: Connection) -> Any:
    try:
        result = receiver.recv()
    except EOFError:
        raise RuntimeError("an engine ended before its steps were timed") from None
    if isinstance(result, Exception):
        raise RuntimeError(str(result))
    return result


def _child(
    parent: int,
    sender: Connection,
    cores: tuple[int, ...],
    threads: int,
    flags: dict[str, Any],
    run: Callable[[StepTimer], Any],
) -> None:
    end_with_parent(parent, signal.SIGKILL)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what an engine logs
    try:
        limit_cores(cores)
        sender.send(run(_timer(flags, threads)))
    except Exception as error:
        sender.send(RuntimeError(str(error)))


def _timer(flags: dict[str, Any], threads: int) -> StepTimer:
    """Builds an engine as a decode worker does. Raises `RuntimeError` for one on a GPU."""
    from baton.engine.build import build_engine

    settings = DecodeSettings(**flags, threads=threads, num_pages=num_pages(flags["page_size"]), window_slots="off")
    engine = build_engine(settings, num_host_pages=0)
    if engine.runner.is_async:
        raise RuntimeError("the model runs on a GPU")
    return StepTimer(engine, settings.page_size)


def main() -> None:
    """Reads the plan, prints the times, and ends."""
    try:
        times = measure(ProbePlan(**json.load(sys.stdin)))
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        end_process(1)
    sys.stdout.write(json.dumps(asdict(times)) + "\n")
    end_process(0)


if __name__ == "__main__":
    main()
