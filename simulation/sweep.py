"""Runs many seeds in several processes and shows progress. Used by `__main__`; knows scenarios only by seed.

Seeds are taken in order, a chunk at a time, so a stopped sweep can continue from the first unverified seed. The first
violation ends it.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from threading import Event
from typing import TextIO

from baton.settings.process import freeze_gc
from simulation.run import run
from simulation.scenario_generator import generate_scenario

CHUNK_SEEDS = 10
BAR_CHARACTERS = 30
LOOK_INTERVAL_S = 1.0
YOUNG_OBJECTS = 20_000
"""Objects that are made between two collections."""
LINE_INTERVAL_S = 30.0
"""Interval of progress lines without a terminal."""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Result of a sweep. `next_seed`: all seeds before it are good. `failing_seed`: the seed that ended the sweep.

    Without a failing seed `next_seed` is the end, unless the sweep was interrupted.
    """

    num_good: int
    next_seed: int
    failing_seed: int | None


def sweep(first: int, num_seeds: int, num_jobs: int, progress: Callable[[int], None]) -> SweepResult:
    """Runs seeds `first .. first + num_seeds - 1`, until SIGINT. `progress` receives the number of good seeds."""
    last = first + num_seeds
    chunks = (range(start, min(start + CHUNK_SEEDS, last)) for start in range(first, last, CHUNK_SEEDS))
    open_chunks: dict[Future[int | None], range] = {}
    num_good, failed = 0, set[int]()
    with _interrupted() as interrupted, _pool(num_jobs) as pool:
        while not failed and not interrupted.is_set():
            for chunk in islice(chunks, max(0, 2 * num_jobs - len(open_chunks))):
                open_chunks[pool.submit(failing_seed, chunk)] = chunk
            if not open_chunks:
                break
            done, _ = wait(open_chunks, timeout=LOOK_INTERVAL_S, return_when=FIRST_COMPLETED)
            for future in done:
                seed = future.result()
                if seed is None:
                    num_good += len(open_chunks.pop(future))
                else:
                    failed.add(seed)
            progress(num_good)
        pool.shutdown(wait=True, cancel_futures=True)
    next_seed = min((chunk.start for chunk in open_chunks.values()), default=last)
    return SweepResult(num_good, next_seed, min(failed, default=None))


def sweep_here(
    first: int, num_seeds: int, progress: Callable[[int], None], find: Callable[[range], int | None]
) -> SweepResult:
    """As `sweep`, in this process: SIGINT ends it after the seed that runs. `find` is `failing_seed`."""
    with _interrupted() as interrupted:
        for num_good, seed in enumerate(range(first, first + num_seeds)):
            if interrupted.is_set():
                return SweepResult(num_good, seed, None)
            if find(range(seed, seed + 1)) is not None:
                return SweepResult(num_good, seed, seed)
            progress(num_good + 1)
    return SweepResult(num_seeds, first + num_seeds, None)


@contextmanager
def _interrupted() -> Iterator[Event]:
    """Event that SIGINT sets inside the context."""
    interrupted = Event()
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _pool(num_jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(num_jobs, mp_context=get_context("spawn"), initializer=_prepare_process)


def _prepare_process() -> None:
    """Ignores SIGINT, which is for the parent; a child ends its chunk.

    Collects garbage less often: a run leaves little.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    freeze_gc()
    gc.set_threshold(YOUNG_OBJECTS)


def failing_seed(seeds: range) -> int | None:
    """The first of `seeds` with a violation."""
    return next((seed for seed in seeds if run(generate_scenario(seed)).violation is not None), None)


def num_cores() -> int:
    """Number of usable cores."""
    return len(os.sched_getaffinity(0))


class ProgressBar:
    """Draws progress to a terminal, or writes a line now and then to anything else."""

    def __init__(self, first: int, num_seeds: int, out: TextIO) -> None:
        self._first = first
        self._num_seeds = num_seeds
        self._out = out
        self._began_at = self._shown_at = time.monotonic()

    def show(self, num_good: int) -> None:
        """Reports the number of good seeds."""
        now = time.monotonic()
        if self._out.isatty():
            self._out.write("\r" + "".join(self._parts(num_good, now)) + ("\n" if num_good == self._num_seeds else ""))
        elif now - self._shown_at >= LINE_INTERVAL_S:
            self._shown_at = now
            self._out.write("".join(self._parts(num_good, now)) + "\n")
        self._out.flush()

    def _parts(self, num_good: int, now: float) -> Iterator[str]:
        rate = num_good / max(now - self._began_at, 1e-9)
        filled = BAR_CHARACTERS * num_good // self._num_seeds
        yield f"[{'#' * filled:.<{BAR_CHARACTERS}}] {num_good}/{self._num_seeds} seeds from {self._first}"
        yield f", {rate:.1f}/s, {(self._num_seeds - num_good) / max(rate, 1e-9):.0f} s left"
