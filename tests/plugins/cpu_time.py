"""Which files of tests use the processor: a table after the run. With all cores busy, a wall time names the neighbours.

Counted are this process, the children that it has waited for, and its fork server with the children that have ended
(`chaos.testbed.fork_server`). What a cluster uses counts for the test after which its processes ended.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

COLLECTION = "(imports and collection)"
MAX_ROWS = 40
MIN_SECONDS = 5.0
OUTPUT = "cpu_seconds"
FORK_SERVER = "chaos.testbed.fork_server"
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """CPU time, in seconds, of this process and all that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + _fork_server_seconds()


def _fork_server_seconds() -> float:
    module = sys.modules.get(FORK_SERVER)
    if module is None or not module.shared_fork_server.cache_info().currsize:
        return 0.0
    try:
        stat = Path(f"/proc/{module.shared_fork_server().pid}/stat").read_text()
    except OSError:
        return 0.0
    return sum(map(int, stat.rpartition(")")[2].split()[11:15])) / TICKS_A_SECOND


class CpuTimePlugin:
    """Adds up CPU time by file, in every process of the run, and writes the sums at its end."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._seconds[COLLECTION] += cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = cpu_seconds()
        result = yield
        self._seconds[item.nodeid.partition("::")[0]] += cpu_seconds() - before
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[OUTPUT] = dict(self._seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A process of xdist has ended; one that crashed has no output."""
        for name, seconds in getattr(node, "workeroutput", {}).get(OUTPUT, {}).items():
            self._seconds[name] += seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        costly = sorted(self._seconds.items(), key=lambda row: -row[1])[:MAX_ROWS]
        rows = [(name, seconds) for name, seconds in costly if seconds >= MIN_SECONDS]
        if not rows:
            return
        terminalreporter.section(f"CPU time by file, of {sum(self._seconds.values()):.0f} s")
        for name, seconds in rows:
            terminalreporter.write_line(f"{seconds:7.1f} s  {name}")
