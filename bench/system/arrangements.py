"""Arrangements of a running system's threads: on which cores, and with which weight. Used by `disturbance`.

They are made from outside, so that arms with and without one can interleave on one system. Linux only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

STARTED = "as started"
OTHERS_AWAY = "router, Redis and client on prefill's core"
LOOPS_AWAY = "decode's other threads there, too"
BATCH = "prefill as batch"
NICE = "router, Redis and client nice"
ARRANGEMENTS = (STARTED, OTHERS_AWAY, LOOPS_AWAY, BATCH, NICE)
PREFILL_CORE = 0
NICENESS = 10

Task = tuple[int, int]
"""Ids of a process and one of its threads."""


@dataclass(frozen=True, slots=True)
class SystemThreads:
    """Threads of one system. `loops`: decode's but for its engine's. `others`: of router, Redis and client."""

    engine: Task
    prefill: Sequence[Task]
    loops: Sequence[Task]
    others: Sequence[Task]


@contextlib.contextmanager
def arranged(tasks: SystemThreads, arrangement: str) -> Iterator[None]:
    """Makes an arrangement and takes it back. Threads that have ended are left out. Raises `PermissionError`.

    `NICE` is taken back only where the user may lower a niceness.
    """
    with contextlib.ExitStack() as stack:
        if arrangement in (OTHERS_AWAY, LOOPS_AWAY):
            moved = [*tasks.others, *(tasks.loops if arrangement == LOOPS_AWAY else ())]
            for _, tid in moved:
                stack.enter_context(_on_core(tid, PREFILL_CORE))
        elif arrangement == BATCH:
            for _, tid in tasks.prefill:
                stack.enter_context(_as_batch(tid))
        elif arrangement == NICE:
            for _, tid in tasks.others:
                stack.enter_context(_nice(tid))
        yield


@contextlib.contextmanager
def _on_core(tid: int, core: int) -> Iterator[None]:
    before: set[int] = set()
    with contextlib.suppress(ProcessLookupError):
        before = os.sched_getaffinity(tid)
    _ignoring_ended(os.sched_setaffinity, tid, {core})
    try:
        yield
    finally:
        if before:
            _ignoring_ended(os.sched_setaffinity, tid, before)


@contextlib.contextmanager
def _as_batch(tid: int) -> Iterator[None]:
    zero = os.sched_param(0)
    _ignoring_ended(os.sched_setscheduler, tid, os.SCHED_BATCH, zero)
    try:
        yield
    finally:
        _ignoring_ended(os.sched_setscheduler, tid, os.SCHED_OTHER, zero)


@contextlib.contextmanager
def _nice(tid: int) -> Iterator[None]:
    _ignoring_ended(os.setpriority, os.PRIO_PROCESS, tid, NICENESS)
    try:
        yield
    finally:
        _ignoring_ended(os.setpriority, os.PRIO_PROCESS, tid, 0)


def _ignoring_ended(call: Callable[..., object], *arguments: object) -> None:
    with contextlib.suppress(ProcessLookupError):
        call(*arguments)
