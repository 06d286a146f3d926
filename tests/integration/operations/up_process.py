"""`baton up` as a process: what it prints until it serves, its children, and what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import IO

from baton.services.cli.processes.ports import free_ports
from tests.cluster import START_TIMEOUT_S, eventually
from tests.lateness import Late

STOP_TIMEOUT_S = 60.0
GONE_TIMEOUT_S = 30.0


@dataclass
class UpProcess:
    """A system that serves. `lines`: what it has printed. `temporary`: its directory for temporary files."""

    popen: subprocess.Popen[str]
    lines: list[str]
    port: int
    temporary: Path
    errors: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def children(self) -> dict[int, str]:
        """Command lines of its living children by pid."""
        return children_of(self.popen.pid)

    def child(self, words: str) -> int | None:
        """The pid of the child whose command line has these words."""
        return next((pid for pid, command in self.children().items() if re.search(words, command)), None)

    def end(self, *signals: signal.Signals) -> int:
        """Sends signals and returns the exit code; nothing must be left then."""
        family = self.children()
        for number in signals:
            self.popen.send_signal(number)
        exit_code = self.popen.wait(STOP_TIMEOUT_S)
        eventually(lambda: not any(map(exists, family)), GONE_TIMEOUT_S, f"every child has gone: {family}")
        left = [path.name for path in self.temporary.iterdir() if path.name.startswith("baton")]
        assert left == [], "no socket, no folder (torch keeps a cache of its own there)"
        return exit_code


@contextmanager
def running_up(folder: Path, *flags: str) -> Iterator[UpProcess]:
    """A system that serves; killed at the end, if it runs still."""
    temporary, errors = folder / "tmp", folder / "stderr"
    temporary.mkdir()
    [port] = free_ports(1)
    process, lines = started(port, temporary, errors, flags)
    try:
        yield UpProcess(process, lines, port, temporary, errors)
    finally:
        process.kill()
        process.wait(10.0)


def started(
    port: int, temporary: Path, errors: Path, flags: tuple[str, ...] = ()
) -> tuple[subprocess.Popen[str], list[str]]:
    """`baton up`, and what it prints until it serves. Started again where another test has taken a planned port."""
    for _ in range(5):
        process = spawned(port, temporary, errors, flags)
        assert process.stdout is not None
        try:
            return process, lines_until(process.stdout, "Ctrl-C", START_TIMEOUT_S)
        except AssertionError:
            try:
                process.wait(30.0)  # it ends its children
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10.0)
            if "in use by another process" not in errors.read_text():
                raise
    raise AssertionError("five times a port was taken between its choice and its use")


def spawned(port: int, temporary: Path, errors: Path, flags: tuple[str, ...]) -> subprocess.Popen[str]:
    """`baton up` that has just been started."""
    command = [sys.executable, "-m", "baton.services.cli.entry", "up", f"--port={port}", "--kv-memory-mib=64", *flags]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with errors.open("wb") as stderr:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)


def lines_until(stream: IO[str], last: str, timeout_s: float) -> list[str]:
    """Output up to a line that begins with `last`."""
    printed: Queue[str] = Queue()
    threading.Thread(target=_read_lines, args=(stream, printed), daemon=True).start()
    lines: list[str] = []
    while not lines or not lines[-1].startswith(last):
        try:
            line = printed.get(timeout=timeout_s)
        except Empty:
            raise Late(f"no line within {timeout_s} s, and none that begins with {last!r}: {lines}") from None
        if not line:
            raise AssertionError(f"no line begins with {last!r}: {lines}")
        lines.append(line.rstrip())
    return lines


def children_of(pid: int) -> dict[int, str]:
    """Command lines of the living children of a process by pid."""
    command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(pid)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return {int(line.split()[0]): line.strip().partition(" ")[2] for line in found.splitlines()}


def exists(pid: int) -> bool:
    """True until a process has been reaped."""
    return Path(f"/proc/{pid}").exists()


def _read_lines(stream: IO[str], printed: Queue[str]) -> None:
    for line in stream:
        printed.put(line)
    printed.put("")
    stream.close()
