"""Run time and run-queue wait of threads, from the kernel's scheduler statistics. Linux only.

Used by `bench.system.disturbance`, which reads some threads once a decode step: files stay open, so that a reading
takes some microseconds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from bench.harness.probes import process_tree

NS = 1e-9
_STEAL = 8
"""Field of the first line of `/proc/stat`."""


class TaskTimes(NamedTuple):
    """Seconds that a thread ran, and that it could have run but waited for a core, since its start."""

    run_s: float
    wait_s: float

    def since(self, before: TaskTimes) -> TaskTimes:
        return TaskTimes(self.run_s - before.run_s, self.wait_s - before.wait_s)


@dataclass(slots=True)
class WatchedThreads:
    """Threads that are read together; their times are summed. Ended threads keep their last times."""

    files: list[int]
    last: list[TaskTimes]

    @classmethod
    def of(cls, tasks: list[tuple[int, int]]) -> Self:
        """`tasks`: pairs of process and thread id. Raises `OSError` for one that does not exist."""
        files = [os.open(f"/proc/{pid}/task/{tid}/schedstat", os.O_RDONLY) for pid, tid in tasks]
        return cls(files, [TaskTimes(0.0, 0.0)] * len(files))

    def read(self) -> TaskTimes:
        """The sum over all threads."""
        for at, file in enumerate(self.files):
            try:
                run, wait, _ = os.pread(file, 96, 0).split()
            except (OSError, ValueError):  # it has ended
                continue
            self.last[at] = TaskTimes(int(run) * NS, int(wait) * NS)
        return TaskTimes(sum(times.run_s for times in self.last), sum(times.wait_s for times in self.last))

    def close(self) -> None:
        for file in self.files:
            os.close(file)


def task_ids(pid: int) -> list[int]:
    """Ids of all threads of a process. Raises `OSError` if it does not exist."""
    return sorted(int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir())


def steal_s() -> float:
    """Seconds that the host gave to other guests, over all cores, in units of a clock tick."""
    first = Path("/proc/stat").read_text().partition("\n")[0].split()
    return int(first[_STEAL]) / os.sysconf("SC_CLK_TCK")


def service_processes(pid: int) -> dict[str, int]:
    """Processes of a `baton up` below process `pid`: prefill, decode, router and redis, by name."""
    found: dict[str, int] = {}
    for each in process_tree(pid)[1:]:
        try:
            words = Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"serve" in words:
            found[words[words.index(b"serve") + 1].decode()] = each
        elif b"redis-server" in words[0]:
            found["redis"] = each
    return found
