"""Kills one process of a pair while reads move between them; prints what became of the other, counted.

    python -m tests.unit.transfer.killing.kill_pair CASE TRANSPORT NUMBER [SECONDS]

Transports are those of `rigs.ENVIRONMENTS`. Killed process and survivor are children of their own, as UCX may abort
the survivor. A survivor is kept for the next kill. No kill begins after SECONDS.
"""

from __future__ import annotations

import enum
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from baton.domain.ids import Incarnation, WorkerId
from baton.kv.memory import PageMemory
from baton.settings.ucx import prepare_environment
from baton.transfer.base import Pull, PullOutcome, SourceInfo
from baton.transfer.nixl import NixlPuller, NixlSource
from tests.unit.transfer.rigs import ENVIRONMENTS, EventLog, page_ids

ID, NUM_PAGES, PAGE_BYTES = WorkerId("prefill-0"), 64, 64 * 1024
WAIT_S = 30.0
MAX_MOVING_S = 0.02
READING = "reading"


class Case(enum.Enum):
    """Which process is killed. `STOPPED`: the source was stopped before, with reads under way."""

    SOURCE = "source"
    STOPPED_SOURCE = "stopped-source"
    READER = "reader"
    READER_OF_STOPPED = "reader-of-stopped"

    @property
    def stops(self) -> bool:
        return self in (Case.STOPPED_SOURCE, Case.READER_OF_STOPPED)

    @property
    def kills_source(self) -> bool:
        return self in (Case.SOURCE, Case.STOPPED_SOURCE)


class Child:
    """A forked process with a pipe. Its parent has no agent, so it may fork."""

    def __init__(self, main: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(WAIT_S)

    def hear(self) -> Any:
        """What the child sends; `exit -6` if it aborted instead, `hangs` if it is silent."""
        try:
            return self.pipe.recv() if self.pipe.poll(WAIT_S) else "hangs"
        except (EOFError, ConnectionError):
            self._process.join(WAIT_S)
            return f"exit {self._process.exitcode}"

    def lives(self) -> bool:
        return self._process.is_alive()


def serve(pipe: Connection, environment: Mapping[str, str], incarnation: int) -> None:
    """Serves the pool until the parent ends."""
    prepare_environment(environment)
    memory = PageMemory(NUM_PAGES, PAGE_BYTES)
    source = NixlSource(ID, Incarnation(incarnation), memory)
    address = memory.address
    pipe.send(SourceInfo(ID, Incarnation(incarnation), "", "nixl", source.metadata(), address, NUM_PAGES, PAGE_BYTES))
    pipe.recv()


def read(pipe: Connection, environment: Mapping[str, str]) -> None:
    """Pulls every page of each source that it gets, again and again, until a pull fails."""
    prepare_environment(environment)
    events = EventLog()
    puller = NixlPuller(WorkerId("decode-0"), Incarnation(1), PageMemory(NUM_PAGES, PAGE_BYTES), events)
    # In reverse order: adjacent pages would be read at once.
    local, remote = page_ids(range(NUM_PAGES)), page_ids(list(reversed(range(NUM_PAGES))))
    while True:
        puller.connect(pipe.recv())
        for number in itertools.count():
            pull = Pull(number, ID, remote, local, None, WAIT_S)
            puller.submit(pull)
            event = events.terminal(pull)
            if number == 0:
                pipe.send(READING if event.outcome is PullOutcome.DONE else event.reason)
            if event.outcome is not PullOutcome.DONE:
                pipe.send(f"{event.outcome.value}: {event.reason}")
                break


def kill_sources(case: Case, environment: Mapping[str, str]) -> Iterator[str]:
    """What became of the reader, kill by kill."""
    random_, reader = random.Random(case.value), Child(read, environment)
    for incarnation in itertools.count(1):
        if not reader.lives():
            reader = Child(read, environment)
        source = Child(serve, environment, incarnation)
        begin_reads(reader, source.hear())
        pause(case, source, random_)
        source.kill()
        yield str(reader.hear())


def kill_readers(case: Case, environment: Mapping[str, str]) -> Iterator[str]:
    """What became of the source, kill by kill: it serves the next reader, or how it ended."""
    random_, reader = random.Random(case.value), Child(read, environment)
    source = Child(serve, environment, 1)
    info = source.hear()
    begin_reads(reader, info)
    for _ in itertools.count():
        pause(case, source, random_)
        reader.kill()
        source.signal(signal.SIGCONT)
        reader = Child(read, environment)
        reader.pipe.send(info)
        if (said := reader.hear()) == READING:
            yield "serves"
            continue
        yield str(source.hear()) if source.pipe.poll(WAIT_S) else str(said)
        reader.kill()
        source.kill()
        source, reader = Child(serve, environment, 1), Child(read, environment)
        info = source.hear()
        begin_reads(reader, info)


def begin_reads(reader: Child, source: SourceInfo) -> None:
    reader.pipe.send(source)
    assert (said := reader.hear()) == READING, said


def pause(case: Case, source: Child, random_: random.Random) -> None:
    """Lets reads move for a while, and stops the source if the case wants it; reads then wait in its socket."""
    time.sleep(random_.uniform(0.0, MAX_MOVING_S))
    if case.stops:
        source.signal(signal.SIGSTOP)
        time.sleep(MAX_MOVING_S)


def count_outcomes(case: Case, transport: str, number: int, seconds: float) -> dict[str, int]:
    """Outcomes of up to `number` kills, none of which begins after `seconds`."""
    outcomes = (kill_sources if case.kills_source else kill_readers)(case, ENVIRONMENTS[transport])
    counts: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    while counts.total() < number and time.monotonic() < deadline:
        counts[next(outcomes)] += 1
    return dict(counts)


def run(words: Sequence[str]) -> int:
    """Runs the command; returns its exit code. Without a thread: a fork server calls it, too."""
    case, transport, number, *seconds = words
    counts = count_outcomes(Case(case), transport, int(number), float(seconds[0]) if seconds else 600.0)
    sys.stdout.write(f"\n{json.dumps(counts)}\n")  # a line of its own: UCX may write as well
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
